"""A stand-in for a GPU's queue: what it computes is there once somebody waits for it."""

from __future__ import annotations

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
