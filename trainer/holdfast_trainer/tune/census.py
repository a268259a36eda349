"""Which lines of a program issue its tensor operations, and how many.

A step of few large operations keeps a device busy; thousands of small ones, or tensors made from Python
numbers one by one, leave it waiting for Python. So every operation that reaches the dispatcher during a
forward pass is counted under the innermost line that is not torch's own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = str(Path(torch.__file__).parent)
MAKING = ("_to_copy", "arange", "empty", "full", "lift_fresh", "ones", "rand", "scalar_tensor", "zeros")
"""Operators that make a tensor from nothing; what torch.tensor ends in is lift_fresh."""


@dataclass(frozen=True)
class Line:
    """`operations` of one line of code, of which `made` make a new tensor from Python's values."""

    place: str
    """FILE:LINE."""
    operations: int
    made: int


class Census(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: Counter[str] = Counter()
        self._made: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = _caller(sys._getframe(1))
        self._operations[place] += 1
        if func.overloadpacket.__name__ in MAKING:
            self._made[place] += 1
        return func(*args, **(kwargs or {}))

    def lines(self) -> list[Line]:
        """Busiest first."""
        return [Line(place, count, self._made[place]) for place, count in self._operations.most_common()]


def census(forward: Callable[[], object]) -> list[Line]:
    """Of one call."""
    counted = Census()
    with counted:
        forward()
    return counted.lines()


def _caller(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, "<")) and name != __file__:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
