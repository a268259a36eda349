"""What a run tells of itself while it runs is what it writes down, and what is true."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asked import address_of, get, series
from gangs import KILL, Gang, Workshop
from prometheus_client import CollectorRegistry
from waiting import wait_until

from holdfast_controller.jobs import Verdict
from holdfast_controller.policy.lost_work import goodput, lost_steps, work_of
from holdfast_trainer import ledger
from holdfast_trainer import parallel as gangs
from holdfast_trainer.account import Account
from holdfast_trainer.checkpoint import CheckpointError, Saved
from holdfast_trainer.contract import (
    ATTEMPT_HEADER,
    ENV_ATTEMPT_UID,
    TERMINATION_LIMIT,
    Progress,
    RunDir,
    Termination,
    read_lines,
)
from holdfast_trainer.endpoint import Endpoint, newest_ledger
from holdfast_trainer.ledger import Journal, useful_seconds
from holdfast_trainer.place import Place
from holdfast_trainer.resume import Marks
from holdfast_trainer.spans import Spans
from holdfast_trainer.steplog import StepLog
from holdfast_trainer.telemetry import RATES, StepFigures, Telemetry


def saved_steps(gang: Gang) -> set[int]:
    return {line["step"] for line in gang.history.events("checkpoint", gang.attempt)}


def test_what_is_served_equals_what_is_written(workshop: Workshop) -> None:
    options = {"steps": 500, "save_every": 10, "validate_every": 12}
    gang = workshop.start(ranks=2, **options, pause=0.01, hold_at=25)
    for rank in (0, 1):
        gang.wait_for_text("step 25", rank=rank)
    gang.wait_for_step(25)
    address = address_of(gang)
    wait_until(
        lambda: series(get(address, "/metrics"))["holdfast_durable_step"] == 20, "step 20 to be durable"
    )
    found = series(get(address, "/metrics"))
    progress = Progress.from_json(get(address, "/progress"))
    history = gang.history
    lines = {line["step"]: line for line in history.steps()}
    saves = history.events("checkpoint")

    assert found["holdfast_step"] == progress.step == 25 == history.last_step()
    assert found["holdfast_total_steps"] == progress.total_steps == 500
    assert found["holdfast_attempt"] == progress.attempt == 1
    assert found["holdfast_loss"] == progress.loss == lines[25]["loss"]
    validated = [line for line in read_lines(history.run.steps(1)) if "val_loss" in line]
    assert [line["step"] for line in validated] == [12, 24]
    assert found["holdfast_validation_loss"] == progress.val_loss == validated[-1]["val_loss"]
    for line in validated:
        assert f"step {line['step']}: validation loss {line['val_loss']:.4f}" in gang.ranks[0].text()
    assert "validation loss" not in gang.ranks[1].text(), "once is enough"
    assert found["holdfast_tokens_total"] == sum(line["tokens"] for line in lines.values()) == 25 * (5 + 10)
    assert found["holdfast_step_seconds_count"] == 25
    assert found["holdfast_step_seconds_sum"] == pytest.approx(
        sum(line["seconds"] for line in lines.values())
    )
    assert found["holdfast_step_span_seconds_count{phase=data}"] == 25
    assert found["holdfast_step_span_seconds_sum{phase=data}"] == pytest.approx(
        sum(line["data_seconds"] for line in lines.values())
    )
    assert found["holdfast_durable_step"] == progress.durable_step == 20 == saves[-1]["step"]
    assert found["holdfast_checkpoint_bytes"] == saves[-1]["bytes"]
    assert found["holdfast_checkpoint_seconds_count"] == len(saves) == 2
    assert found["holdfast_checkpoint_seconds_sum"] == pytest.approx(sum(s["seconds"] for s in saves))
    stalls = sum(s["stall_seconds"] for s in saves)
    assert found["holdfast_checkpoint_stall_seconds_sum"] == pytest.approx(stalls)
    assert found["holdfast_checkpoint_failures_total"] == 0
    assert progress.phase == "training"
    (began,) = history.events("attempt_start")
    assert began["time"] <= progress.updated <= time.time()
    wall = 20 * (progress.step_seconds or 0)
    assert sum(lines[step]["seconds"] for step in range(6, 26)) <= wall * 1.001
    assert wall <= lines[25]["time"] - began["time"]
    assert progress.tokens_per_second == pytest.approx(20 * (5 + 10) / wall)
    assert progress.samples_per_second == pytest.approx(20 * 12 * 2 / wall)
    assert 0 < (progress.data_wait_fraction or 0) < 1
    assert progress.mfu is None, "nobody said how many FLOPs a token needs"
    # Of the newest 20 steps, which may have been slower than those before; validations come on top.
    computed = sum(lines[step]["seconds"] for step in range(6, 26)) / 20
    assert 475 * computed < (progress.eta_seconds or 0) * 1.001
    assert (progress.eta_seconds or 0) <= 475 * (lines[25]["time"] - began["time"]) / 20
    with pytest.raises(urllib.error.HTTPError, match="404") as raised:
        get(address, "/")
    raised.value.close()


def test_a_port_that_is_taken_moves_the_metrics_and_not_the_training(workshop: Workshop) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        gang = workshop.start(steps=5000, pause=0.02, env={"HOLDFAST_PORT": str(port)})
        gang.wait_for_step(2)
        address = address_of(gang)
        assert not address.endswith(f":{port}")
        told = f"cannot serve metrics on 127.0.0.1:{port} (the port is taken): they are on {address}"
        assert told in gang.texts()
        assert Progress.from_json(get(address, "/progress")).step >= 2


def test_an_address_of_another_machine_moves_the_metrics_too(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(1, 1)
    endpoint = Endpoint("203.0.113.7", 0, lambda: telemetry.registry, lambda: telemetry.progress)
    try:
        assert endpoint.address.startswith("127.0.0.1:")
        assert "cannot serve metrics on 203.0.113.7:0" in caplog.text
        assert Progress.from_json(get(endpoint.address, "/progress?a=b")).phase == "starting"
    finally:
        endpoint.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1"])
def test_in_a_pod_it_is_heard_at_an_address_of_either_family(host: str) -> None:
    """Pods of a cluster without IPv4 have none of that, and a controller of today gives them 0.0.0.0."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    endpoint = Endpoint(host, 0, CollectorRegistry, lambda: Telemetry(1, 1).progress)
    try:
        port = endpoint.address.rpartition(":")[2]
        for address in {f"[::1]:{port}", endpoint.address}:
            assert Progress.from_json(get(address, "/progress")).phase == "starting"
        assert endpoint.address == (f"[::1]:{port}" if host == "::1" else f"127.0.0.1:{port}")
    finally:
        endpoint.close()


