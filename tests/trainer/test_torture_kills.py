"""A run of two ranks is struck with `kill -9` again and again, and ends with the bits of an untouched one.

Ranks and whole gangs die at random instants of their start and their steps, and at those that matter: while
parts are written, when all parts are there, while a checkpoint is committed, while old ones are removed.
Now and then the next attempt starts beside one that still runs, as where an agent died and its ranks did
not, and now and then the newest checkpoint is damaged. `KILLS=200` strikes that often, agents of torchrun
too; `KILL_SEED` repeats a run's choices.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from gangs import KILL, LOOP, NOTICE, Gang, Workshop
from processes import Processes
from waiting import wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer.checkpoint import CheckpointDirectory
from holdfast_trainer.contract import RunDir, raise_fence

KILLS = int(os.environ.get("KILLS", "14"))
SEED = int(os.environ.get("KILL_SEED", "7"))
OPTIONS = {"save_every": 5, "keep": 2, "dropout": 0.1, "norm": True, "size": 4200}
ENDLESS = {**OPTIONS, "steps": 10**6, "pause": 0.005}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 30 * KILLS)]


def names(run: RunDir) -> list[str]:
    try:
        return os.listdir(run.checkpoints)
    except FileNotFoundError:
        return []


def inside(run: RunDir, name: str) -> set[str]:
    try:
        return set(os.listdir(run.checkpoints / name))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def unfinished(run: RunDir, attempt: int) -> list[set[str]]:
    """What lies in the directories that this attempt writes just now."""
    mark = f".attempt-{attempt}."
    return [inside(run, name) for name in names(run) if name.startswith(".step-") and mark in name]


def writing(run: RunDir, attempt: int) -> bool:
    return any(
        "rank-0.safetensors" in files or "rank-1.safetensors" in files for files in unfinished(run, attempt)
    )


def all_written(run: RunDir, attempt: int) -> bool:
    return any({"rank-0.json", "rank-1.json"} <= files for files in unfinished(run, attempt))


def committing(run: RunDir, attempt: int) -> bool:
    return any("manifest.json" in files for files in unfinished(run, attempt))


def pruning(run: RunDir, attempt: int) -> bool:
    steps = [name for name in names(run) if name.startswith("step-")]
    return len(steps) > OPTIONS["keep"] or any("manifest.json" not in inside(run, name) for name in steps)


MOMENTS: dict[str, Callable[[RunDir, int], bool]] = {
    "writing": writing,
    "all written": all_written,
    "committing": committing,
    "pruning": pruning,
}
TARGETS = ["a rank", "writing", "the gang", "committing", "beside", "pruning", "all written"]


class Torture:
    """One run under one sequence of choices."""

    def __init__(self, workshop: Workshop, processes: Processes) -> None:
        self._workshop, self._processes = workshop, processes
        self._chance = random.Random(SEED)
        self._run = RunDir(workshop.path / "run")
        self.struck: dict[str, int] = {}
        self._left_running: list[Gang] = []

    def strike(self, target: str) -> None:
        """Start an attempt, and end it as `target` says."""
        self.struck[target] = self.struck.get(target, 0) + 1
        if target == "an agent":
            self._kill_an_agent()
            return
        gang = self._start()
        if target in MOMENTS:
            self._await_moment(MOMENTS[target], gang)
            gang.signal(KILL, [0] if target in ("committing", "pruning") else [self._chance.randrange(2)])
        elif target == "beside":
            gang.wait_for_step(self._resumed(gang) + 3, 120)
            self._left_running.append(gang)  # it goes on, until it learns that it was superseded
            return
        else:
            time.sleep(self._chance.uniform(0, 2))  # any instant from the first import on
            gang.signal(KILL, [self._chance.randrange(2)] if target == "a rank" else None)
        self._end(gang)

    def _start(self) -> Gang:
        """Raises the fence first, as engines do: an attempt may be killed before it could."""
        raise_fence(self._run, self._workshop.numbers.get("run", 0) + 1)
        return self._workshop.start("run", ranks=2, **ENDLESS)

    def _resumed(self, gang: Gang) -> int:
        events = wait_until(
            lambda: gang.history.events("attempt_start", gang.attempt), f"attempt {gang.attempt}"
        )
        return int(events[0]["resumed_step"])

    def _await_moment(self, moment: Callable[[RunDir, int], bool], gang: Gang) -> None:
        """Watches without a pause, as the moments are short; one that slips by comes again with each save."""
        bound = time.monotonic() + 120
        while not moment(self._run, gang.attempt):
            if time.monotonic() > bound:
                raise AssertionError(f"no such moment in attempt {gang.attempt}: {gang.texts()[-2000:]}")
            if gang.ranks[0].code is None and self._chance.random() < 0.001:
                assert gang.ranks[0].poll() is None, gang.texts()[-2000:]

    def _end(self, gang: Gang) -> None:
        """As an engine does: ranks whose peers are gone get a moment to end, then they are ended."""
        bound = time.monotonic() + self._chance.choice([0, 1])
        while any(rank.poll() is None for rank in gang.ranks) and time.monotonic() < bound:
            time.sleep(0.01)
        gang.signal(KILL)
        gang.wait()

    def _kill_an_agent(self) -> None:
        number = self._workshop.numbers["run"] = self._workshop.numbers.get("run", 0) + 1
        raise_fence(self._run, number)
        place = self._workshop.path / f"run-{number}"
        place.mkdir()
        env = {
            "HOLDFAST_RUN_DIR": str(self._run.path),
            "HOLDFAST_ATTEMPT": str(number),
            "HOLDFAST_TERMINATION_LOG": str(place / "termination"),
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        words += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(LOOP), json.dumps(ENDLESS)]
        with open(place / "agent.log", "w") as log:
            agent = self._processes.start(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        history = self._workshop.history("run")
        wait_until(lambda: history.last_step(number) > 0, f"attempt {number} to step")
        agent.send_signal(signal.SIGKILL)  # its ranks live on, until they learn that they were superseded
        agent.wait(300)

    def settle(self) -> None:
        """Wait until attempts that ran beside a newer one have learnt that, and ended."""
        for gang in self._left_running:
            gang.wait(300)
            assert "superseded" in gang.texts(), gang.texts()[-2000:]
        self._left_running = []
        wait_until(lambda: not self._processes.running(), "ranks without an agent to end")

    def damage(self) -> None:
        """The newest checkpoint, where there is another good one. Nothing may be running."""
        directory = CheckpointDirectory(self._run, self._workshop.numbers["run"])
        good = [step for step in directory.steps() if directory.fault(step) is None]
        if len(good) < 2:
            return
        path = self._chance.choice(sorted(self._run.checkpoint(good[0]).iterdir()))
        raw = bytearray(path.read_bytes())
        place = self._chance.randrange(len(raw))
        if self._chance.random() < 0.5:
            raw[place] ^= 1 << self._chance.randrange(8)
        else:
            del raw[place:]
        path.write_bytes(raw)
        self.struck["damage"] = self.struck.get("damage", 0) + 1

    def finish(self) -> Gang:
        """A last attempt, which is given notice when nothing else runs any more."""
        gang = self._start()
        gang.wait_for_step(self._resumed(gang) + 7, 120)
        self.settle()
        gang.signal(NOTICE)
        assert gang.wait(300) == [0, 0], gang.texts()[-3000:]
        return gang


def test_killed_again_and_again_a_run_ends_as_its_twin(workshop: Workshop, processes: Processes) -> None:
    torture = Torture(workshop, processes)
    targets = [*TARGETS, "an agent"] if KILLS >= 100 else TARGETS
    began = time.monotonic()
    for number in range(KILLS):
        target = targets[number % len(targets)]
        torture.strike(target)
        if number % 5 == 3 and target not in ("beside", "an agent"):  # these supersede nothing yet
            torture.settle()
            torture.damage()
    gang = torture.finish()
    stop = gang.history.stop(gang.attempt)
    told = f"KILL_SEED={SEED}: {torture.struck}, {gang.attempt} attempts, {stop['step']} steps"
    print(f"{told}, {time.monotonic() - began:.0f} s")
    assert (stop["outcome"], stop["durable_step"]) == ("interrupted", stop["step"])

    twin = workshop.finish("twin", ranks=2, **{**OPTIONS, "steps": stop["step"]})
    assert twin.stop()["digest"] == stop["digest"] != "", told
    losses, untouched = gang.history.losses(), twin.losses()
    assert all(losses[step] == untouched[step] for step in losses if step in untouched), told
    assert losses.keys() >= untouched.keys(), told
