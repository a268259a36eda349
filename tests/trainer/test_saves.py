"""When a run saves by the clock, from what its own saves and steps took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast_trainer import saves
from holdfast_trainer.account import Account
from holdfast_trainer.checkpoint import Cadence, directory, flight, stage
from holdfast_trainer.checkpoint.storage import Storage
from holdfast_trainer.contract import RunDir, raise_fence
from holdfast_trainer.exactness import Exactness
from holdfast_trainer.interruption import Notice
from holdfast_trainer.parallel import Gang
from holdfast_trainer.place import Place
from holdfast_trainer.saves import Saves
from holdfast_trainer.training_state import TrainingState
from holdfast_trainer.watchdog import HangAfter, Watchdog

ALONE = Gang(0, 1, 0, torch.device("cpu"))
DISK_SECONDS = 1.0


class SlowDisk(Storage):
    def write(self, fd: int, data: memoryview, offset: int) -> None:
        time.sleep(DISK_SECONDS)
        super().write(fd, data, offset)


class Training:
    """Steps by a clock of its own, and what a loop does at the end of each."""

    def __init__(self, run: RunDir) -> None:
        self.seconds, self.steps = 0.0, 0
        self.account = Account(run, 1, ALONE, Place.read(run.path), profile=range(0), tensorboard=False)
        self.saves = Saves(
            run,
            ALONE,
            Cadence(),
            Notice(30, lambda: None),
            Watchdog(run, 1, ALONE, HangAfter.parse("auto"), lambda *told: None),
            self.account,
            attempt=1,
            config_hash="",
            environment={},
            keep=3,
            keep_every=0,
            keep_best=0,
            snapshot="overlapped",
            exactness=Exactness({}, ALONE),
            clock=lambda: self.seconds,
        )
        self.saves.state = TrainingState({"model": torch.nn.Linear(2, 2)}, 0)

    def step(self, seconds: float) -> None:
        self.seconds += seconds
        self.steps += 1
        self.saves.end_step()

    def save(self, beside: float) -> None:
        """One save; the step in which it becomes durable takes `beside` seconds."""
        assert self.saves.begin_in_turn(self.steps)
        assert self.saves.settled_step() == self.steps
        self.step(beside)

    def due_after(self) -> float:
        """Seconds from a save on until another is due."""
        began = self.seconds
        while not self.saves.due_by_clock():
            self.step(1.0)
        return self.seconds - began


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setattr(directory, "Storage", SlowDisk)
    monkeypatch.delenv("HOLDFAST_RUN_DIR", raising=False)
    run = RunDir(tmp_path / "run")
    raise_fence(run, 1)
    made = Training(run)
    yield made
    made.account.close(0)


def test_auto_weighs_what_the_steps_felt_of_a_save(training: Training) -> None:
    """On a disk that takes a second, by which alone it would be due every two minutes."""
    for _ in range(5):
        training.step(1.0)
    training.save(beside=1.0)
    assert training.due_after() < 100, "the steps felt nothing, but for what a busy machine stalls them"
    training.save(beside=3.0)
    assert training.due_after() > 100, "training stood still for as long as the disk took"


def test_a_save_that_waits_for_the_end_of_a_long_step_is_not_told_to_hang(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one after which the loop validates for half an hour: its disk was said to have taken nothing, and
    the next save was passed over."""
    model, written, ahead = torch.nn.Linear(256, 256), threading.Event(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training.saves.state = TrainingState({"model": model, "optimizer": optimizer}, 0)
    whole = SlowDisk.sync

    def sync(disk: SlowDisk, fd: int) -> None:
        whole(disk, fd)
        written.set()

    monkeypatch.setattr(SlowDisk, "sync", sync)
    monkeypatch.setattr(flight, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    training.step(1.0)
    assert training.saves.begin_in_turn(1)
    assert written.wait(300)
    ahead = 2000.0
    training.step(2000.0)
    assert training.saves.begin_in_turn(2)
    assert training.account.telemetry.progress.save_fault is None
    assert training.saves.newest_step == 2
    training.saves.settle()
    assert training.saves.settled_step() == 2


def test_a_disk_that_hangs_holds_no_training_up_that_has_no_memory_to_stage_its_saves(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which waits for each save, and so it did for ever, with its watchdog told that all was well. What is
    written once the disk is back must be no checkpoint: the state has changed by then."""
    answers = threading.Event()
    whole = SlowDisk.write

    def hangs(disk: SlowDisk, fd: int, data: memoryview, offset: int) -> None:
        assert answers.wait(300)
        whole(disk, fd, data, offset)

    monkeypatch.setattr(SlowDisk, "write", hangs)
    monkeypatch.setattr(stage, "free_memory", lambda: 0)
    monkeypatch.setattr(saves, "STUCK_SECONDS", 0.2)
    training.step(1.0)
    assert training.saves.begin_in_turn(1)
    training.step(1.0)
    assert training.saves.begin_in_turn(2), "it goes on without that one too"
    fault = training.account.telemetry.progress.save_fault or ""
    assert fault.startswith("step 1 could not be saved: ")
    answers.set()
    assert training.saves.settled_step() == 0
    monkeypatch.setattr(saves, "STUCK_SECONDS", 300.0)
    training.step(1.0)
    assert training.saves.begin_in_turn(3)
    assert training.saves.settled_step() == 3


def test_a_last_save_becomes_durable_though_a_peer_is_lost_meanwhile(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose part may be there by then: the rank waits for its own disk, and fails afterwards."""
    answers = iter(([(False, False)], [True]))  # nothing is in flight; this step is to be saved

    def gather(gang: Gang, value: object) -> object:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("Connection closed by peer") from None

    training.step(1.0)
    monkeypatch.setattr(Gang, "gather", gather)
    with pytest.raises(RuntimeError, match="closed by peer"):
        training.saves.now(training.steps)
    assert training.saves.durable_step == training.steps
