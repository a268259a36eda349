"""Steps of one combination of settings, on all ranks together.

A rank that runs out of memory in the middle of a step would leave the others waiting for its gradients. So
with several ranks a step is first done by each alone, without exchange; they tell each other whether it
fitted, and only where it did on all is it measured together. The slowest rank's time counts. Steps follow on
each other as in a run: a GPU is waited for where the measurement begins and ends, and not in between.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..determinism import with_kernels
from ..faults import is_out_of_memory
from ..footprint import Footprint
from ..parallel import Gang
from ..precision import with_tf32
from ..rehearsal import Clock, StepTimes
from .settings import Settings

NO_ROOM = "out of memory"


class Trial(Protocol):
    """A model made ready with some settings."""

    work: float
    """What a step does on this rank in the mean, in the subject's unit."""

    def step(self, number: int) -> Clock: ...

    @property
    def losses(self) -> float:
        """Of the steps so far, added up: no finite number where one is none."""

    def close(self) -> None:
        """Ends what it started."""


Build = Callable[[Settings, bool], Trial]
"""From settings, and whether other ranks are left out, to a trial."""


@dataclass(frozen=True)
class Effort:
    """How much is measured of one combination in one round."""

    steps: int = 3
    seconds: float = 2.0
    """At least so many steps, and for at least so long."""

    def steps_with(self, settings: Settings) -> int:
        """At least so many, that each worker has had as many turns as any other: the batches of all may come
        at once, and none then until the next ones do."""
        if not settings.workers:
            return self.steps
        turns = -(-self.steps * settings.accumulate // settings.workers)
        return -(-turns * settings.workers // settings.accumulate)


@dataclass(frozen=True)
class Outcome:
    """`speed` is of all ranks, in units a second; a fault says why there is none."""

    speed: float = 0.0
    memory: int = 0
    """Bytes of the rank that took most."""
    room: int = 0
    """Bytes that the rank with least could have taken."""
    times: StepTimes | None = None
    """A mean step of this rank."""
    ready_seconds: float = 0.0
    """What this rank took until its first step was done, from nothing; compiled, where no step had been."""
    fault: str = ""


def measure(build: Build, settings: Settings, gang: Gang, effort: Effort) -> Outcome:
    """Collective. A combination that fails is told as a fault, and never ends the others."""
    kernels = with_kernels(settings.deterministic, gang.device)
    with _threads(settings.threads), with_tf32(gang.device, settings.tf32), kernels:
        alone = Outcome()
        if gang.world_size > 1:
            alone = _agree(gang, _try(lambda: _steps(build, settings, True, Effort(1, 0.0), gang)))
            if alone.fault:
                return alone
        together = _agree(gang, _try(lambda: _steps(build, settings, False, effort, gang)))
        return replace(together, ready_seconds=max(alone.ready_seconds, together.ready_seconds))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many for CPU operators, until the block ends; None changes nothing."""
    before = torch.get_num_threads()
    try:
        if count:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _steps(build: Build, settings: Settings, alone: bool, effort: Effort, gang: Gang) -> Outcome:
    memory = Footprint(gang.device)
    began = time.perf_counter()
    trial = build(settings, alone)
    try:
        trial.step(0).read()  # compiles and allocates
        ready = time.perf_counter() - began
        memory.look()
        trial.step(1).read()
        memory.look()
        clocks: list[Clock] = []
        least = effort.steps if alone else effort.steps_with(settings)
        began = time.perf_counter()
        until = began + effort.seconds
        while len(clocks) < least or _goes_on(gang, time.perf_counter() < until, alone):
            clocks.append(trial.step(2 + len(clocks)))
        times = [clock.read() for clock in clocks]  # the work that was queued is done then
        seconds, count = time.perf_counter() - began, len(times)
        if not math.isfinite(losses := trial.losses):
            return Outcome(fault=f"the loss comes to {losses:g}, at which a run ends")
        mean = StepTimes(**{part: sum(getattr(t, part) for t in times) / count for part in vars(times[0])})
        speed = trial.work * count / seconds
        return Outcome(speed, memory.peak(), memory.room(), mean, ready)
    finally:
        trial.close()


def _goes_on(gang: Gang, mine: bool, alone: bool) -> bool:
    """Rank 0's clock decides: all do the same number of steps."""
    return mine if alone or gang.world_size == 1 else bool(gang.broadcast(mine))


def _try(work: Callable[[], Outcome]) -> Outcome:
    try:
        outcome = work()
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        outcome = Outcome(
            fault=NO_ROOM if is_out_of_memory(error) else f"{type(error).__name__}: {first[:200]}"
        )
    gc.collect()  # a traceback held the tensors until here
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return outcome


def _agree(gang: Gang, mine: Outcome) -> Outcome:
    """The same on every rank, but for the times."""
    told = gang.gather((mine.speed, mine.memory, mine.room, mine.fault))
    fault = next(
        (
            f"rank {rank}: {said[3]}" if len(told) > 1 else said[3]
            for rank, said in enumerate(told)
            if said[3]
        ),
        "",
    )
    if fault:
        return Outcome(fault=fault)
    speeds, memories, rooms, _ = zip(*told, strict=True)
    return Outcome(len(told) * min(speeds), max(memories), min(rooms), mine.times, mine.ready_seconds)
