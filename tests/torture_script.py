"""A training of one rank that is killed, or frozen, at any chosen file operation of its saves.

`python torture_script.py kill|freeze DIR` does so at every operation in turn, each time in a run of its
own, lets the next attempt finish the run, and compares the final digest with an untouched twin's. Then all
of that again with an attempt that goes on from a run whose newest checkpoint is damaged, and replaces it. It
forks the trainings, so that torch is imported once. Prints a line of JSON; ends with 1 at the first
difference.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import threading
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
            # To this thread: another one that takes a signal for the process stops this one a little later.
            signal.pthread_kill(threading.get_ident(), self._number)
        self.count += 1
        return method


def train(run: RunDir, attempt: int, storage: Storage, *, damaged: bool = False) -> str:
    """From the newest checkpoint to the end; returns the digest. `damaged`: that of the last step may be.

    Raises Fenced.
    """
    raise_fence(run, attempt)
    run.checkpoints.mkdir(exist_ok=True)
    CheckpointDirectory(run, attempt, storage).sweep()
    loaded, skipped = load_newest(run, attempt, Alone())
    bad = {skip.step for skip in skipped}
    assert bad <= ({STEPS} if damaged else set()), skipped
    step, weights = 0, torch.linspace(0.0, 1.0, 500)
    if loaded is not None:
        step, weights = loaded.manifest.step, loaded.shared["parts"]["w"]
        torch.set_rng_state(loaded.own["rng"])
    else:
        torch.manual_seed(5)
    saver = Saver(run, attempt=attempt, rank=0, world_size=1, keep=KEEP, storage=storage)
    saver.bad_steps = bad
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


def forked(run: RunDir, attempt: int, storage: Storage, *, damaged: bool) -> int:
    """The pid of a child that trains; it ends with 0, or FENCED where it learnt that it may not write."""
    gc.collect()  # memory for staging is not there in a child, which must not come to free it
    pid = os.fork()
    if pid:
        return pid
    try:
        train(run, attempt, storage, damaged=damaged)
        os._exit(0)
    except Fenced:
        os._exit(FENCED)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def strike(mode: str, run: RunDir, at: int, *, damaged: bool) -> tuple[str, int]:
    """(digest of the run's end, status of the attempt that was struck)."""
    number = signal.SIGKILL if mode == "kill" else signal.SIGSTOP
    pid = forked(run, 2, Struck(at, number), damaged=damaged)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if mode == "kill":
        assert os.WIFSIGNALED(status), f"operation {at}: status {status}"
        return train(run, 3, Storage(), damaged=damaged), -os.WTERMSIG(status)
    assert os.WIFSTOPPED(status), f"operation {at}: status {status}"
    digest = train(run, 3, Storage(), damaged=damaged)
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    loaded, skipped = load_newest(run, 4, Alone())
    assert loaded is not None
    assert not skipped
    assert loaded.manifest.digest == digest, f"operation {at}: the woken attempt changed the newest"
    return digest, os.waitstatus_to_exitcode(status)


def begun(path: Path, damaged: Path | None) -> RunDir:
    """A run at `path`: a new one, or a copy of `damaged`."""
    if damaged is not None:
        shutil.copytree(damaged, path)
    return RunDir(path)


def damage(run: RunDir) -> None:
    """Of the last step's checkpoint a bit flips."""
    file = run.checkpoint(STEPS) / "rank-0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 4
    file.write_bytes(raw)


def main() -> int:
    mode, place = sys.argv[1], Path(sys.argv[2])
    gc.freeze()  # what was imported is not looked at again
    whole = RunDir(place / "twin")
    twin = train(whole, 1, Storage())
    damage(whole)
    operations, statuses = list[int](), dict[int, int]()
    for damaged in (None, whole.path):
        counting = Struck(None, 0)
        train(begun(place / f"counted-{len(operations)}", damaged), 2, counting, damaged=damaged is not None)
        operations.append(counting.count)
        for at in range(counting.count):
            run = begun(place / f"run-{at}", damaged)
            digest, status = strike(mode, run, at, damaged=damaged is not None)
            statuses[status] = statuses.get(status, 0) + 1
            if digest != twin:
                print(f"struck at operation {at}: {digest}, the twin has {twin}", file=sys.stderr)
                return 1
            shutil.rmtree(run.path)
    print(json.dumps({"operations": operations, "statuses": statuses}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