def test_without_ipv6_it_is_heard_at_all_addresses_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    endpoint = Endpoint("0.0.0.0", 0, CollectorRegistry, lambda: Telemetry(1, 1).progress)
    try:
        assert Progress.from_json(get(endpoint.address, "/progress")).phase == "starting"
    finally:
        endpoint.close()


def test_each_answer_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ATTEMPT_UID, "0a1b/3")
    endpoint = Endpoint("127.0.0.1", 0, CollectorRegistry, lambda: Telemetry(1, 1).progress)
    try:
        with urllib.request.urlopen(f"http://{endpoint.address}/progress", timeout=300) as answer:
            assert answer.headers[ATTEMPT_HEADER] == "0a1b/3"
    finally:
        endpoint.close()


def test_a_client_that_goes_away_costs_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint("127.0.0.1", 0, CollectorRegistry, lambda: Telemetry(1, 1).progress)
    host, port = endpoint.address.split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /progress HTTP/1.1\r\n\r\n")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    assert Progress.from_json(get(endpoint.address, "/progress")).step == 0
    endpoint.close()
    assert "Traceback" not in capfd.readouterr().err


def test_strangers_who_connect_without_end_have_a_bounded_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any pod of a cluster may connect. With the last thread that one may have went the training's saves."""
    monkeypatch.setattr("holdfast_trainer.endpoint.AT_ONCE", 2)
    endpoint = Endpoint("127.0.0.1", 0, CollectorRegistry, lambda: Telemetry(1, 1).progress)
    host, port = endpoint.address.split(":")
    first, second, third = (socket.create_connection((host, int(port)), timeout=60) for _ in range(3))
    with first, second, third:
        assert third.recv(1) == b"", "one too many is let go, not left to wait"
        for waits in (first, second):
            waits.setblocking(False)
            with pytest.raises(BlockingIOError):
                waits.recv(1)

    def answered() -> bool:
        try:
            return Progress.from_json(get(endpoint.address, "/progress")).step == 0
        except OSError:
            return False

    wait_until(answered, "an answer once they are gone")
    endpoint.close()


def test_the_ledger_of_all_attempts_is_served_to_who_cannot_mount_the_run_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for attempt, text in ((1, '{"event": "attempt_start"}\n{"event": "stop"}\n'), (3, '{"event": "torn')):
        run.attempt(attempt).mkdir(parents=True)
        run.ledger(attempt).write_text(text)
    run.attempt(2).mkdir()  # ended before its first line
    endpoint = Endpoint("127.0.0.1", 0, CollectorRegistry, lambda: Telemetry(1, 1).progress, run)
    try:
        assert get(endpoint.address, "/ledger").splitlines() == [
            '{"event": "attempt_start"}',
            '{"event": "stop"}',
            '{"event": "torn',
        ]
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    ("limit", "served"),
    [(100, b"a1\na2\nb1\nb2\nc1\n"), (12, b"a2\nb1\nb2\nc1\n"), (8, b"b2\nc1\n"), (2, b"")],
)
def test_of_a_long_ledger_the_newest_lines_are_served(tmp_path: Path, limit: int, served: bytes) -> None:
    """Who asks reads so much and no more: all of it would tell him nothing of today."""
    run = RunDir(tmp_path)
    for attempt, text in ((1, b"a1\na2\n"), (2, b"b1\nb2"), (3, b"c1\n")):
        run.attempt(attempt).mkdir(parents=True)
        run.ledger(attempt).write_bytes(text)
    assert newest_ledger(run, limit) == served


