"""What a client reads of a job: drills, logs, events, ledger and steps, as they are and as they happen."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx
import pytest
from asked_by_rest import JOBS, problem, submit
from served import Served
from waiting import wait_until

from holdfast_controller.api import records
from holdfast_controller.api.records import FOLLOWED_SECONDS, text_of
from holdfast_controller.cluster import (
    AttemptObservation,
    Event,
    ReplicaObservation,
    ReplicaState,
    Unavailable,
)
from holdfast_controller.drills import DrillKind
from holdfast_controller.jobs import TrainingJob


def test_drill_a_chosen_and_a_random_replica(http: httpx.Client, server: Served) -> None:
    submit(http)
    server.set_status("gpt-small", phase="Running", attempt=2)
    server.engine.running["default/gpt-small"] = [1]
    server.engine.drills.clear()
    chosen = http.post(f"{JOBS}/gpt-small/drill", json={"replica": 1, "kind": "notice"})
    assert chosen.status_code == 202
    assert http.post(f"{JOBS}/gpt-small/drill").json() == {"attempt": 2, "replica": 1, "kind": "kill"}
    assert [drill[1:] for drill in server.engine.drills] == [(2, 1, DrillKind.NOTICE), (2, 1, DrillKind.KILL)]
    events = http.get(f"{JOBS}/gpt-small/events").json()["items"]
    assert [event["message"] for event in events] == [
        "replica 1 of attempt 2: notice",
        "replica 1 of attempt 2: kill",
    ]
    assert "not running" in problem(
        http.post(f"{JOBS}/gpt-small/drill", json={"replica": 0}), 409, "not-ready"
    )


def test_a_random_drill_takes_a_replica_that_nobody_takes_yet(
    http: httpx.Client, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has its notice runs until its grace is over, and a cluster refuses to disrupt it again."""
    submit(http)
    server.set_status("gpt-small", phase="Running", attempt=1)
    server.engine.running["default/gpt-small"] = [0, 1]

    async def observe(_: TrainingJob, attempt: int) -> AttemptObservation:
        taken = ReplicaObservation(0, ReplicaState.RUNNING, "Drilled", disrupted=True)
        replicas = (taken, ReplicaObservation(1, ReplicaState.RUNNING))
        return AttemptObservation(attempt, exists=True, gone=False, replicas=replicas)

    monkeypatch.setattr(server.engine, "observe", observe)
    monkeypatch.setattr("random.choice", lambda found: found[0])
    assert http.post(f"{JOBS}/gpt-small/drill").json() == {"attempt": 1, "replica": 1, "kind": "kill"}


def test_logs_of_an_attempt(http: httpx.Client, server: Served) -> None:
    submit(http)
    server.set_status("gpt-small", phase="Running", attempt=2)
    server.engine.output[("default/gpt-small", 1, 0)] = ["one"]
    server.engine.output[("default/gpt-small", 2, 1)] = ["a", "b", "c"]
    assert http.get(f"{JOBS}/gpt-small/logs?rank=1&tail=2").text == "b\nc\n"
    assert http.get(f"{JOBS}/gpt-small/logs?attempt=1").text == "one\n"
    assert "there is no attempt 3" in problem(http.get(f"{JOBS}/gpt-small/logs?attempt=3"), 404, "not-found")
    problem(http.get(f"{JOBS}/gpt-small/logs?attempt=2"), 404, "not-found")


