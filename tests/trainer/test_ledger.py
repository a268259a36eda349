"""What the journal owes to who reads it after a kill: order, what is durable, and times that are true."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from holdfast_trainer import ledger
from holdfast_trainer.contract import RunDir, read_lines
from holdfast_trainer.ledger import Journal, last_validations, trained_before, useful_seconds


def steps_of(run: RunDir, attempt: int = 1) -> list[int]:
    return [line["step"] for line in read_lines(run.steps(attempt))]


class SlowDisk:
    """Each append takes longer than training is to wait; while `answers` is not set it stands still."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers, self.asked = threading.Event(), threading.Event()
        self.answers.set()
        self.clock = 0.0
        self.seconds = 1.5 * ledger.SLOW_SECONDS
        whole: Callable[..., int] = os.open

        def slow(path: Any, *more: Any) -> int:
            self.asked.set()
            assert self.answers.wait(300)
            self.clock += self.seconds
            return whole(path, *more)

        patch.setattr(ledger.os, "open", slow)
        patch.setattr(ledger.time, "perf_counter", lambda: self.clock)


def test_a_step_that_found_no_room_is_on_record_before_what_it_led_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full for the last step has room again for the stop: the step was never done, by what
    its attempt left."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(ledger.os, "write", full)
        journal.steps([{"step": 7}])
    assert journal.unwritten == 1
    journal.event("stop", step=7)
    assert steps_of(run) == [7]
    assert journal.unwritten == 0


def test_an_event_is_told_with_the_moment_it_was_of(tmp_path: Path) -> None:
    """A first step is known by when it ended, a stop by the figures that it tells: the line comes later."""
    journal, run = Journal(RunDir(tmp_path), 3), RunDir(tmp_path)
    journal.event("first_step", time=12.5, step=1)
    journal.event("stop")
    first, stop = read_lines(run.ledger(3))
    assert (first["time"], first["attempt"]) == (12.5, 3)
    assert stop["time"] > first["time"]


def test_an_event_is_durable_when_it_was_told_however_slow_the_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are then written in a thread of their own. A ledger that was too would lose to a kill what the
    log said was saved."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    SlowDisk(monkeypatch)
    synced_by, whole = list[int](), os.fsync

    def sync(fd: int) -> None:
        synced_by.append(threading.get_ident())
        whole(fd)

    monkeypatch.setattr(ledger.os, "fsync", sync)
    for number in range(1, 2 * ledger.SLOW_IN_A_ROW):
        journal.event("checkpoint", step=number)
        assert [line["step"] for line in read_lines(run.ledger(1))] == list(range(1, number + 1))
        assert synced_by == number * [threading.get_ident()]


def test_a_disk_that_is_slow_now_and_then_is_still_written_to_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread has yet to write is lost with a rank that is killed."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    disk = SlowDisk(monkeypatch)
    for step in range(1, 4 * ledger.SLOW_IN_A_ROW):
        disk.seconds = 0.0 if step % ledger.SLOW_IN_A_ROW == 0 else 1.5 * ledger.SLOW_SECONDS
        journal.steps([{"step": step}])
        assert steps_of(run) == list(range(1, step + 1))
    assert journal._steps._due is None


def test_beside_a_disk_that_hangs_lines_take_no_more_memory_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that the thread has in hand are among the lines that found no room."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr(ledger, "MOST_LATE", 20)
    for step in range(1, ledger.SLOW_IN_A_ROW + 1):
        journal.steps([{"step": step}])
    disk.answers.clear()
    disk.asked.clear()
    journal.steps([{"step": 6}])
    assert disk.asked.wait(300)
    assert journal.unwritten == 1
    for step in range(7, 101):
        journal.steps([{"step": step}])
    assert journal.unwritten == 95
    assert len(journal._steps._late) == 20
    disk.answers.set()
    journal.event("stop")
    assert steps_of(run) == [1, 2, 3, 4, 5, 6, *range(81, 101)]
    assert journal.unwritten == 74


def test_a_line_that_comes_while_the_thread_writes_is_written_without_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long step may follow: until its end the one before it would have been done by nobody."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    disk = SlowDisk(monkeypatch)
    for step in range(1, ledger.SLOW_IN_A_ROW + 1):
        journal.steps([{"step": step}])
    disk.answers.clear()
    disk.asked.clear()
    journal.steps([{"step": 6}])
    assert disk.asked.wait(300)
    journal.steps([{"step": 7}])
    disk.answers.set()
    wait_until(lambda: steps_of(run) == list(range(1, 8)), "both lines to be written")


