"""Staying with jobs while they change: what is seen, and what a wait survives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import TOKEN, Served, ingress, job_yaml, served
from waiting import wait_until

from holdfast_controller.cli.connection import JobAddress
from holdfast_controller.cli.showing import Output
from holdfast_controller.cli.watching import looks, watch_jobs
from holdfast_controller.client import Client
from holdfast_controller.cluster import Unavailable
from holdfast_controller.jobs import Phase
from holdfast_controller.local.ports import free_port
from holdfast_controller.problem import Unauthorized


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as running:
        yield running


def submit(client: Client, name: str = "gpt-small", **spec: Any) -> None:
    document = yaml.safe_load(job_yaml(name))
    document["spec"] |= spec
    client.submit(document, "default")


def test_a_watch_survives_any_character(server: Served) -> None:
    """JSON leaves these as they are, and to Python each of them ends a line."""
    odd = "a\u0085b\u2028c\u2029d\x1ce"
    with Client(server.url, TOKEN) as client:
        submit(client, config={"odd": odd})
        assert next(client.watch("default")).job.spec.config == {"odd": odd}


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_wait_outlives_what_an_ingress_says_during_a_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    port = free_port()
    place = JobAddress("default", "gpt-small")
    with Client(f"http://127.0.0.1:{port}", TOKEN) as client:
        with ingress(port, status), pytest.raises(Unavailable) as refused:
            next(looks(client, place))
        assert refused.value.retry_after == 1
        seen = looks(client, place)
        with served(tmp_path, port=port) as first:
            submit(client)
            assert next(seen).status.phase == Phase.QUEUED
            first.set_status("gpt-small", phase="Running")
        phases: list[Phase] = []
        waiting = threading.Thread(target=lambda: phases.append(next(seen).status.phase), daemon=True)
        with ingress(port, status):
            waiting.start()
            told = f"the server answered {status} without a reason; waiting for it"
            wait_until(lambda: told in capsys.readouterr().err, "the wait to notice")
        with served(tmp_path, port=port):
            waiting.join(300)
    assert phases == [Phase.RUNNING]


def test_get_w_shows_what_went_while_the_controller_was_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deletion that no connection was there to tell is told after it: the job is in no list any more."""
    port = free_port()
    shown: list[str] = []

    def rows() -> list[list[str]]:
        shown.append(capsys.readouterr().out)
        return [line.split()[:2] for line in "".join(shown).splitlines()[1:]]

    def watch() -> None:
        with contextlib.suppress(Unauthorized):
            watch_jobs(client, "default", None, "", Output.TABLE)

    with Client(f"http://127.0.0.1:{port}", TOKEN) as client:
        watching = threading.Thread(target=watch, daemon=True)
        with served(tmp_path, port=port):
            submit(client, "stays")
            submit(client, "goes")
            watching.start()
            wait_until(lambda: rows() == [["stays", "Queued"], ["goes", "Queued"]], "both jobs")
        with ingress(port, 503) as asked, served(tmp_path) as elsewhere:
            wait_until(lambda: asked, "the watch to connect again")
            elsewhere.run(elsewhere.store.remove(elsewhere.job("goes")))
        with served(tmp_path, port=port):
            wait_until(lambda: ["goes", "(gone)"] in rows(), "the row of the job that went")
            submit(client, "comes")
            wait_until(lambda: rows()[-1] == ["comes", "Queued"], "the watch to go on")
        assert rows()[2:] == [["goes", "(gone)"], ["comes", "Queued"]], "what stayed as it was is no news"
        with served(tmp_path, port=port, token="a-token-of-somebody-else"):
            watching.join(300)
    assert not watching.is_alive(), "it ends where it may not look"