def test_why_there_is_no_log_is_told_however_long_it_takes_to_find_out(
    http: httpx.Client, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An apiserver takes half a minute to find that a node does not answer: the log was a torn connection."""
    submit(http)
    server.set_status("gpt-small", phase="Running", attempt=1)

    async def slow(*_: object, **__: object) -> AsyncIterator[str]:
        await asyncio.sleep(2 * FOLLOWED_SECONDS)
        raise Unavailable("the node does not answer")
        yield ""

    monkeypatch.setattr(server.engine, "logs", slow)
    assert problem(http.get(f"{JOBS}/gpt-small/logs"), 503, "unavailable") == "the node does not answer"


def test_a_log_that_never_comes_is_given_up_and_said_so(
    http: httpx.Client, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(http)
    server.set_status("gpt-small", phase="Running", attempt=1)
    given_up: list[int] = []

    async def silent(*_: object, **__: object) -> AsyncIterator[str]:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(1)
        yield ""

    monkeypatch.setattr(server.engine, "logs", silent)
    monkeypatch.setattr(records, "FIRST_SECONDS", 0.01)
    said = problem(http.get(f"{JOBS}/gpt-small/logs"), 503, "unavailable")
    assert said == "nothing of the log of rank 0 of default/gpt-small has come in 0.01 s; try again"
    assert given_up == [1]


def test_a_long_log_comes_in_few_pieces(http: httpx.Client, server: Served) -> None:
    """Line by line ten megabytes took most of a minute, on both sides."""
    submit(http)
    server.set_status("gpt-small", phase="Running", attempt=1)
    lines = server.engine.output["default/gpt-small", 1, 0] = [f"step {n}" for n in range(20_000)]
    with http.stream("GET", f"{JOBS}/gpt-small/logs") as stream:
        pieces = list(stream.iter_raw())
    assert b"".join(pieces).decode().splitlines() == lines
    assert len(pieces) < 100


def test_what_was_read_of_a_log_before_it_broke_is_told() -> None:
    async def broken() -> AsyncIterator[str]:
        yield "one"
        yield "two"
        raise Unavailable("the node is gone")

    async def story() -> None:
        pieces = text_of(broken(), 65536)
        assert await anext(pieces) == "one\ntwo\n"
        with pytest.raises(Unavailable):
            await anext(pieces)

    asyncio.run(story())


def test_logs_of_a_rank_that_an_attempt_has_and_the_edited_job_has_not(
    http: httpx.Client, server: Served
) -> None:
    """On Kubernetes a job may be made smaller while it runs: what runs has as many ranks as before."""
    submit(http)
    server.engine.output["default/gpt-small", 1, 3] = ["one"]
    server.set_status("gpt-small", attempt=1, attempts=[{"number": 1, "replicas": 4, "processes": 1}])
    assert http.get(f"{JOBS}/gpt-small/logs?rank=3").text == "one\n"
    assert "has 4, numbered" in problem(http.get(f"{JOBS}/gpt-small/logs?rank=4"), 422, "invalid")


def test_followed_logs_go_on_through_a_preemption(http: httpx.Client, server: Served) -> None:
    submit(http)
    first, second = ("default/gpt-small", 1), ("default/gpt-small", 2)
    server.engine.output[(*first, 0)] = ["step 1"]
    server.engine.output.pop((*second, 0), None)
    server.engine.open_attempts |= {first, second}
    server.set_status("gpt-small", phase="Running", attempt=1)
    with http.stream("GET", f"{JOBS}/gpt-small/logs", params={"follow": "true"}) as stream:
        lines = stream.iter_lines()
        assert [next(lines), next(lines)] == ["==> attempt 1 <==", "step 1"]
        server.engine.output[(*first, 0)].append("step 2")
        assert next(lines) == "step 2"
        # The attempt is taken; the next one has begun and its rank 0 has not written yet.
        server.set_status("gpt-small", phase="Recovering", attempt=2)
        server.engine.open_attempts.discard(first)
        assert next(lines) == "==> attempt 2 <=="
        server.engine.output[(*second, 0)] = ["step 3"]
        assert next(lines) == "step 3"
        server.set_status("gpt-small", phase="Succeeded")
        server.engine.open_attempts.discard(second)
        assert list(lines) == []


def test_a_log_that_is_waited_for_is_shown_though_the_job_cannot_be_read_meanwhile(
    http: httpx.Client, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt may wait in a queue for hours, and its job is read three times a second: where an apiserver
    did not answer once, nothing that the attempt said was shown."""
    submit(http)
    attempt = ("default/gpt-small", 1)
    server.engine.output.pop((*attempt, 0), None)
    server.engine.open_attempts.add(attempt)
    server.set_status("gpt-small", phase="Queued", attempt=1)
    reads, get = 0, server.store.get

    async def away_once(namespace: str, name: str) -> TrainingJob:
        nonlocal reads
        reads += 1
        if reads == 2:  # the first is the request's own
            raise Unavailable("the apiserver does not answer")
        return await get(namespace, name)

    monkeypatch.setattr(server.store, "get", away_once)
    with http.stream("GET", f"{JOBS}/gpt-small/logs", params={"follow": "true"}) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "==> attempt 1 <=="
        wait_until(lambda: reads > 3, "the job to be read again")
        server.engine.output[(*attempt, 0)] = ["step 1"]
        assert next(lines) == "step 1"
        server.set_status("gpt-small", phase="Succeeded")
        server.engine.open_attempts.discard(attempt)
        assert list(lines) == []


def test_a_stream_goes_on_though_the_job_cannot_be_read_in_between(
    http: httpx.Client, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an apiserver did not answer once, what follows a job from one attempt to the next was torn."""
    submit(http)
    job = server.job("gpt-small")
    first, second = ("default/gpt-small", 1), ("default/gpt-small", 2)
    server.engine.output[(*first, 0)] = ["step 1"]
    server.engine.output[(*second, 0)] = ["step 2"]
    server.engine.open_attempts -= {first, second}
    server.set_status("gpt-small", phase="Recovering", attempt=1)
    fails, get = 0, server.store.get

    async def away(namespace: str, name: str) -> TrainingJob:
        nonlocal fails
        if fails > 0:
            fails -= 1
            raise Unavailable("the apiserver does not answer")
        return await get(namespace, name)

    monkeypatch.setattr(server.store, "get", away)
    with (
        http.stream("GET", f"{JOBS}/gpt-small/logs", params={"follow": "true"}) as log,
        http.stream("GET", f"{JOBS}/gpt-small/events", headers={"Accept": "text/event-stream"}) as events,
    ):
        lines = log.iter_lines()
        assert [next(lines), next(lines)] == ["==> attempt 1 <==", "step 1"]
        fails = 6
        wait_until(lambda: fails == 0, "both to ask in vain")
        server.run(server.store.record_event(job, Event(datetime.now(UTC), "Normal", "Later", "so it is")))
        assert any("Later" in line for line in events.iter_lines())
        server.set_status("gpt-small", phase="Succeeded", attempt=2)
        assert list(lines) == ["==> attempt 2 <==", "step 2"]


def test_a_reader_that_leaves_is_let_go(http: httpx.Client, server: Served) -> None:
    submit(http)
    server.engine.output[("default/gpt-small", 1, 0)] = ["step 1"]
    server.engine.open_attempts.add(("default/gpt-small", 1))
    server.set_status("gpt-small", phase="Running", attempt=1)
    with http.stream("GET", f"{JOBS}/gpt-small/logs", params={"follow": "true"}) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "==> attempt 1 <=="
        wait_until(lambda: server.engine.followers == 1, "the log to be read")
    wait_until(lambda: server.engine.followers == 0, "the log to be let go")


def test_a_head_is_a_get_without_its_body(server: Served, http: httpx.Client) -> None:
    """Load balancers and `curl -I` ask so. What a GET refuses is refused, and a stream is not waited for."""
    submit(http)
    server.engine.output[("default/gpt-small", 1, 0)] = []
    server.engine.open_attempts.add(("default/gpt-small", 1))
    server.set_status("gpt-small", phase="Running", attempt=1)
    for path in (
        "/healthz",
        "/metrics",
        "/openapi.json",
        JOBS,
        f"{JOBS}/gpt-small",
        f"{JOBS}/none",
        "/nowhere",
    ):
        whole, head = http.get(path), http.head(path)
        assert head.status_code == whole.status_code, path
        assert head.headers["content-type"] == whole.headers["content-type"], path
        assert not head.content, path
    assert http.head(f"{JOBS}/gpt-small/logs", params={"follow": "true"}).status_code == 200
    wait_until(lambda: server.engine.followers == 0, "the log to be let go")
    assert http.head(f"{JOBS}/gpt-small/suspend").status_code == 405
    with server.http("wrong") as stranger:
        assert stranger.head(JOBS).status_code == 401


@pytest.mark.parametrize(
    ("sent", "told", "more"),
    [
        ("GET /healthz HTTP/1.1\r\nHost: x\r\n", "", ""),
        ("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", "200", "G"),
        ("GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", "422", ""),
        ("POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", "401", "{"),
    ],
)
def test_who_never_says_what_he_wants_is_let_go(
    server: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, sent: str, told: str, more: str
) -> None:
    """Each held a file that the controller had open, for ever, and needed no token for it."""
    monkeypatch.setattr("holdfast_controller.server.REQUEST_SECONDS", 0.5)
    monkeypatch.setattr("holdfast_controller.api.limits.BODY_SECONDS", 0.2)
    where = urlsplit(server.url)
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 0), timeout=30) as slow:
        slow.sendall(sent.encode())
        assert slow.recv(4096)[:12].decode() == (f"HTTP/1.1 {told}" if told else "")
        slow.sendall(more.encode())
        while slow.recv(4096):
            pass
    with http.stream("GET", JOBS, params={"watch": "true"}) as watched:
        assert any(watched.iter_lines()), "who asked is answered as long as he likes"


def test_events_as_they_happen(http: httpx.Client, server: Served) -> None:
    submit(http)
    job = server.job("gpt-small")

    def happen(reason: str) -> None:
        server.run(server.store.record_event(job, Event(datetime.now(UTC), "Normal", reason, "so it is")))

    happen("Submitted")
    with http.stream("GET", f"{JOBS}/gpt-small/events", headers={"Accept": "text/event-stream"}) as stream:
        told = (json.loads(line[6:])["reason"] for line in stream.iter_lines() if line.startswith("data: "))
        assert next(told) == "Submitted"
        happen("Started")
        assert next(told) == "Started"
        server.run(server.store.remove(job))
        assert list(told) == []


def test_ledger_and_steps(http: httpx.Client, server: Served) -> None:
    submit(http)
    key = "default/gpt-small"
    server.engine.ledger_lines[key] = [
        {"event": "attempt_start", "time": 1.0, "attempt": 1, "resumed_step": 0}
    ]
    server.engine.step_lines[key] = [
        {"attempt": attempt, "step": step, "time": 2.0, "loss": 1.5} for attempt in (1, 2) for step in (1, 2)
    ]
    ledger = http.get(f"{JOBS}/gpt-small/ledger").json()
    assert [attempt["lostSteps"] for attempt in ledger["attempts"]] == [2, None]
    assert ledger["lines"] == server.engine.ledger_lines[key]
    assert len(http.get(f"{JOBS}/gpt-small/steps").json()["items"]) == 4
    some = http.get(f"{JOBS}/gpt-small/steps?attempt=2&after=1").json()["items"]
    assert [line["step"] for line in some] == [2]

    server.engine.step_lines[key] = [  # a loss is known a step later than the step's end
        {"attempt": 1, "step": 1, "time": 1.0, "seconds": 0.1},
        {"attempt": 1, "step": 1, "time": 2.0, "loss": 1.5},
        {"attempt": 1, "step": 2, "time": 2.0, "seconds": 0.2},
        {"attempt": 1, "step": 2, "time": 2.5, "val_loss": 1.4},
    ]
    assert http.get(f"{JOBS}/gpt-small/steps").json()["items"] == [
        {"attempt": 1, "step": 1, "time": 1.0, "seconds": 0.1, "loss": 1.5},
        {"attempt": 1, "step": 2, "time": 2.0, "seconds": 0.2},
        {"attempt": 1, "step": 2, "time": 2.5, "val_loss": 1.4},
    ]
