"""Batch sizes to try, and what else changes with the batch. Decides from measurements, takes none.

Doubling finds the region, bisection the largest size that fits where memory ends the doubling. Memory grows
linearly with the batch, so a size that would leave no room is seen coming and not tried: on a CPU there is
no error to catch, only the kernel's killer. Doubling also ends where it gains nothing any more.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

GAIN = 1.03
"""A size twice as large has to be so much faster to go on, and a chosen one so much to be preferred."""
ROOM_SHARE = 0.92
"""Of the memory that may be taken: fragments and the allocator's rounding need the rest."""


@dataclass(frozen=True)
class Size:
    """A batch size that fitted."""

    batch: int
    speed: float
    """Samples a second."""
    memory: int
    """Bytes."""


def sizes_to_try(allowed: Sequence[int], room: int) -> Generator[int, Size | None, list[Size]]:
    """Yields a batch size, is sent what it did (None: it did not fit); returns all that fitted.

    `allowed` ascends; `room` is what may be taken, in bytes.
    """
    tried: list[Size] = []
    low, high = 0, len(allowed)  # allowed[:low] fit, allowed[high:] do not
    while low < high:
        index = _next_index(allowed, tried, low, high)
        if not _has_room(tried, allowed[index], room):
            high = index
            continue
        found = yield allowed[index]
        if found is None or found.memory > room:
            high = index
            continue
        slower = bool(tried) and found.speed < GAIN * max(size.speed for size in tried)
        tried.append(found)
        low = index + 1
        if slower:
            break
    return tried


def _next_index(allowed: Sequence[int], tried: Sequence[Size], low: int, high: int) -> int:
    if high < len(allowed):
        return (low + high) // 2
    wanted = 2 * tried[-1].batch if tried else allowed[0]
    return next((i for i in range(low, high) if allowed[i] >= wanted), high - 1)


def _has_room(tried: Sequence[Size], batch: int, room: int) -> bool:
    if len(tried) < 2:
        return True
    one, two = tried[-2:]
    slope = max(0.0, (two.memory - one.memory) / (two.batch - one.batch))
    return two.memory + slope * (batch - two.batch) <= room


def best_size(tried: Sequence[Size]) -> Size | None:
    """The smallest that is about as fast as the fastest."""
    if not tried:
        return None
    fastest = max(size.speed for size in tried)
    return min((s for s in tried if s.speed * GAIN >= fastest), key=lambda s: s.batch)


def doubling(first: int, last: int) -> list[int]:
    """first, twice that, ... up to `last`; with the sizes between, in quarters, for the bisection."""
    sizes = {first}
    size = first
    while size < last:
        sizes |= {size + size * quarter // 4 for quarter in range(1, 5)}
        size *= 2
    return sorted(s for s in sizes if s <= last)


def scaled_rate(rate: float, growth: float, rule: Literal["sqrt", "linear"]) -> float:
    """The learning rate for a batch `growth` times as large.

    sqrt: for Adam and its like, whose steps do not grow with the gradient (Malladi et al. 2022).
    linear: for SGD (Goyal et al. 2017).
    """
    return float(f"{rate * (math.sqrt(growth) if rule == 'sqrt' else growth):.4g}")
