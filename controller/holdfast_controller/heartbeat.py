"""How long an attempt has not been heard of, counted by who asks.

Rank 0 tells with each answer for how long it has done no step, and from when on nothing in its own process
can have been left to end it: its watchdog knows how long steps take, and that compiling, validating and
saving take longer. Where all ranks are stopped at once no watchdog of theirs runs. Then the asking counts:
a process that is stopped still has its connections taken by the kernel, and answers none of them. A network
that fails takes no connection, so silence of that kind alone never proves a hang. Time in which nobody asked,
for the machine or the controller slept, counts for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast_trainer.contract import STILL_SECONDS, Progress

PROOFS = 3
"""Connections that were taken and not answered; more are refused once the kernel's queue of them is full."""
LONGEST_GAP_SECONDS = 30.0
"""Between two asks: more than that was sleep."""


@dataclass(frozen=True)
class Silence:
    """`seconds` without a step, as far as anybody knows."""

    seconds: float
    limit: float
    """Seconds from which on the gang cannot help itself, as it said; infinite while nobody in it watches."""
    answers: bool = True
    """Whether the last ask was answered."""
    unanswered: int = 0
    """Connections since the last answer that were taken and not answered."""
    unheard: float = 0.0
    """Those of `seconds` that have passed since the last answer."""

    @property
    def outdates(self) -> bool:
        """Whether the last answer is too old to tell how fast it is now."""
        return self.unheard > STILL_SECONDS

    @property
    def over(self) -> bool:
        """Whether it has lasted too long, for what is known of its kind."""
        return self.seconds > self.limit and (self.answers or self.unanswered >= PROOFS)


class Heartbeat:
    """Of one attempt, kept by whoever asks it; times are of one clock that never goes back, in seconds."""

    def __init__(self, now: float):
        self._looked = now
        self._quiet = self._unheard = 0.0
        self._limit: float | None = None
        self._answers = False
        self._unanswered = 0

    def answered(self, progress: Progress, now: float) -> None:
        """It told how it is."""
        self._looked, self._answers, self._unanswered, self._unheard = now, True, 0, 0.0
        self._quiet = progress.quiet_seconds or 0.0
        self._limit = math.inf if progress.quiet_limit is None else progress.quiet_limit

    def missed(self, now: float, *, taken: bool) -> Silence:
        """No answer came; `taken`: its machine had taken the connection."""
        passed = min(now - self._looked, LONGEST_GAP_SECONDS)
        self._quiet, self._unheard = self._quiet + passed, self._unheard + passed
        self._looked, self._answers = now, False
        self._unanswered += taken
        if self._limit is None:
            self._limit = math.inf
        return self._silence(self._limit)

    @property
    def silence(self) -> Silence | None:
        """None before it was asked."""
        return None if self._limit is None else self._silence(self._limit)

    def _silence(self, limit: float) -> Silence:
        return Silence(self._quiet, limit, self._answers, self._unanswered, self._unheard)
