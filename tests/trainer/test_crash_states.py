"""The power fails at every operation of real saves, and may take anything that was not synced.

Three ranks save four times and prune. For each prefix of what they did to the file system, states are made
that a crash may leave there (see crash_states.py), and each is loaded as the next attempt would: what was
reported durable is there, to the bit, or what was just being committed is; never an error, never another
tensor.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_states import Disk, Operation, Recorder, apply, lay_out

from holdfast_trainer.checkpoint import CheckpointDirectory, CheckpointError, Saved, Saver, load_newest
from holdfast_trainer.contract import RunDir, raise_fence

WORLD = 3
MOST = int(os.environ.get("CRASH_STATES", "250"))
"""States of one crash point, drawn where there are more."""


class One:
    """Rank 1, whose peers see the same."""

    rank, world_size = 1, WORLD

    def __init__(self, run: RunDir) -> None:
        self._directory = CheckpointDirectory(run, 2)

    def broadcast(self, value: Any) -> Any:
        return self._directory.steps()

    def gather(self, value: Any) -> list[Any]:
        return [value]


def state(step: int) -> dict[str, Any]:
    tensors = {"w": torch.arange(40.0) + step, "b": torch.full((3,), float(step)), "r": torch.tensor(step)}
    return {"step": step, "parts": {"model": tensors}}


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory where there is such a place: thousands of small trees are made and removed."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="crash-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


class AtOnce(Recorder):
    """No rank's file is synced before all are written, so that a crash has the most to choose from."""

    def __init__(self) -> None:
        super().__init__()
        self._met = threading.Barrier(WORLD)

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)  # the last thing before the sync, and of no other file
        self._met.wait(300)


def save_all(run: RunDir, recorder: Recorder, steps: list[int], bad: set[int]) -> None:
    """All ranks, each in a thread, save together; what is reported durable is noted."""

    def note(saved: Saved) -> None:
        recorder.note(f"durable {saved.step}")

    savers = [
        Saver(run, attempt=1, rank=rank, world_size=WORLD, keep=2, storage=recorder, on_saved=note)
        for rank in range(WORLD)
    ]
    savers[0].bad_steps = set(bad)
    for step in steps:
        for rank, saver in enumerate(savers):
            saver.save(step, state(step), {"rng": torch.tensor([step, rank])}, rank_0_only=frozenset())
        for saver in savers:
            saver.wait()


def record(place: Path, damaged: bool) -> tuple[Disk, list[Operation]]:
    """What the disk held before, and what was done then."""
    run = RunDir(place / "run")
    raise_fence(run, 1)
    run.checkpoints.mkdir()
    steps, bad = [10, 20, 30, 40], set[int]()
    if damaged:  # the newest checkpoint has a flipped bit, and its step is saved again
        save_all(run, Recorder(), [10, 20], set())
        part = run.checkpoint(20) / "rank-1.safetensors"
        part.write_bytes(part.read_bytes()[:-1] + b"?")
        steps, bad = [20, 30], {20}
    disk, recorder = Disk(run.path), AtOnce()
    save_all(run, recorder, steps, bad)
    return disk, recorder.operations


def check(run: RunDir, durable: int, coming: int) -> int:
    """Load as the next attempt would; returns the step."""
    loaded, skipped = load_newest(run, 2, One(run))
    if loaded is None:
        assert durable == 0, f"step {durable} was reported durable and is gone"
        return 0
    step = loaded.manifest.step
    assert step in {durable, coming}, f"loaded {step}; durable is {durable}, {[s.reason for s in skipped]}"
    assert loaded.own is not None
    assert loaded.own["rng"].tolist() == [step, 1]
    for name, value in state(step)["parts"]["model"].items():
        assert torch.equal(loaded.shared["parts"]["model"][name], value), (step, name)
    assert loaded.shared["step"] == step
    return step


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True], ids=["new run", "a damaged newest checkpoint"])
def test_whatever_a_crash_leaves_can_be_loaded(place: Path, damaged: bool) -> None:
    disk, operations = record(place, damaged)
    coming_steps = [int(o.data.split()[1]) for o in operations if o.kind == "note"]
    assert coming_steps == ([20, 30] if damaged else [10, 20, 30, 40])
    chance = random.Random(1)
    durable = 10 if damaged else 0
    seen: set[tuple[int, bytes]] = set()
    found: set[int] = set()
    for operation in [Operation("note", data=b"start 0"), *operations]:
        if operation.kind == "note":
            if operation.data.startswith(b"durable"):
                durable = int(operation.data.split()[1])
        else:
            disk.do(operation)
        coming = next((step for step in coming_steps if step > durable), durable)
        for tree in disk.states(MOST, chance):
            mark = (durable, hashlib.sha256(pickle.dumps(tree)).digest())
            if mark in seen:
                continue
            seen.add(mark)
            shutil.rmtree(place / "state", ignore_errors=True)
            lay_out(tree, place / "state")
            found.add(check(RunDir(place / "state"), durable, coming))
    assert found == {0 if not damaged else 10, *coming_steps}
    print(f"{len(seen)} different states of {len(operations)} operations")
    assert len(seen) > MOST * (2 if damaged else 5)


def test_the_model_forgets_what_was_not_synced(tmp_path: Path) -> None:
    """The judge is judged: without its syncs, a save does not survive."""
    disk = Disk(tmp_path)
    disk.do(Operation("create", tmp_path / "a", file=1))
    data = b"1" * 512 + b"2" * 8
    disk.do(Operation("write", file=1, data=data))
    trees = list(disk.states(100, random.Random(1)))
    assert {} in trees
    for content in (b"", data, data[:512], data[:512] + bytes(8), bytes(520), bytes(512) + data[512:]):
        assert {"a": content} in trees
    disk.do(Operation("sync", file=1))
    assert list(disk.states(100, random.Random(1))) == [{}, {"a": data}], "its name is not synced"
    disk.do(Operation("sync_directory", tmp_path))
    disk.do(Operation("rename", tmp_path / "a", tmp_path / "b"))
    assert list(disk.states(100, random.Random(1))) == [{"a": data}, {"b": data}]
    assert apply(b"abc", [Operation("write", data=b"X", offset=5)]) == b"abc\0\0X"


@pytest.mark.parametrize("forgotten", ["sync", "sync_directory"])
def test_a_save_that_forgot_to_sync_is_caught(place: Path, forgotten: str) -> None:
    """Were the saver to leave out a kind of sync, states would be found that lose work."""
    disk, operations = record(place, damaged=False)
    chance = random.Random(1)
    durable = 0

    def crash_everywhere() -> None:
        nonlocal durable
        for operation in operations:
            if operation.kind == "note":
                durable = int(operation.data.split()[1])
            elif operation.kind != forgotten:
                disk.do(operation)
            for tree in disk.states(20, chance):
                shutil.rmtree(place / "state", ignore_errors=True)
                lay_out(tree, place / "state")
                check(RunDir(place / "state"), durable, durable + 10)

    with pytest.raises((AssertionError, CheckpointError), match=r"reported durable|none of the|loaded"):
        crash_everywhere()
