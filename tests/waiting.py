"""Wait for a condition, never for luck.

A test that needs something to happen in another process polls for it here: it goes on in the moment
the condition holds, and when the deadline passes first it fails with a sentence that says what was
awaited and what was last seen. Asking takes no more than an eleventh of a core, which what is waited for may
need: a condition that starts a program, such as kubectl, is asked less often than one that reads a file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

FIRST_PAUSE = 0.005
LONGEST_PAUSE = 0.1
PAUSE_FOR_COST = 10
"""Of what the condition took to answer; up to MOST_FOR_COST seconds."""
MOST_FOR_COST = 1.0
GENEROUS = 180.0  # a wait ends in the moment the condition holds: the limit is for what never comes


class DeadlinePassed(AssertionError):
    """The awaited condition did not hold in time."""


class _Pauses:
    """How long to wait before a condition is asked again: ever longer, and longer where asking costs more."""

    def __init__(self) -> None:
        self._least = FIRST_PAUSE
        self._asked = time.monotonic()

    def ask(self) -> None:
        self._asked = time.monotonic()

    def next(self) -> float:
        """Seconds."""
        cost = time.monotonic() - self._asked
        pause = max(self._least, min(PAUSE_FOR_COST * cost, MOST_FOR_COST))
        self._least = min(self._least * 1.5, LONGEST_PAUSE)
        return pause


class Deadline:
    """A moment that several waits share: `Deadline(30).wait_until(...)` twice still ends at 30 s."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds to go, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left == 0.0

    def fail(self, what: str, last: object) -> DeadlinePassed:
        return DeadlinePassed(f"waited {self.seconds:g} s for {what}; last seen: {last!r}")

    def wait_until(self, condition: Callable[[], T], what: str) -> T:
        """The first true value of `condition`; what it raises passes through. Raises DeadlinePassed."""
        pauses = _Pauses()
        while True:
            pauses.ask()
            value = condition()
            if value:
                return value
            if self.passed:
                raise self.fail(what, value)
            time.sleep(min(pauses.next(), self.left))

    async def wait_until_async(self, condition: Callable[[], T | Awaitable[T]], what: str) -> T:
        """As `wait_until`, leaving the event loop free; `condition` may be a coroutine function."""
        pauses = _Pauses()
        while True:
            pauses.ask()
            result = condition()
            value = await result if isinstance(result, Awaitable) else result
            if value:
                return value
            if self.passed:
                raise self.fail(what, value)
            await asyncio.sleep(min(pauses.next(), self.left))


def wait_until(condition: Callable[[], T], what: str, seconds: float = GENEROUS) -> T:
    """The first true value of `condition` within `seconds`; `what` completes "waited 180 s for ..."."""
    return Deadline(seconds).wait_until(condition, what)


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]], what: str, seconds: float = GENEROUS
) -> T:
    """As `wait_until`, for asynchronous tests."""
    return await Deadline(seconds).wait_until_async(condition, what)
