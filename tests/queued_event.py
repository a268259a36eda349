"""A GPU's clock, scripted: what is timed by events is tested where there is no GPU."""

from __future__ import annotations

import pytest
import torch


class QueuedEvent:
    """In the place of torch.cuda.Event: a GPU that is past each one 10 ms after the one before, and only once
    somebody has waited for it."""

    queued, waited = 0, 0

    @classmethod
    def instead_of_cuda(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """For one test."""
        cls.queued = cls.waited = 0
        monkeypatch.setattr(torch.cuda, "Event", cls)

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        QueuedEvent.queued = self.place = QueuedEvent.queued + 1

    def synchronize(self) -> None:
        QueuedEvent.waited = self.place

    def elapsed_time(self, end: QueuedEvent) -> float:
        assert QueuedEvent.waited >= end.place, "it is not past yet"
        return 10.0 * (end.place - self.place)
