"""When this machine's clock is set while the controller runs: by NTP, by hand, as a machine that booted with
a wrong one finds the time.

What is written down of a job are times of that clock, and every duration is the difference of two of them.
The kernel's count of the seconds since it booted is never set, and goes on while the machine sleeps: where
the two move apart the clock was set, and not a moment longer went by. policy/clock_steps.py says what becomes
of the times that are written down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

import structlog

from .jobs import utcnow
from .policy.clock_steps import ClockStep

LEAST_SECONDS = 2.0
"""Less is no matter for figures of whole seconds; a leap second is less."""

log = structlog.get_logger(__name__)


def since_boot() -> float:
    """Seconds, with those in which the machine slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockWatch:
    """How often the clock was set since `begin`, or since this was made. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], datetime] = utcnow, steady: Callable[[], float] = since_boot):
        """`steady` counts seconds, and is never set."""
        self._clock = clock
        self._steady = steady
        self.begin()

    def begin(self) -> None:
        """From now on: what was before was another's business."""
        self.steps: list[ClockStep] = []
        self.began = self._clock()
        """When that was, as the clock says now."""
        self._booted = self._boot()

    def _boot(self) -> datetime:
        """When the machine booted, as the clock says now."""
        return self._clock() - timedelta(seconds=self._steady())

    def look(self) -> bool:
        """Whether the clock was set since the last look."""
        booted = self._boot()
        by = booted - self._booted
        if abs(by.total_seconds()) < LEAST_SECONDS:
            return False
        step = ClockStep(self._booted, self._clock() - by, by, self.began)
        self._booted = booted
        self.began += by
        self.steps.append(step)
        log.warning("this machine's clock was set", by_seconds=round(by.total_seconds(), 1))
        return True
