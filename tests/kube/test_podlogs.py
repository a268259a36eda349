"""A log that is followed is followed to its container's end; a server plays the apiserver and the kubelet."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp import web
from small_apiserver import connected
from tests.kube.documents import pod

from holdfast_controller.cluster import NotFound, Unavailable
from holdfast_controller.kube import podlogs
from holdfast_controller.kube.podlogs import pod_lines

SAID = [f"2026-05-01T12:00:0{at}.{at}00000000{at}Z step {at}" for at in (1, 2, 3, 4)]
SAID.insert(2, "2026-05-01T12:00:02.200000003Z a line of the same second")
SHOWN = [line.partition(" ")[2] for line in SAID]
KUBELET_SAYS = {
    "container is removed": "unable to retrieve container logs for containerd://0ab1",
    "file is removed": 'failed to try resolving symlinks in path "/var/log/pods/team_gpt_1/pytorch/0.log":'
    " lstat /var/log/pods/team_gpt_1: no such file or directory",
    "many follow from the start": "failed to create fsnotify watcher: too many open files",
}
"""After the answer has begun, so it comes as if it were the log."""


def body(since: str = "", until: int = len(SAID), part: str = "", file: int = 0) -> str:
    """What a kubelet has of the log from `since` on, by whole seconds as it is told, and a part of a line;
    its file begins with the line `file`."""
    return "".join(f"{line}\n" for line in SAID[file:until] if line[:19] >= since[:19]) + part


class Log:
    """Each connection takes the next of `ways` in which it goes; the last one is whole."""

    def __init__(self, *ways: str, next_file: int = 0) -> None:
        self.ways, self.next_file = list(ways), next_file
        self.whole = False

    async def read(self, request: web.Request) -> web.StreamResponse:
        assert (request.query["follow"], request.query["timestamps"]) == ("true", "true")
        way = self.ways.pop(0) if self.ways else "whole"
        if way == "kubelet is down":
            return web.json_response({"message": "dial tcp 10.0.0.2:10250: connection refused"}, status=500)
        if way == "pod is gone":
            return web.json_response({"message": "pods not found"}, status=404)
        self.whole = way == "whole"
        answer = web.StreamResponse()
        await answer.prepare(request)
        if way in KUBELET_SAYS:
            await answer.write(KUBELET_SAYS[way].encode())
            return answer
        if way == "many follow":
            await answer.write((body(until=2) + KUBELET_SAYS["many follow from the start"]).encode())
            return answer
        since = request.query.get("sinceTime", "")
        text = (
            body(since, file=self.next_file)
            if self.whole
            else body(since, 2, part="2026-05-01T12:00:02.2000")
        )
        await answer.write(text.encode())
        if way == "apiserver killed":
            assert request.transport is not None
            request.transport.close()
        return answer


def followed(log: Log, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(podlogs, "FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(podlogs, "LONGEST_PAUSE_SECONDS", 0.01)

    async def story() -> list[str]:
        route = web.get("/api/v1/namespaces/team/pods/gpt-1-worker-0/log", log.read)
        async with connected([route], directory) as connection:
            one = pod(0)
            one["metadata"]["namespace"] = "team"
            lines = pod_lines(connection, one, tail=5, follow=True, over=lambda: log.whole)
            return [line async for line in lines]

    return asyncio.run(story())


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(["kubelet restarted", "kubelet is down"], id="kubelet restarted"),
        pytest.param(["apiserver killed"], id="apiserver killed"),
        pytest.param(["kubelet restarted", "apiserver killed", "kubelet restarted"], id="again and again"),
    ],
)
def test_a_log_goes_on_where_it_was_torn(
    ways: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line once: a kubelet that starts again ends the log of a container that runs on."""
    assert followed(Log(*ways), tmp_path, monkeypatch) == SHOWN


def test_lines_that_a_node_wrote_into_a_file_before_while_nobody_could_read_them_are_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log("kubelet restarted", "kubelet is down", next_file=3)
    assert followed(log, tmp_path, monkeypatch) == [*SHOWN[:2], podlogs.MISSING, *SHOWN[3:]]


def test_a_node_whose_clock_is_set_back_has_all_its_lines_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SAID", SAID[::-1])
    assert followed(Log(), tmp_path, monkeypatch) == SHOWN[::-1]


def test_a_log_that_was_torn_ends_where_its_pod_has_gone_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log("kubelet restarted", "pod is gone")
    assert followed(log, tmp_path, monkeypatch) == SHOWN[:2]


def test_a_log_of_a_node_on_which_too_many_are_followed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for again and again, and says nothing of the node's own words."""
    assert followed(Log("many follow", "many follow"), tmp_path, monkeypatch) == SHOWN


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("pod is gone", NotFound),
        ("container is removed", NotFound),
        ("file is removed", NotFound),
        ("kubelet is down", Unavailable),
        ("many follow from the start", Unavailable),
    ],
)
def test_a_log_that_cannot_be_read_at_all_says_so(
    way: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error):
        followed(Log(way), tmp_path, monkeypatch)