def test_steps_are_served_in_pages_of_whole_lines(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(2).mkdir(parents=True)
    wanted = [json.dumps({"step": step, "pad": "x" * 500}) for step in range(1, 5001)]
    run.steps(2).write_text("\n".join(wanted) + '\n{"step": 5001, "to')
    endpoint = Endpoint("127.0.0.1", 0, CollectorRegistry, lambda: Telemetry(1, 1).progress, run)
    got: list[str] = []
    pages = offset = 0
    try:
        while True:
            url = f"http://{endpoint.address}/steps?attempt=2&offset={offset}"
            with urllib.request.urlopen(url, timeout=300) as answer:
                body = answer.read()
            if not body:
                break
            offset += len(body)
            pages += 1
            got += body.decode().splitlines()
        assert got == wanted
        assert pages > 1
        assert get(endpoint.address, "/steps?attempt=1&offset=0") == ""
        for query in ("", "?attempt=2", "?attempt=../../2&offset=0", "?attempt=2&offset=-1"):
            with pytest.raises(urllib.error.HTTPError, match="/steps wants") as refused:
                get(endpoint.address, f"/steps{query}")
            assert refused.value.code == 400
            refused.value.close()
    finally:
        endpoint.close()


def test_useful_seconds_are_summed_anew_where_no_line_tells_them(tmp_path: Path) -> None:
    """The commit of step 4 was the last that a killed attempt did: its ledger line is missing."""
    run = RunDir(tmp_path)
    for attempt, steps in ((1, range(1, 4)), (2, range(3, 6))):
        journal = Journal(run, attempt)
        for step in steps:
            journal.steps([{"step": step, "seconds": float(attempt)}])
        journal.steps([{"step": steps[-1], "val_loss": 1.0}])
    Journal(run, 1).event("checkpoint", step=2, useful_seconds=2.0)
    assert useful_seconds(run, 3, 0) == 0.0
    assert useful_seconds(run, 3, 2) == 2.0
    assert useful_seconds(run, 3, 4) == 1.0 + 1.0 + 2.0 + 2.0
    assert useful_seconds(run, 3, 6) is None, "step 6 is on no record"
    assert useful_seconds(run, 2, 4) is None, "what comes after counts for nothing"


def test_of_a_long_run_the_steps_since_its_newest_checkpoint_alone_are_read(tmp_path: Path) -> None:
    """There are gigabytes of them after weeks, and rank 0 has its memory for the training."""
    run, saved, last = RunDir(tmp_path), 49_000, 49_900
    journal = Journal(run, 1)
    journal.event("attempt_start", resumed_step=0, useful_seconds=0.0)
    journal.steps([{"step": step, "seconds": 1.0} for step in range(1, last + 51)])
    journal.event("checkpoint", step=saved, useful_seconds=0.5 * saved)
    again = Journal(run, 2)
    again.event("attempt_start", resumed_step=last, useful_seconds=None)
    again.steps([{"step": last + 1, "seconds": 2.0}])
    tracemalloc.start()
    try:
        useful = useful_seconds(run, 3, last)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert useful == 0.5 * saved + last - saved
    assert most < 4 << 20
    assert useful_seconds(run, 3, last + 1) == useful + 2.0


# ------------------------------------------------------------------- the ledger


def test_a_short_step_is_on_record_before_its_loss_is(workshop: Workshop) -> None:
    """Its loss is agreed on with the next step; a kill in that one must not hide that it was done."""
    options: dict[str, Any] = {"ranks": 2, "steps": 30, "save_every": 10}
    gang = workshop.start(**options, hold_at=17)
    gang.wait_for_step(17)
    told = gang.history.steps()[-1]
    assert (told["step"], "seconds" in told, "loss" in told) == (17, True, False)
    gang.signal(KILL)
    gang.wait()
    history = workshop.finish(**options)
    steps = [{**line, "attempt": 1} for line in read_lines(history.run.steps(1))]
    work = work_of(1, history.ledger(), steps)
    assert (work.last_step, lost_steps(work, Verdict.DISRUPTED, 10)) == (17, 7)
    assert sorted(history.losses()) == list(range(1, 31))


def test_lost_work_and_goodput_follow_from_the_lines_of_killed_runs(workshop: Workshop) -> None:
    options: dict[str, Any] = {"steps": 40, "save_every": 10}
    last = []
    for at in (13, 27):
        gang = workshop.start(ranks=2, **options, pause_at=at, pause_seconds=600)
        gang.wait_for_step(at)
        wait_until(lambda at=at, gang=gang: at - at % 10 in saved_steps(gang), "the save before it")
        gang.signal(KILL)
        gang.wait()
        last.append(gang.history.last_step(gang.attempt))
    history = workshop.finish(ranks=2, **options)

    starts = [line["resumed_step"] for line in history.events("attempt_start")]
    assert starts == [0, last[0] - last[0] % 10, last[1] - last[1] % 10]
    ledger = history.ledger()
    steps = [
        {**line, "attempt": number}
        for number in history.run.attempt_numbers()
        for line in read_lines(history.run.steps(number))
    ]
    for number in (1, 2):
        work = work_of(number, ledger, steps)
        assert work.last_step == last[number - 1]
        assert work.durable_step == starts[number]
        assert lost_steps(work, Verdict.DISRUPTED, starts[number]) == last[number - 1] - starts[number]
        assert [line["step"] for line in history.events("first_step", number)] == [starts[number - 1] + 1]
    assert lost_steps(work_of(3, ledger, steps), Verdict.FINISHED) == 0
    counted = {line["step"]: line["seconds"] for line in history.steps()}
    assert sorted(counted) == list(range(1, 41))
    wall = history.stop()["time"] - history.events("attempt_start")[0]["time"]
    useful = history.stop()["useful_seconds"]
    assert useful == pytest.approx(sum(counted.values()))
    assert goodput(useful, wall) == pytest.approx(sum(counted.values()) / wall)
    for line in [*history.events("attempt_start"), *history.events("checkpoint")]:
        done = line["resumed_step"] if line["event"] == "attempt_start" else line["step"]
        as_then = {
            s["step"]: s["seconds"]
            for s in steps
            if "seconds" in s and s["step"] <= done and s["attempt"] <= line["attempt"]
        }
        assert line["useful_seconds"] == pytest.approx(sum(as_then.values())), line
    word = Termination.from_json((history.run.path.parent / "run-3" / "rank-0.termination").read_text())
    assert word is not None
    assert word.progress is not None
    assert (word.progress.resumed_step, word.progress.first_step) == (starts[2], starts[2] + 1)
    assert (word.progress.digest, word.progress.useful_seconds) == (history.stop()["digest"], useful)
    assert word.progress.resumed_seconds == history.events("attempt_start", 3)[0]["useful_seconds"]
    assert word.progress.checkpoints == len(history.events("checkpoint", 3))
    for line in history.events("checkpoint"):
        assert line["bytes"] > 0
        assert 0 <= line["stall_seconds"] <= line["seconds"]
        assert len(line["digest"]) == 64
    startup = history.events("attempt_start")[0]["startup"]
    assert set(startup) == {"import", "rendezvous", "build", "load"}
    assert all(seconds >= 0 for seconds in startup.values())


def test_lines_that_find_no_room_are_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the middle of a line, and has room again later: nothing is missing."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    journal.steps([{"step": 1, "loss": 1.0}])
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: whole(fd, data[:9]))
        journal.steps([{"step": 2, "loss": 2.0}])
        journal.steps([{"step": 3, "loss": 3.0}])
        assert [line["step"] for line in read_lines(run.steps(1))] == [1]
        assert journal.unwritten == 2
    journal.steps([{"step": 4, "loss": 4.0}])
    journal.event("stop")
    assert [line["step"] for line in read_lines(run.steps(1))] == [1, 2, 3, 4]
    assert journal.unwritten == 0


