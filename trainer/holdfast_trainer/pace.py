"""How long a step takes from here on, with what comes between steps.

A validation or a save comes once in many steps and may take as long as hundreds of them. Among the newest
steps there is one or there is none, and neither is what is to come. So the newest steps tell what a step
itself takes, and the whole attempt how much of the other there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

SELDOM = ("validation", "checkpoint")
"""Phases that are no part of every step."""


@dataclass
class _Seldom:
    times: int = 0
    seconds: float = 0.0
    newest: int = 0
    """The step of the newest one, counted as all here from the attempt's second on."""

    def seconds_a_step(self, steps: int) -> float:
        """After so many steps. One that is not overdue yet is no reason to think that they have become rarer:
        of what comes every 100 steps this is the same after 150 as after 100."""
        return self.seconds / max(self.newest, steps - self.newest / self.times)


class Newest(Generic[T]):
    """What the newest steps of an attempt told, `window` of them at most. Its first step compiles and
    allocates, and so says little of the others: it counts until there is another."""

    def __init__(self, window: int) -> None:
        self._kept: deque[T] = deque(maxlen=window)
        self._first = True

    def add(self, told: T) -> None:
        if len(self._kept) == 1 and self._first:
            self._kept.clear()
            self._first = False
        self._kept.append(told)

    def __iter__(self) -> Iterator[T]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class Pace:
    """Of one attempt."""

    def __init__(self, window: int) -> None:
        self._own = Newest[float](window)
        self._steps = -1
        self._seldom: dict[str, _Seldom] = {}

    def add(self, wall_seconds: float, spans: Mapping[str, float]) -> None:
        """A step took `wall_seconds` from the end of the one before, and these are its parts."""
        self._steps += 1
        found = {phase: spans[phase] for phase in SELDOM if spans.get(phase)}
        self._own.add(max(0.0, wall_seconds - sum(found.values())))
        if self._steps:
            for phase, seconds in found.items():
                one = self._seldom.setdefault(phase, _Seldom())
                one.times, one.seconds, one.newest = one.times + 1, one.seconds + seconds, self._steps

    def seconds_a_step(self) -> float:
        """Of those to come; at least one was added."""
        own = sum(self._own) / len(self._own)
        return own + sum(one.seconds_a_step(self._steps) for one in self._seldom.values())
