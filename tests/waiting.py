"""Wait for a condition, never for luck.

A test that needs something to happen in another process polls for it here: it goes on in the moment
the condition holds, and when the deadline passes first it fails with a sentence that says what was
awaited and what was last seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

FIRST_PAUSE = 0.005
LONGEST_PAUSE = 0.1
GENEROUS = 180.0  # a wait ends in the moment the condition holds: the limit is for what never comes


class DeadlinePassed(AssertionError):
    """The awaited condition did not hold in time."""


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
        pause = FIRST_PAUSE
        while True:
            value = condition()
            if value:
                return value
            if self.passed:
                raise self.fail(what, value)
            time.sleep(min(pause, self.left))
            pause = min(pause * 1.5, LONGEST_PAUSE)

    async def wait_until_async(self, condition: Callable[[], T | Awaitable[T]], what: str) -> T:
        """As `wait_until`, leaving the event loop free; `condition` may be a coroutine function."""
        pause = FIRST_PAUSE
        while True:
            result = condition()
            value = await result if isinstance(result, Awaitable) else result
            if value:
                return value
            if self.passed:
                raise self.fail(what, value)
            await asyncio.sleep(min(pause, self.left))
            pause = min(pause * 1.5, LONGEST_PAUSE)


def wait_until(condition: Callable[[], T], what: str, seconds: float = GENEROUS) -> T:
    """The first true value of `condition` within `seconds`; `what` completes "waited 180 s for ..."."""
    return Deadline(seconds).wait_until(condition, what)


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]], what: str, seconds: float = GENEROUS
) -> T:
    """As `wait_until`, for asynchronous tests."""
    return await Deadline(seconds).wait_until_async(condition, what)