def test_a_line_that_found_room_for_all_but_its_end_is_written_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: whole(fd, data[:-1]))
        journal.steps([{"step": 1}])
        patch.setattr(os, "write", lambda fd, data: whole(fd, data[:1]))
        journal.steps([{"step": 2}])
    journal.steps([{"step": 3}])
    assert {line["step"] for line in read_lines(run.steps(1))} == {1, 2, 3}


def test_a_journal_without_a_disk_is_silent_and_keeps_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    monkeypatch.setattr(ledger, "MOST_LATE", 2)
    journal = Journal(run, 1)
    run.ledger(1).symlink_to("/dev/full")
    for number in range(5):
        journal.event("checkpoint", step=number)
    assert journal.unwritten == 5
    run.ledger(1).unlink()
    journal.event("stop")
    assert [line.get("step") for line in read_lines(run.ledger(1))] == [3, 4, None]
    assert journal.unwritten == 3


def test_a_line_that_the_disk_takes_back_is_written_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where NFS tells of a full disk only when it syncs or closes: the line was gone, and not counted."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    for call in ("fsync", "close"):
        whole = getattr(os, call)

        def fails(fd: int, whole: Any = whole) -> None:
            os.ftruncate(fd, 0)
            whole(fd)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            journal.event("checkpoint", step=5)
            assert journal.unwritten == 1
        journal.event("stop")
        assert [line["event"] for line in read_lines(run.ledger(1))] == ["checkpoint", "stop"]
        assert journal.unwritten == 0


