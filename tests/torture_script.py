"""A training of one rank that is killed, or frozen, at any chosen file operation of its saves.

`python torture_script.py kill|freeze DIR` does so at every operation in turn, each time in a run of its
own, lets the next attempt finish the run, and compares the final digest with an untouched twin's. It forks
the trainings, so that torch is imported once. Prints a line of JSON; ends with 1 at the first difference.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lone_gang import Alone

from holdfast_trainer.checkpoint import Fenced, Saver, load_newest
from holdfast_trainer.checkpoint.directory import CheckpointDirectory
from holdfast_trainer.checkpoint.storage import Storage
from holdfast_trainer.contract import RunDir, raise_fence

STEPS, EVERY, KEEP = 8, 2, 2
FENCED = 7


class Struck(Storage):
    """Sends this process a signal before its operation number `at`, counted from 0."""

    def __init__(self, at: int | None, number: int) -> None:
        self._at, self._number, self.count = at, number, 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("_") or name == "count":
            return method
        if self.count == self._at:
            self.count += 1
            os.kill(os.getpid(), self._number)
        self.count += 1
        return method


def train(run: RunDir, attempt: int, storage: Storage) -> str:
    """From the newest checkpoint to the end; returns the digest. Raises Fenced."""
    raise_fence(run, attempt)
    run.checkpoints.mkdir(exist_ok=True)
    CheckpointDirectory(run, attempt, storage).sweep()
    loaded, skipped = load_newest(run, attempt, Alone())
    assert not skipped, skipped
    step, weights = 0, torch.linspace(0.0, 1.0, 500)
    if loaded is not None:
        step, weights = loaded.manifest.step, loaded.shared["parts"]["w"]
        torch.set_rng_state(loaded.own["rng"])
    else:
        torch.manual_seed(5)
    saver = Saver(run, attempt=attempt, rank=0, world_size=1, keep=KEEP, storage=storage)
    while step < STEPS:
        weights = weights * 1.01 + torch.rand(500)
        step += 1
        if step % EVERY == 0:
            saver.save(step, {"parts": {"w": weights}}, {"rng": torch.get_rng_state()})
            saver.wait()
    manifest = saver.newest
    assert manifest is not None
    assert manifest.step == STEPS
    return manifest.digest


def forked(run: RunDir, attempt: int, storage: Storage) -> int:
    """The pid of a child that trains; it ends with 0, or FENCED where it learnt that it may not write."""
    pid = os.fork()
    if pid:
        return pid
    try:
        train(run, attempt, storage)
        os._exit(0)
    except Fenced:
        os._exit(FENCED)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def strike(mode: str, run: RunDir, at: int) -> tuple[str, int]:
    """(digest of the run's end, status of the attempt that was struck)."""
    number = signal.SIGKILL if mode == "kill" else signal.SIGSTOP
    pid = forked(run, 1, Struck(at, number))
    _, status = os.waitpid(pid, os.WUNTRACED)
    if mode == "kill":
        assert os.WIFSIGNALED(status), f"operation {at}: status {status}"
        return train(run, 2, Storage()), -os.WTERMSIG(status)
    assert os.WIFSTOPPED(status), f"operation {at}: status {status}"
    digest = train(run, 2, Storage())
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    loaded, skipped = load_newest(run, 3, Alone())
    assert loaded is not None
    assert not skipped
    assert loaded.manifest.digest == digest, f"operation {at}: the woken attempt changed the newest"
    return digest, os.waitstatus_to_exitcode(status)


def main() -> int:
    mode, place = sys.argv[1], Path(sys.argv[2])
    counting = Struck(None, 0)
    twin = train(RunDir(place / "twin"), 1, counting)
    statuses: dict[int, int] = {}
    for at in range(counting.count):
        run = RunDir(place / f"run-{at}")
        digest, status = strike(mode, run, at)
        statuses[status] = statuses.get(status, 0) + 1
        if digest != twin:
            print(f"struck at operation {at}: {digest}, the twin has {twin}", file=sys.stderr)
            return 1
        shutil.rmtree(run.path)
    print(json.dumps({"operations": counting.count, "statuses": statuses}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
