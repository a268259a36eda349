"""Staying with jobs while they change: what is seen, and what a wait survives."""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_alive import kept_alive
from scripted_engine import ScriptedEngine
from served import TOKEN, Served, ingress, job_yaml, served
from waiting import wait_until

from holdfast_controller.cli.connection import Connection, JobAddress
from holdfast_controller.cli.following import KNOWN_LINES, TORN, Followed, Shown
from holdfast_controller.cli.showing import Output, TableOutput
from holdfast_controller.cli.watching import looks, watch_events, watch_jobs
from holdfast_controller.client import Client
from holdfast_controller.cluster import Event, NotFound, Unavailable
from holdfast_controller.jobs import Phase
from holdfast_controller.local.ports import free_port
from holdfast_controller.problem import Unauthorized

NOW = "2026-01-01T00:00:00Z"


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


def test_the_kernel_looks_after_a_connection_on_which_nothing_comes(server: Served) -> None:
    """A log that is followed may be silent for hours, and whoever followed one that was forgotten on the way,
    as by a balancer, or while his machine slept, did so for ever."""
    port = int(server.url.rpartition(":")[2])
    with Client(server.url, TOKEN) as client:
        submit(client)
        wait_until(lambda: kept_alive(port) == [True], "all that was sent to be answered")


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


def test_get_w_of_a_job_that_is_not_there_says_so(server: Served) -> None:
    """As of one whose name has a typo: it waited, without a word, for it to come."""
    with Client(server.url, TOKEN) as client:
        submit(client)
        with pytest.raises(NotFound, match="no job default/gpt-smal;"):
            watch_jobs(client, "default", "gpt-smal", "", Output.TABLE)


def test_who_waits_outlives_the_token_that_he_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller was started again with another one in its file: `wait` failed, though the job ran on."""
    port = free_port()
    token = tmp_path / "token"

    def now_is(text: str) -> str:
        token.touch(0o600)
        token.write_text(text)
        return text

    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    now_is(TOKEN)
    connection = Connection(f"http://127.0.0.1:{port}", token_file=token)
    with connection.client() as client:
        with served(tmp_path, port=port):
            submit(client)
            seen = looks(client, JobAddress("default", "gpt-small"))
            next(seen)
        with served(tmp_path, port=port, token=now_is("another-token-0123456789")):
            assert next(seen).metadata.name == "gpt-small"
            assert next(client.watch("default")).job.metadata.name == "gpt-small"
            submit(client, "sent-twice")
        with served(tmp_path, port=port, token="a-token-of-somebody-else"), pytest.raises(Unauthorized):
            next(seen)


def test_events_w_goes_on_through_a_restart_until_the_job_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each event is a row once, one that came again meanwhile is another; those of a later job that has the
    name are not its."""
    port = free_port()
    shown: list[str] = []

    def rows() -> list[str]:
        shown.append(capsys.readouterr().out)
        return [" ".join(line.split()[2:]) for line in "".join(shown).splitlines()[1:]]

    def happens(server: Served, type: str, reason: str, message: str) -> None:
        event = Event(datetime.now(UTC), type, reason, message)
        server.run(server.store.record_event(server.job("gpt-small"), event))

    with Client(f"http://127.0.0.1:{port}", TOKEN) as client:
        watching = threading.Thread(
            target=watch_events,
            args=(client, JobAddress("default", "gpt-small"), TableOutput.TABLE),
            daemon=True,
        )
        with served(tmp_path, port=port) as server:
            submit(client)
            happens(server, "Normal", "Started", "attempt 1 starts")
            watching.start()
            wait_until(lambda: len(rows()) == 1, "what there is")
            happens(server, "Warning", "SaveFailed", "no room")
            wait_until(lambda: len(rows()) == 2, "what happens")
        with ingress(port, 503) as asked, served(tmp_path) as elsewhere:
            wait_until(lambda: asked, "the watch to ask again")
            happens(elsewhere, "Warning", "SaveFailed", "no room")
        with served(tmp_path, port=port) as server:
            wait_until(lambda: len(rows()) == 3, "what happened while nobody answered")
        with ingress(port, 503) as asked, served(tmp_path) as elsewhere:
            wait_until(lambda: asked, "the watch to ask again")
            elsewhere.run(elsewhere.store.remove(elsewhere.job("gpt-small")))
            with Client(elsewhere.url, TOKEN) as other:
                submit(other)
            happens(elsewhere, "Normal", "Started", "attempt 1 of another starts")
        with served(tmp_path, port=port):
            watching.join(300)
    assert not watching.is_alive(), "it ends with its job"
    saves = ["Warning SaveFailed no room", "Warning SaveFailed no room (x2)"]
    assert rows() == ["Normal Started attempt 1 starts", *saves]