def test_training_does_not_wait_for_a_disk_that_is_slow_to_append_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where it then hangs; and no event is told before the steps that led to it."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    whole, answers = os.open, threading.Event()
    answers.set()

    def slow(path: Any, *more: Any) -> int:
        answers.wait()
        time.sleep(1.5 * ledger.SLOW_SECONDS)
        return whole(path, *more)

    monkeypatch.setattr(os, "open", slow)
    for step in range(1, ledger.SLOW_IN_A_ROW + 1):
        journal.steps([{"step": step}])
        assert [line["step"] for line in read_lines(run.steps(1))] == list(range(1, step + 1))
    answers.clear()
    for step in range(6, 100):
        journal.steps([{"step": step}])
    assert journal.unwritten == 94
    monkeypatch.setattr(ledger, "MOST_LATE", 50)
    journal.steps([{"step": 100}])
    answers.set()
    journal.event("stop")
    steps = [line["step"] for line in read_lines(run.steps(1))]
    assert steps[-50:] == list(range(51, 101))
    assert [line["event"] for line in read_lines(run.ledger(1))] == ["stop"]


def test_ranks_take_turns_at_the_ledger_and_one_that_is_frozen_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS each machine appends at what it takes for the end: of two at once a line was lost."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    with run.ledger(1).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def write_meanwhile(seconds: float) -> None:
            other.write(b'{"event": "failure", "rank": 1}\n')
            other.flush()
            fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(ledger.time, "sleep", write_meanwhile)
        journal.event("stop")
        assert [line["event"] for line in read_lines(run.ledger(1))] == ["failure", "stop"]
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(ledger.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(ledger, "TURN_SECONDS", 0.01)
        journal.event("hang")
    assert [line["event"] for line in read_lines(run.ledger(1))] == ["failure", "stop", "hang"]


def test_a_process_that_is_forked_while_a_line_is_written_holds_up_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader's worker has the file open for as long as it lives: each line waited a second for it."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    whole, workers = os.fsync, list[int]()

    def fork_meanwhile(fd: int) -> None:
        workers.append(os.dup(fd))  # as a fork does: both have what is locked
        whole(fd)

    def wait(seconds: float) -> None:
        pytest.fail("it waits for its turn")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fork_meanwhile)
            journal.event("checkpoint", step=5)
        monkeypatch.setattr(ledger.time, "sleep", wait)
        journal.event("stop")
    finally:
        for worker in workers:
            os.close(worker)
    assert workers
    assert [line["event"] for line in read_lines(run.ledger(1))] == ["checkpoint", "stop"]


# --------------------------------------------------------------- step by step


def test_a_loss_that_comes_late_is_put_to_its_step(tmp_path: Path) -> None:
    """It is known with the next step's exchange; that the step was done is on record before."""
    telemetry, run = Telemetry(1, 2), RunDir(tmp_path)
    log = StepLog(Spans(torch.device("cpu")), telemetry, Journal(run, 1), 2)
    for step in (1, 2):
        log.begin()
        log.count(step, tokens=20, samples=2)
        log.expect_loss()
        log.end(step)
        if step > 1:
            log.loss(step - 1, (step - 1) / 3)
        log.tell()
        (last,) = [line for line in read_lines(run.steps(1)) if line["step"] == step]
        assert (last["tokens"], last["seconds"] > 0, "loss" in last) == (20, True, False)
    log.loss(2, 2 / 3)
    log.tell()
    lines = read_lines(run.steps(1))
    assert [(line["step"], line.get("tokens"), line.get("loss_hex")) for line in lines] == [
        (1, 20, None),
        (1, None, (1 / 3).hex()),
        (2, 20, None),
        (2, None, (2 / 3).hex()),
    ]
    assert [line["loss"] for line in lines if "loss" in line] == [1 / 3, 2 / 3]


def test_counts_that_come_late_are_put_to_their_step(tmp_path: Path) -> None:
    """They travel with the next step's exchange, or when all is drained; a rate never counts the time of a
    step and not its work."""
    telemetry, run = Telemetry(1, 2), RunDir(tmp_path)
    log = StepLog(Spans(torch.device("cpu")), telemetry, Journal(run, 1), 2)
    assert telemetry.progress.tokens_per_second is None
    for step in (1, 2, 3):
        log.begin()
        if step > 1:
            log.count(step - 1, tokens=10 * (step - 1), samples=1)
        log.end(step, owes_counts=True)
        log.tell()
        assert {line["step"] for line in read_lines(run.steps(1))} == set(range(1, step + 1))
    log.count(3, tokens=30, samples=1)
    log.flush()
    lines = read_lines(run.steps(1))
    counts = [(line["step"], line["tokens"]) for line in lines if "tokens" in line]
    assert counts == [(1, 10), (2, 20), (3, 30)]
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    assert len(seconds) == 3
    rate = telemetry.progress.tokens_per_second
    assert rate is not None
    assert 0 < rate < 60 / max(seconds)


