"""A number that a device computes, on its way to the CPU.

To read a tensor of a GPU waits until all that was queued before has run: what this step queued too, where the
loss of the step before is wanted. Until the CPU has queued more, the GPU then has nothing to do. So a number
is copied in its turn, when it is told, into page-locked memory; who reads it a step later waits for that copy
alone, if at all, while the GPU has the work of a step before it.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A place in a device's queue."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


class Late:
    """One number; `late` where it had better not be read in the step that told it."""

    def __init__(self, value: torch.Tensor | float, copied: Event | None = None) -> None:
        """`value`: of the CPU; there once `copied` is over, by now where that is None."""
        self._value, self._copied = value, copied

    @classmethod
    def of(cls, value: torch.Tensor | float) -> Late:
        """Of a tensor of one element, wherever it is: as it is when its device has computed it."""
        if not isinstance(value, torch.Tensor):
            return cls(value)
        value = value.detach()
        if not value.is_cuda:
            return cls(float(value))
        there = value.to("cpu", non_blocking=True)  # page-locked, as torch has it for such a copy
        return cls(there, torch.cuda.current_stream(value.device).record_event())

    @property
    def late(self) -> bool:
        return self._copied is not None

    def read(self) -> float:
        """The number, waited for where it is still on its way."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._value)
