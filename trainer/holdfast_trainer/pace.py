"""How long a step takes from here on, with what comes between steps; and what was worked on in a second.

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
    window: int
    times: int = 0
    """One that goes on in the next step, as a save does, counts once."""
    seconds: float = 0.0
    first: int = 0
    """The step that the first one began in, counted as all here from the attempt's second on."""
    newest: int = 0

    def add(self, step: int, seconds: float) -> None:
        self.seconds += seconds
        if not self.times or step > self.newest + 1:
            self.times, self.first, self.newest = self.times + 1, self.first or step, step

    def seconds_a_step(self, steps: int) -> float:
        """After so many steps. How far apart they come is known from the second one on: an attempt may have
        begun just before the first, which until then is taken for one of more than a few steps. One that is
        not overdue yet is no reason to think that they have become rarer: of what comes every 100 steps this
        is the same after 150 as after 100."""
        if self.times == 1:
            return self.seconds / max(self.newest, steps - self.newest, self.window)
        apart = (self.newest - self.first) / (self.times - 1)
        return self.seconds / self.times / max(apart, steps - self.newest)


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
        self._own, self._window = Newest[float](window), window
        self._steps = -1
        self._seldom: dict[str, _Seldom] = {}

    def add(self, wall_seconds: float, spans: Mapping[str, float]) -> None:
        """A step took `wall_seconds` from the end of the one before, and these are its parts."""
        self._steps += 1
        found = {phase: spans[phase] for phase in SELDOM if spans.get(phase)}
        self._own.add(max(0.0, wall_seconds - sum(found.values())))
        if self._steps:
            for phase, seconds in found.items():
                self._seldom.setdefault(phase, _Seldom(self._window)).add(self._steps, seconds)

    def seconds_a_step(self) -> float:
        """Of those to come; at least one was added."""
        own = sum(self._own) / len(self._own)
        return own + sum(one.seconds_a_step(self._steps) for one in self._seldom.values())


@dataclass(frozen=True)
class _Told:
    """What a loop told at once, and the steps since it did so before."""

    steps: int
    seconds: float
    tokens: int
    samples: int


class Work:
    """Of an attempt's newest steps, `window` of them at most. A loop may tell what it worked on in every
    eighth step alone, as where gradients add up: it is of whole eighths then, or the rate would be of two or
    of three times as much in as many seconds. Like `Newest`, it leaves out what was told first."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._told: deque[_Told] = deque()
        self._first = True
        self._steps, self._seconds = 0, 0.0
        """Since it was told last."""

    def add(self, seconds: float, tokens: int, samples: int) -> None:
        """A step took `seconds` from the end of the one before."""
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        if not (tokens or samples):
            if self._told and self._steps > max(self._window, 2 * self._told[-1].steps):
                self._told.clear()  # it tells it no more
            return
        if len(self._told) == 1 and self._first:
            self._told.clear()
            self._first = False
        self._told.append(_Told(self._steps, self._seconds, tokens, samples))
        self._steps, self._seconds = 0, 0.0
        while len(self._told) > 1 and sum(one.steps for one in self._told) > self._window:
            self._told.popleft()

    def a_second(self) -> tuple[float, float]:
        """Tokens, samples; 0 where none were told."""
        seconds = sum(one.seconds for one in self._told)
        if not seconds:
            return 0.0, 0.0
        return (
            sum(one.tokens for one in self._told) / seconds,
            sum(one.samples for one in self._told) / seconds,
        )