def test_an_attempts_first_step_is_in_no_rate_once_there_is_another() -> None:
    """It chooses kernels and finds memory: for twenty steps after each resume the speed was low by it."""
    telemetry = Telemetry(2, 1)
    telemetry.begin(100, 200, 100, flops_per_token=1e9, peak=1e12)
    told = []
    for step, seconds in ((101, 18.0), (102, 0.5), (103, 0.25)):
        telemetry.step(step, seconds, seconds)
        telemetry.worked(StepFigures(seconds, tokens=100, samples=1))
        telemetry.timed(seconds, {"data": 0.1 * seconds if step > 101 else 0.0})
        now = telemetry.progress
        told.append((now.step_seconds, now.tokens_per_second, now.mfu, now.data_wait_fraction))
    assert told[0] == (18.0, pytest.approx(100 / 18), pytest.approx(1 / 180), 0.0), "all that is known yet"
    assert told[1] == (0.5, 200.0, 0.2, pytest.approx(0.1))
    assert told[2] == (0.375, pytest.approx(200 / 0.75), pytest.approx(0.8 / 3), pytest.approx(0.1))


def test_a_loop_that_tells_its_work_as_its_optimizer_steps_has_a_speed_in_between_too() -> None:
    """Of gradients that add up over four steps: in three of these its speed was not known."""
    telemetry = Telemetry(1, 1)
    telemetry.begin(0, 99, 0, flops_per_token=1e9, peak=1e12)
    told = []
    for step in range(1, 42):
        telemetry.step(step, 0.5, 0.5)
        worked = {"tokens": 400, "samples": 4} if step % 4 == 0 else {"tokens": 0, "samples": 0}
        telemetry.worked(StepFigures(0.5, **worked))
        now = telemetry.progress
        told.append((now.tokens_per_second, now.samples_per_second, now.mfu))
    assert told[:3] == [(None, None, None)] * 3, "nothing was told yet"
    assert told[-4:] == [(200.0, 2.0, pytest.approx(0.2))] * 4


