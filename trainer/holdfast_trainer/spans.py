"""Where the time of a step goes, and what the device could do in it.

Spans on a CPU are wall time. On a GPU the CPU only queues work, so spans are pairs of CUDA events, read
when the next step ends: by then they are past, and reading them waits for nothing. What the CPU timed of a
step waits with them, so that all spans of a step are told together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from .loading import Threads, Waits


class _Timed(NamedTuple):
    """By the GPU's clock."""

    phase: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    sign: int = 1
    """-1: it does not count there."""


class Spans:
    """Seconds by phase within a step."""

    def __init__(self, device: torch.device) -> None:
        self.late = device.type == "cuda"
        """Whether a step's spans are best read when the next one ends."""
        self.named = False
        """Whether a profiler listens, and wants to be told the phases."""
        self.off = False
        self.waits = Waits()
        """For data, by the CPU's clocks on a GPU too."""
        self._seconds: dict[str, float] = {}
        self._apart = 0.0
        self._parts: list[tuple[str, Any]] = []
        """The phases of the open span, and since when: by events, or seconds. Empty where none is open."""
        self._events: list[_Timed] = []
        self._ended: dict[str, float] = {}
        self._ended_events: list[_Timed] = []

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Time a part of the step; parts of one phase add up. One within another is no part of that, and all
        that is within validation is part of it: a step waits for none of its data."""
        if self.off:
            yield
            return
        named = record_function(phase) if self.named else nullcontext()
        validates = bool(self._parts) and self._parts[0][0] == "validation"
        waits = self.waits.measured() if phase == "data" and not validates else nullcontext()
        with waits, named, torch.cuda.nvtx.range("{}", phase) if self.late else nullcontext():
            if validates:
                yield
                return
            around, self._parts = self._parts, [(phase, began := self._now())]
            try:
                yield
            finally:
                ended = self._close()
                self._parts = around
                if around:
                    self._leave_out(began, ended)

    def turn(self, phase: str) -> None:
        """What is left of the span that is open, if one is, is of another phase; told from within what it
        times, on a GPU on the stream that the work is queued on."""
        if self._parts:
            self._parts.append((phase, self._now()))

    def _close(self) -> Any:
        """Count each part of the open span, until the next one begins; returns when the last one ended."""
        ended = self._now()
        for (phase, start), (_, end) in pairwise([*self._parts, ("", ended)]):
            if self.late:
                self._events.append(_Timed(phase, start, end))
            else:
                self.add(phase, end - start)
        return ended

    def _leave_out(self, start: Any, end: Any) -> None:
        """What was between the two does not count in the open span."""
        if self.late:
            self._events.append(_Timed(self._parts[-1][0], start, end, -1))
        else:
            self._apart += end - start

    def _now(self) -> Any:
        """The GPU's time, or the CPU's, which stands still in what is told apart."""
        return _moment() if self.late else time.perf_counter() - self._apart

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere, on the CPU."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def add_apart(self, phase: str, seconds: float) -> None:
        """As `add`; where that was within a span, it does not count there."""
        self.add(phase, seconds)
        self._apart += seconds

    def add_apart_on_gpu(self, phase: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """As `add_apart`, of what the GPU did between two events."""
        if self.off:
            return
        self._events.append(_Timed(phase, start, end))
        if self._parts:
            self._events.append(_Timed(self._parts[-1][0], start, end, -1))

    def end_step(self) -> None:
        """What comes now is of the next step."""
        self._ended, self._seconds = self._seconds, {}
        self._ended_events, self._events = self._events, []

    def collect(self) -> dict[str, float]:
        """The spans of the step that ended last; on a GPU waits until they are past."""
        seconds, self._ended = self._ended, {}
        for timed in self._ended_events:
            timed.end.synchronize()
            passed = timed.sign * timed.start.elapsed_time(timed.end) / 1e3
            seconds[timed.phase] = seconds.get(timed.phase, 0.0) + passed
        self._ended_events = []
        return seconds


def gemm_peak(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of a square matrix product on this device with this process's threads: the best of a few.

    MFU is taken against this measured peak, not against a data sheet: a share of what this rank can do. What
    else has the device meanwhile, a CPU's cores or turns on the GPU, does not make it less. The numbers are
    random: of constant ones a GPU switches fewer bits, draws less power and clocks higher than it can with
    any real data.
    """
    if device.type == "cuda":
        size = 8192
    drawn = torch.Generator(device).manual_seed(1)  # training's own draws stay as they are
    left = torch.randn((size, size), device=device, dtype=dtype, generator=drawn)
    out = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, left, out=out)

    if device.type == "cuda":
        return 2 * size**3 / _gpu_seconds(product, 2 * repeats)
    return 2 * size**3 / min(_cpu_seconds(product) for _ in range(repeats))


@cache
def gemm_peak_once(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """`gemm_peak` of a process with so many threads, and of those that are forked from it: measured once."""
    return gemm_peak(device, dtype)


def _cpu_seconds(work: Callable[[], None]) -> float:
    """Of `work`, less what its threads waited for a core."""
    threads = Threads()
    threads.look()
    began, computed = time.perf_counter(), time.process_time()
    work()
    seconds, computed = time.perf_counter() - began, time.process_time() - computed
    if (crowding := threads.look()) is None:
        return seconds
    at_once = min(torch.get_num_threads(), crowding.cores)
    return min(seconds, max(seconds * (1.0 - crowding.queued), computed / at_once))


def _gpu_seconds(work: Callable[[], None], repeats: int) -> float:
    """The least of several in a row, by the GPU's clock: the CPU's would count the turns that other processes
    have on the GPU before each."""
    moments = [_moment()]
    for _ in range(repeats):
        work()
        moments.append(_moment())
    moments[-1].synchronize()
    return min(float(start.elapsed_time(end)) for start, end in pairwise(moments)) / 1e3


def _moment() -> torch.cuda.Event:
    """When the GPU is past what is queued now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
