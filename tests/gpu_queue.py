"""A stand-in for a GPU's queue: what it computes is there once somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast_trainer.late import Late


class StandInQueue:
    """Numbers that are on their way, in the order in which they were told."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def late(self, value: torch.Tensor | float) -> Late:
        """As `Late.of` has it for a tensor of a GPU."""
        there = torch.full((), float("-inf"))  # page-locked memory before the copy
        copy = _Copy(self, there, float(value))
        self._copies.append(copy)
        return Late(there, copy)

    @property
    def waiting(self) -> int:
        """How many nobody has waited for."""
        return len(self._copies)

    def run_to(self, copy: _Copy) -> None:
        while copy in self._copies:
            first = self._copies.pop(0)
            first.there.fill_(first.value)


class _Copy:
    def __init__(self, queue: StandInQueue, there: torch.Tensor, value: float) -> None:
        self._queue, self.there, self.value = queue, there, value

    def synchronize(self) -> None:
        self._queue.run_to(self)


class StandInCopies:
    """Copies from a GPU, in the place of its streams and events: queued one after another, and made once
    somebody waits for an event that was queued behind them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For one test. One queue is enough where a stream begins when the one before it has come there."""
        self._queue: list[Callable[[], object]] = []
        self._made, self._lock = 0, threading.Lock()
        self._copy = torch._foreach_copy_
        stream = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
        registers = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
        monkeypatch.setattr(torch, "_foreach_copy_", self._later)
        monkeypatch.setattr(torch.cuda, "Event", lambda **how: _Behind(self))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "cudart", lambda: registers)

    def _later(self, places: Any, sources: Any, non_blocking: bool) -> None:
        assert non_blocking
        self._queue.append(lambda: self._copy(places, sources))

    @property
    def queued(self) -> int:
        return len(self._queue)

    def is_at(self, place: int) -> bool:
        return self._made >= place

    def run_to(self, place: int) -> None:
        with self._lock:
            while self._made < place:
                self._queue[self._made]()
                self._made += 1


class OnGpu(torch.Tensor):
    """Says that it is in a GPU's memory."""

    is_cuda, device = True, torch.device("cuda", 0)  # type: ignore[assignment, misc]


class _Behind:
    """An event behind what is queued when it is recorded."""

    def __init__(self, gpu: StandInCopies) -> None:
        self._gpu = gpu

    def record(self, stream: object) -> None:
        self._place = self._gpu.queued

    def query(self) -> bool:
        return self._gpu.is_at(self._place)

    def synchronize(self) -> None:
        self._gpu.run_to(self._place)

    def elapsed_time(self, end: _Behind) -> float:
        return float(end._place - self._place)