@pytest.mark.parametrize("every", [1, 3, 8, 16, 32])
def test_the_speed_of_a_loop_that_tells_its_work_once_in_some_steps_is_that_of_all_of_them(
    every: int,
) -> None:
    """Among 20 steps there were two of every eighth or three, and so a fifth too little or too much; of every
    32nd there was one, which was 1.6 times too much, or none."""
    telemetry = Telemetry(1, 1)
    telemetry.begin(0, 999, 0, flops_per_token=1e9, peak=1e12)

    def shown() -> tuple[float | None, ...]:
        now, sample = telemetry.progress, telemetry.registry.get_sample_value
        return (
            now.tokens_per_second, now.samples_per_second, now.mfu, sample("holdfast_tokens_per_second"),
            sample("holdfast_mfu_ratio"),
        )  # fmt: skip

    for step in range(1, 5 * every + 30):
        whole = every if step % every == 0 else 0
        telemetry.step(step, 0.5, 0.5)
        telemetry.worked(StepFigures(0.5, 100 * whole, whole))
        if step >= every:
            assert shown() == pytest.approx((200.0, 2.0, 0.2, 200.0, 0.2)), step
    assert telemetry.registry.get_sample_value("holdfast_tokens_total") == 100 * every * (step // every)
    for _ in range(max(21, 2 * every + 1)):  # it tells it no more
        telemetry.worked(StepFigures(0.5, 0, 0))
    assert shown()[:3] == (None, None, None)
    assert all(math.isnan(gauge or 0.0) for gauge in shown()[3:])


def test_mfu_is_a_share_of_what_all_ranks_can_multiply() -> None:
    """Tokens are those of all ranks, the measured peak is that of one."""
    telemetry = Telemetry(1, world_size=4)
    telemetry.begin(0, 9, 0, flops_per_token=1e9, peak=1e12)
    telemetry.step(1, 0.5, 0.5)
    telemetry.worked(StepFigures(0.5, tokens=1000, samples=1))
    assert telemetry.progress.mfu == telemetry.registry.get_sample_value("holdfast_mfu_ratio") == 0.5


def test_a_utilisation_that_is_no_longer_known_is_not_told_as_the_old_one() -> None:
    telemetry = Telemetry(1, 1)
    value = lambda: telemetry.registry.get_sample_value("holdfast_utilization_ratio", {"of": "gpu"})  # noqa: E731
    telemetry.utilization("gpu", 0.75)
    assert (value(), telemetry.progress.gpu_utilization) == (0.75, 0.75)
    telemetry.utilization("gpu", None)
    assert (value(), telemetry.progress.gpu_utilization) == (None, None)


@pytest.mark.parametrize(
    ("usual", "quiet", "still"),
    [(0.5, 29.0, False), (0.5, 31.0, True), (60.0, 500.0, False), (60.0, 700.0, True)],
)
@pytest.mark.parametrize("limit", [3600.0, None], ids=["in its loop", "after it"])
def test_a_run_that_does_nothing_has_no_speed_until_it_goes_on(
    usual: float, quiet: float, still: bool, limit: float | None, tmp_path: Path
) -> None:
    """One that hung was at full speed, with its time left, until it was ended for that; one that had done its
    steps, and went on to evaluate its model, for as long as it took."""
    run, alone = RunDir(tmp_path), gangs.Gang(0, 1, 0, torch.device("cpu"))
    account = Account(run, 1, alone, Place.read(tmp_path), profile=range(0), tensorboard=False)
    telemetry = account.telemetry
    telemetry.begin(0, 9, 0, flops_per_token=1e9, peak=1e12)

    def step(number: int) -> None:
        telemetry.step(number, usual, usual)
        telemetry.worked(StepFigures(usual, tokens=100, samples=1))
        telemetry.timed(usual, {"data": 0.0})
        telemetry.utilization("cpu", 0.5)

    def known() -> set[str]:
        address = run.progress_address(1).read_text()
        progress = Progress.from_json(get(address, "/progress"))
        shown = {name for name, value in series(get(address, "/metrics")).items() if not math.isnan(value)}
        return SERIES & shown | {name for name in RATES if getattr(progress, name) is not None}

    SERIES = {"holdfast_tokens_per_second", "holdfast_mfu_ratio", "holdfast_utilization_ratio{of=cpu}"}
    all_of_them = SERIES | set(RATES) - {"gpu_utilization"}
    step(1)
    step(2)
    account.quiet = lambda: (quiet, limit)
    assert known() == (set() if still else all_of_them)
    account.quiet = lambda: (0.0, limit)
    step(3)
    assert known() == all_of_them
    account.close(3)


def test_work_at_stake_is_known_where_no_record_tells_what_earlier_attempts_took() -> None:
    """Such as when their directories were removed for room. The last save is tried again for as long as that
    work took: here it was not tried again at all, as if a training of days had cost nothing."""
    telemetry = Telemetry(2, 1)
    telemetry.resumed(50, None, {})
    telemetry.begin(50, 200, 50, None, None)
    told = []
    for step in range(51, 56):
        telemetry.step(step, 20.0, 20.0)
        told.append(telemetry.unsaved_seconds)
        if step == 52:
            telemetry.saving(step)
        if step == 53:
            telemetry.saved(Saved(52, 1, 0.1, 0.1, ""))
    assert told == [20.0, 40.0, 60.0, 40.0, 60.0]
    now = telemetry.progress
    assert (now.useful_seconds, now.durable_seconds) == (None, None), "of all attempts: that is not known"


def test_an_attempt_that_saves_nothing_leaves_what_was_durable_before_it() -> None:
    """Its last words are booked as goodput: without these seconds that would be unknown after such an end."""
    telemetry = Telemetry(2, 1)
    telemetry.resumed(50, 100.0, {})
    telemetry.begin(50, 200, 50, None, None)
    telemetry.step(51, 2.0, 2.5)
    now = telemetry.progress
    assert (now.resumed_seconds, now.durable_seconds, now.useful_seconds) == (100.0, 100.0, 102.0)


def test_what_alerts_compare_of_a_save_is_that_of_the_newest() -> None:
    """How long it took beside what a notice leaves, and how long ago it was."""
    telemetry = Telemetry(1, 1)
    value = lambda name: telemetry.registry.get_sample_value(f"holdfast_{name}")  # noqa: E731
    telemetry.saved(Saved(5, 10, 60.0, 2.0, ""), notice_seconds=27.0)
    began = time.time()
    telemetry.saved(Saved(9, 20, 40.0, 1.0, ""), notice_seconds=None)
    assert value("checkpoint_newest_seconds") == 40.0
    assert value("notice_seconds") == 27.0, "one that runs out already says nothing of the next"
    assert began <= (value("checkpoint_timestamp_seconds") or 0.0) <= time.time()
    assert (value("checkpoint_bytes"), value("durable_step")) == (20, 9)


def test_progress_loses_no_update_between_threads() -> None:
    """The saver's thread tells that a step is durable while the loop tells of steps."""
    from concurrent.futures import ThreadPoolExecutor

    telemetry = Telemetry(1, 1)

    def save() -> None:
        for step in range(1, 3000):
            telemetry.saved(Saved(step, 1, 0.1, 0.1, ""))
            assert telemetry.progress.durable_step == step

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        while not saving.done():
            telemetry.loss(1.0)
        saving.result()


def test_what_is_not_known_is_not_zero() -> None:
    telemetry = Telemetry(1, 1)
    for name in ("step", "total_steps", "durable_step"):  # the attempt has not loaded what it goes on from
        assert math.isnan(telemetry.registry.get_sample_value(f"holdfast_{name}") or 0.0), name
    telemetry.begin(90, 200, 80, None, None)
    assert telemetry.registry.get_sample_value("holdfast_durable_step") == 80
    progress = Telemetry(1, 1).progress
    assert (progress.loss, progress.tokens_per_second, progress.data_wait_fraction) == (None, None, None)
    assert (progress.mfu, progress.eta_seconds, progress.total_steps) == (None, None, None)
    assert Progress.from_json(progress.to_json()) == progress


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[1, 2]", "[1, 2]"),
        ('{"step": "many"}', "step is 'many', no int"),
        ('{"step": -1}', "step is '-1', no int"),
        ('{"step": 1e400}', "step is 'None', no int"),
        ('{"durable_step": true}', "durable_step is 'True', no int"),
        ('{"loss": {"a": 1}}', "loss is \"{'a': 1}\", no float | None"),
        ('{"updated": 1e18}', "updated is '1e+18', no float"),
        ('{"updated": NaN}', "updated is 'None', no float"),
        ('{"digest": 7}', "digest is '7', no str"),
        ('{"step": 1}', "missing 4 required positional arguments"),
    ],
)
def test_what_is_no_progress_is_refused_and_costs_no_message(body: str, said: str) -> None:
    """Any program can answer at the port, or write a termination message."""
    with pytest.raises(ValueError, match="not a progress document: ") as refused:
        Progress.from_json(body)
    assert said in str(refused.value)
    text = '{"outcome": "failed", "step": 3, "durable_step": 2, "progress": %s}' % body  # noqa: UP031
    message = Termination.from_json(text)
    assert message == Termination("failed", 3, 2)
    assert message.progress is None


