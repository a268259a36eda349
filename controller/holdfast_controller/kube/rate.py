"""How fast we may ask the apiserver: a token bucket, so that a burst of jobs does not starve others.

The server's own priority and fairness would answer 429; not to provoke it is cheaper for both sides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class RateLimit:
    """`per_second` requests on average, `burst` at once; who comes first is served first."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic):
        if per_second <= 0 or burst < 1:
            raise ValueError(
                f"a rate of {per_second:g} requests/s with bursts of {burst} lets nothing through; "
                "give more than 0 and at least 1"
            )
        self._interval = 1.0 / per_second
        self._tolerance = (burst - 1) * self._interval
        self._clock = clock
        self._due = clock()

    def reserve(self) -> float:
        """Take the next place in line; returns the seconds until it is due.

        The generic cell rate algorithm (ITU-T I.371): one number says all of the bucket's state.
        """
        now = self._clock()
        self._due = max(self._due, now)
        wait = max(0.0, self._due - self._tolerance - now)
        self._due += self._interval
        return wait

    async def wait(self) -> None:
        delay = self.reserve()
        if delay > 0:
            await asyncio.sleep(delay)