def test_an_event_is_the_same_document_with_w_and_without(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever reads both found whose it is in the one alone."""
    with Client(server.url, TOKEN) as client:
        submit(client)
        event = Event(datetime.now(UTC), "Normal", "Started", "attempt 1 starts")
        server.run(server.store.record_event(server.job("gpt-small"), event))
        watching = threading.Thread(
            target=watch_events,
            args=(client, JobAddress("default", "gpt-small"), TableOutput.JSON),
            daemon=True,
        )
        watching.start()
        shown: list[str] = []

        def told() -> str:
            shown.append(capsys.readouterr().out)
            return "".join(shown)

        wait_until(lambda: told().endswith("}\n"), "the event")
        server.run(server.store.remove(server.job("gpt-small")))
        watching.join(300)
    document = json.loads("".join(shown))
    assert (document["job"], document["reason"]) == ("default/gpt-small", "Started")


def test_a_log_is_followed_through_restarts_of_its_controller(tmp_path: Path) -> None:
    """No line twice and none left out: of an attempt that ended meanwhile, of one that came and went unseen,
    and of the one that runs now, be it that the last lines alone were asked for, or new ones."""
    port, job, engine = free_port(), "default/gpt-small", ScriptedEngine()
    whole, tailed, new = list[str](), list[str](), list[str]()

    def follow(client: Client, shown: list[str], tail: int | None) -> threading.Thread:
        followed = Followed(client, JobAddress("default", "gpt-small"), 0, None, tail)
        following = threading.Thread(target=lambda: shown.extend(followed.lines()), daemon=True)
        following.start()
        return following

    with Client(f"http://127.0.0.1:{port}", TOKEN) as client:
        engine.output[(job, 1, 0)] = first = ["begins", "waits", "waits"]
        engine.open_attempts.add((job, 1))
        with served(tmp_path, port=port, engine=engine) as server:
            submit(client)
            server.set_status("gpt-small", phase="Running", attempt=1)
            following = [follow(client, whole, None), follow(client, tailed, 1), follow(client, new, 0)]
            wait_until(lambda: (len(whole), len(tailed), len(new)) == (4, 2, 1), "what there is")
        first += ["waits", "notice"]
        engine.open_attempts.remove((job, 1))
        engine.output[(job, 2, 0)] = ["unseen"]
        engine.output[(job, 3, 0)] = third = ["runs"]
        engine.open_attempts.add((job, 3))
        with ingress(port, 503) as asked, served(tmp_path, engine=engine) as elsewhere:
            elsewhere.set_status("gpt-small", attempt=3)
            wait_until(lambda: len(asked) > 1, "it to be asked for again")
        with served(tmp_path, port=port, engine=engine):
            wait_until(lambda: whole[-1] == tailed[-1] == new[-1] == "runs", "all to go on")
        third += ["goes on"]
        with served(tmp_path, port=port, engine=engine) as server:
            wait_until(lambda: whole[-1] == tailed[-1] == new[-1] == "goes on", "all to go on once more")
            server.set_status("gpt-small", phase="Succeeded")
            engine.open_attempts.remove((job, 3))
            for thread in following:
                thread.join(300)
    assert not any(thread.is_alive() for thread in following), "it ends with its job"
    more = ["notice", "==> attempt 2 <==", "unseen", "==> attempt 3 <==", "runs", "goes on"]
    assert whole == ["==> attempt 1 <==", "begins", "waits", "waits", "waits", *more]
    assert tailed[:2] == ["==> attempt 1 <==", "waits"]
    assert tailed[-len(more) :] == more
    assert new == ["==> attempt 1 <==", TORN, *more[1:]], "which lines were new as it tore, nobody knows"


def test_a_log_whose_new_lines_alone_are_wanted_may_tear_twice_before_one_comes() -> None:
    seen = Shown(1, 0)
    seen.tear()
    assert seen.goes_on_in(["old", "old"]) == (2, False)
    seen.add("new")
    assert seen.goes_on_in(["old", "old", "new", "newer"]) == (3, True)


def test_a_log_that_ends_with_its_attempt_or_its_job_is_not_called_torn(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attempt's verdict comes a moment after its end."""
    place, job = JobAddress("default", "gpt-small"), "default/gpt-small"

    def ended() -> None:
        wait_until(lambda: server.engine.followers == 0, "the log to end")
        server.set_status("gpt-small", attempts=[{"number": 1, "opened_at": NOW, "verdict": "Disrupted"}])

    with Client(server.url, TOKEN) as client:
        submit(client)
        server.engine.output[(job, 1, 0)] = ["all"]
        server.set_status("gpt-small", phase="Running", attempt=1, attempts=[{"number": 1, "opened_at": NOW}])
        lines = Followed(client, place, 0, 1, None).lines()
        assert next(lines) == "all"
        judging = threading.Thread(target=ended, daemon=True)
        judging.start()
        assert list(lines) == []
        judging.join(300)
        server.engine.open_attempts.add((job, 1))
        lines = Followed(client, place, 0, None, None).lines()
        assert [next(lines), next(lines)] == ["==> attempt 1 <==", "all"]
        server.engine.open_attempts.clear()
        server.run(server.store.remove(server.job("gpt-small")))
        assert list(lines) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tail", "shown", "log", "goes_on"),
    [
        pytest.param(None, [], ["a", "b"], (0, True), id="nothing of it was shown"),
        pytest.param(None, ["a", "a"], ["a", "a", "a"], (2, True), id="lines that are alike are counted"),
        pytest.param(1, ["c"], ["a", "b", "c", "d"], (3, True), id="the last lines alone were asked for"),
        pytest.param(1, [], ["a", "b"], (0, True), id="the last lines were asked for, and there was none"),
        pytest.param(0, [], ["a", "b"], (2, False), id="new lines alone were asked for, and none had come"),
        pytest.param(None, ["a", "b", "c"], ["b", "c", "d"], (2, True), id="its beginning is kept no more"),
        pytest.param(None, ["a", "b", "c"], ["x", "y"], (0, False), id="another file was begun"),
        pytest.param(None, ["a", "b"], [], (0, False), id="it is gone"),
    ],
)
def test_how_much_of_a_log_was_shown_is_found_by_its_last_lines(
    tail: int | None, shown: list[str], log: list[str], goes_on: tuple[int, bool]
) -> None:
    seen = Shown(0, tail)
    seen.begin(1)
    for line in shown:
        seen.add(line)
    assert seen.goes_on_in(log) == goes_on


def test_a_log_of_any_length_is_gone_on_with_in_little_memory() -> None:
    """It is asked for line by line: no more of it is kept than the last lines that were shown."""
    kept = weakref.WeakSet[Line]()
    most = 0

    def long_log() -> Iterator[str]:
        nonlocal most
        for number in range(20 * KNOWN_LINES):
            line = Line(f"step {number}")
            kept.add(line)
            most = max(most, len(kept))
            yield line

    seen = Shown(1, None)
    for number in range(19 * KNOWN_LINES):
        seen.add(f"step {number}")
    assert seen.goes_on_in(long_log()) == (19 * KNOWN_LINES, True)
    assert most < 2 * KNOWN_LINES


class Line(str):
    """One that a test can see go."""