def test_an_error_of_pages_hides_no_figure_of_a_training_that_goes_on() -> None:
    """A save can fail with an object store's whole answer, or with what each of 64 ranks has to say."""
    telemetry = Telemetry(1, 20)
    telemetry.save_failed(8, "rank 0: AccessDenied " + "x" * 4000)
    progress = Progress.from_json(telemetry.progress.to_json())
    assert progress.save_fault is not None
    assert progress.save_fault.startswith("rank 0: AccessDenied x")
    assert progress.save_fault.endswith("x...")
    assert replace(progress, save_fault=None) == replace(telemetry.progress, save_fault=None)


@pytest.mark.parametrize("letter", ["x", "\N{CYRILLIC SMALL LETTER ZHE}", "\N{WEARY FACE}", '"'])
@pytest.mark.parametrize("error", ["", "no ink"])
def test_sentences_give_way_where_they_leave_no_room_for_the_error(letter: str, error: str) -> None:
    progress = replace(Telemetry(1, 2).progress, verdict=letter * 5000, save_fault=letter * 5000, step=2)
    text = Termination("failed", 2, 1, error, progress=progress).to_json()
    assert len(text.encode()) <= TERMINATION_LIMIT
    message = Termination.from_json(text)
    assert message is not None
    assert message.error == error
    assert message.progress is not None
    assert message.progress.step == 2


def test_a_long_error_gives_way_to_the_figures(tmp_path: Path) -> None:
    progress = replace(Telemetry(1, 2).progress, loss=float("nan"), digest="d" * 64, useful_seconds=1.5)
    text = Termination("failed", 3, 2, "no " * 4000 + "ink", progress=progress).to_json()
    assert len(text.encode()) <= TERMINATION_LIMIT
    message = Termination.from_json(text)
    assert message is not None
    assert message.error.endswith("ink")
    assert message.progress is not None
    assert (message.progress.digest, message.progress.useful_seconds) == ("d" * 64, 1.5)


def test_the_stages_of_a_rank_s_start_are_true_though_the_clock_is_set_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = Marks()
    ahead = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: ahead)
    marks.rendezvous = marks.build = marks.loaded = time.monotonic()
    told = marks.durations()
    assert all(0 <= told[stage] < 60 for stage in ("rendezvous", "build", "load"))
    assert marks.told()["process_time"] == pytest.approx(ahead - told["import"], abs=60)


def test_a_rank_that_cannot_write_where_rank_0_can_says_so(tmp_path: Path) -> None:
    """As on another machine of a run in a bucket: it was a traceback."""
    (tmp_path / "file").touch()
    run, second = RunDir(tmp_path / "file" / "run"), gangs.Gang(1, 2, 0, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"run directory .*/file/run cannot be used: .*Not a directory"):
        Account(run, 1, second, Place.read(run.path), profile=range(0), tensorboard=False)