@pytest.mark.parametrize("missing", [1, 9], ids=["all but its end", "some of it"])
def test_lines_that_were_cut_twice_spoil_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """A line that begins anew, as the one before it was cut, finds no room for its end in its turn."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(ledger.os, "write", lambda fd, data: whole(fd, data[:-missing]))
        journal.steps([{"step": 1}])
        journal.steps([{"step": 2}])
    journal.steps([{"step": 3}])
    assert set(steps_of(run)) == {1, 2, 3}


def test_a_cut_line_whose_sync_fails_too_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    whole = os.write

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(ledger.os, "write", lambda fd, data: whole(fd, data[:-9]))
        patch.setattr(ledger.os, "fsync", fails)
        journal.event("checkpoint", step=5)
    journal.event("stop")
    assert [line["event"] for line in read_lines(run.ledger(1))] == ["checkpoint", "stop"]


def test_a_file_system_without_locks_has_the_ledger_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)

    def refuses(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(ledger.fcntl, "flock", refuses)
    journal.event("stop")
    assert [line["event"] for line in read_lines(run.ledger(1))] == ["stop"]
    assert journal.unwritten == 0


def test_the_steps_that_a_checkpoint_covers_are_as_durable_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not done again: after a power cut their losses would be nowhere."""
    run, synced, whole = RunDir(tmp_path), list[str](), os.fsync
    journal = Journal(run, 1)

    def sync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        whole(fd)

    monkeypatch.setattr(ledger.os, "fsync", sync)
    journal.steps([{"step": 1}])
    journal.event("validation", step=1, val_loss=2.0)
    assert synced == ["ledger.jsonl"]
    journal.event("checkpoint", step=1)
    assert synced[1:] == ["steps.jsonl", "ledger.jsonl"], "first what it covers"
    journal.event("checkpoint", step=1)
    assert synced[3:] == ["ledger.jsonl"], "nothing was written since"


def test_useful_seconds_are_those_of_the_steps_as_they_were_last_done(tmp_path: Path) -> None:
    """Step 4 was saved twice, as what was saved first had been damaged; and an attempt that failed at step 5
    told with its end what it had spent until its checkpoint of step 2."""
    run = RunDir(tmp_path)
    first, second = Journal(run, 1), Journal(run, 2)
    first.event("checkpoint", step=4, useful_seconds=4.0)
    second.event("checkpoint", step=2, useful_seconds=2.5)
    second.event("checkpoint", step=4, useful_seconds=7.0)
    second.event("stop", step=5, durable_step=2, useful_seconds=2.5)
    assert useful_seconds(run, 3, 4) == 7.0
    assert useful_seconds(run, 2, 4) == 4.0
    assert useful_seconds(run, 3, 5) is None


def test_ledgers_are_read_once_where_no_line_tells_of_the_newest_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the attempts tell what they began with, so that each has to be summed anew."""
    run, read = RunDir(tmp_path), list[Path]()
    for attempt in range(1, 6):
        journal = Journal(run, attempt)
        journal.event("attempt_start", resumed_step=attempt - 1, useful_seconds=None)
        journal.steps([{"step": attempt, "seconds": 1.0}])
    monkeypatch.setattr(ledger, "read_lines", lambda path: read.append(path) or read_lines(path))
    assert useful_seconds(run, 6, 5) == 5.0
    assert sorted(read) == [run.ledger(attempt) for attempt in range(1, 6)]


def test_a_validation_that_tells_no_figure_is_none(tmp_path: Path) -> None:
    """A loss that is no number would be the least of all, and keep its checkpoint for good."""
    journal, run = Journal(RunDir(tmp_path), 1), RunDir(tmp_path)
    journal.event("validation", step=4, val_loss=0.5)
    journal.event("validation", step=8, val_loss=float("nan"))
    journal.event("validation", step=9, val_loss=None)
    journal.event("validation", step=None, val_loss=0.25)
    assert last_validations(read_lines(run.ledger(1))) == {4: 0.5}


@pytest.mark.parametrize(("event", "trained"), [("first_step", True), ("checkpoint", True), ("stop", False)])
def test_a_step_of_an_attempt_before_is_known_by_what_it_told(
    tmp_path: Path, event: str, trained: bool
) -> None:
    run = RunDir(tmp_path)
    Journal(run, 2).event(event, step=1)
    assert trained_before(run, 3) is trained
    assert not trained_before(run, 2), "this attempt's own"
