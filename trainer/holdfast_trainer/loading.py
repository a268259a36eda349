"""What the cores do for a rank. While its steps wait for data: whether what loads it computes, or waits
itself, for a disk or a network. And all the time: whether its threads have a core to compute on.

Of a thread the kernel tells how long it ran, and how long it would have run and had no core (schedstat in
/proc): both together are what it computes, or would, whoever else has the cores meanwhile, such as the other
ranks of the machine.

This process is looked at in each of its spans `data`: the thread that waits, and in a long wait all threads,
for a loader may have some. Worker processes (a DataLoader's, or others that multiprocessing has started) load
all the time, and are looked at once an interval. The busiest speaks for all, as a validation's sleep beside
it. Where the kernel does not tell, nothing is known of them. No torch here.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .memory import ranks_here
from .utilization import cores_allowed, process_age

YOUNGEST_SECONDS = 1.0
"""A worker that has lived for less has begun, and no more can be said of it."""
LONG_SECONDS = 0.02
"""A shorter wait tells of other threads nothing: PyTorch's spin for a while once they have computed."""
NANOSECONDS = 1e-9


@dataclass(frozen=True)
class Loading:
    """Of one rank, over an interval."""

    own: float
    """Cores that this process kept busy while it waited for data, or would have, in the mean."""
    cores: float
    """That it may compute on, with all that it starts, and so may the machine's other ranks."""
    ranks: int = 1
    """Of this machine."""
    workers: int = 0
    """Processes that it has started."""
    wanted: float | None = None
    """Share of time in which the busiest of them ran or waited for a core; None: there is none, or it is not
    known."""
    queued: float = 0.0
    """Share of time in which that one waited for a core."""
    own_queued: float = 0.0
    """Of `own`, what this process would have computed and had no core for."""


@dataclass(frozen=True)
class Crowding:
    """Of one rank, over an interval: what its threads would compute, and had no core for."""

    queued: float
    """As a share of what they computed and would have, 0 to 1."""
    cores: float
    """As in Loading."""
    ranks: int = 1
    """As in Loading."""


class Waits:
    """Sums over the spans `data` of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.busy = 0.0
        """What was computed in them, or would have been."""
        self.queued = 0.0
        """Of that, what would have been."""
        self._schedstat: int | None = None
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._schedstat is not None:
            os.close(self._schedstat)

    def _waited(self) -> float:
        """Seconds in which this thread waited for a core, of all; 0 where that is not known."""
        if self._schedstat is None:
            return 0.0
        return int(os.pread(self._schedstat, 64, 0).split()[1]) * NANOSECONDS

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a wait."""
        began, waited = time.perf_counter(), self._waited()
        alone, together = time.thread_time(), time.process_time()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            of_all = seconds >= LONG_SECONDS
            self.busy += time.process_time() - together if of_all else time.thread_time() - alone
            queued = self._waited() - waited
            self.busy += queued
            self.queued += queued
            self.seconds += seconds


class Work(NamedTuple):
    """What the threads of a process did since it began, in seconds."""

    ran: float
    queued: float
    age: float


class Loader:
    """Looks at what loads, from one interval to the next."""

    def __init__(
        self,
        waits: Waits,
        *,
        cores: float | None = None,
        work: Callable[[], Mapping[int, Work | None]] | None = None,
    ) -> None:
        """`cores` are looked up where None; `work` tells what each worker did, by its number; None: not
        known."""
        self._waits, self._cores = waits, cores_allowed() if cores is None else cores
        self._work = work or (lambda: {pid: work_of(pid) for pid in _workers()})
        self._seconds = self._busy = self._queued = 0.0
        self._before: Mapping[int, Work | None] = {}

    def look(self) -> Loading | None:
        """Since the last look; None where no wait was measured."""
        seconds, busy = self._waits.seconds - self._seconds, self._waits.busy - self._busy
        own_queued = self._waits.queued - self._queued
        self._seconds, self._busy, self._queued = self._waits.seconds, self._waits.busy, self._waits.queued
        before, self._before = self._before, self._work()
        if not seconds:
            return None
        wanted, queued = busiest(before, self._before) or (None, 0.0)
        return Loading(
            busy / seconds,
            self._cores,
            ranks_here(),
            len(self._before),
            wanted,
            queued,
            own_queued / seconds,
        )


class Threads:
    """Looks at all threads of this process, from one interval to the next."""

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process = process
        self._before: Mapping[str, tuple[float, float]] | None = None

    def look(self) -> Crowding | None:
        """Since the last look, of the threads that are there still; None at the first, and where the kernel
        does not tell."""
        before, self._before = self._before, None
        with suppress(OSError, ValueError, IndexError):
            self._before = _of_threads(self._process)
        if before is None or self._before is None:
            return None
        ran, queued = (
            sum(
                told[number] - before.get(thread, (0.0, 0.0))[number] for thread, told in self._before.items()
            )
            for number in (0, 1)
        )
        return Crowding(queued / (ran + queued), cores_allowed(), ranks_here()) if ran > 0 else None


def busiest(before: Mapping[int, Work | None], now: Mapping[int, Work | None]) -> tuple[float, float] | None:
    """(wanted, queued) of the worker that wanted a core for the largest share of the time in between, as
    shares of it; None where that is known of none."""
    found = []
    for pid, work in now.items():
        if work is None or work.age < YOUNGEST_SECONDS:
            continue
        was = before.get(pid)
        if was is None or was.age > work.age:  # it has begun since then, maybe under another one's number
            was = Work(0.0, 0.0, 0.0)
        lived = work.age - was.age
        if lived > 0:
            ran, queued = max(0.0, work.ran - was.ran), max(0.0, work.queued - was.queued)
            found.append((min(1.0, (ran + queued) / lived), queued / lived))
    return max(found, default=None)


def work_of(pid: int, root: Path = Path("/proc")) -> Work | None:
    """None: the kernel does not tell (it has ended, or nobody counts)."""
    try:
        threads = _of_threads(root / str(pid)).values()
        age = process_age(root / str(pid))
    except (OSError, ValueError, IndexError):
        return None
    ran, queued = (sum(told[number] for told in threads) for number in (0, 1))
    return Work(ran, queued, age) if ran else None


def _of_threads(process: Path) -> dict[str, tuple[float, float]]:
    """For how many seconds each thread ran, and would have run and had no core, by its number. Raises
    OSError, ValueError or IndexError where the kernel does not tell."""
    told = {}
    for thread in (process / "task").iterdir():
        ran, queued = (thread / "schedstat").read_text(encoding="ascii").split()[:2]
        told[thread.name] = (int(ran) * NANOSECONDS, int(queued) * NANOSECONDS)
    return told


def _workers() -> Sequence[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]
