"""When a status is written: at once where it says something that must not be lost, else not too often.

What an attempt came to, a count, a start: at once, for the next decision rests on it. The trainer's figures
move all the time, and between its opening and its start an attempt passes through several reasons to wait
within a second: both can be told from the world again, so they are written once in so many seconds. Where
a write is dear, a thousand jobs that start together must not each write what is no longer true a moment
later.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from holdfast_controller.jobs import AttemptRecord, Phase, Status

PROGRESS_SECONDS = 1.0
WAITING = (Phase.QUEUED, Phase.STARTING)
"""Between these an attempt that has not begun goes to and fro."""
FIGURES = {"progress", "message", "useful_seconds", "goodput", "cost", "cost_currency"}
"""What moves all the time while a job trains."""
FIGURES_OF_ATTEMPT = ("useful_seconds", "goodput")
"""Likewise, of the newest attempt."""


def seconds_to_write(
    old: Status,
    new: Status,
    now: datetime,
    progress_seconds: float = PROGRESS_SECONDS,
    waiting_seconds: float = 0.0,
    wrote: datetime | None = None,
) -> float | None:
    """0: write it now; more: so many seconds are left; None: there is nothing to write.

    The trainer's figures are written once in `progress_seconds`, reasons to wait once in `waiting_seconds`;
    `wrote` is when this controller wrote the job's status last, None where it has not.
    """
    if new == old:
        return None
    waits = old.phase in WAITING and new.phase in WAITING
    if old.phase is not new.phase and not waits:
        return 0
    told = FIGURES | {"phase", "conditions"} if waits else FIGURES
    others = Status.model_fields.keys() - told - {"attempts"}
    if any(getattr(old, name) != getattr(new, name) for name in others):
        return 0
    if _but_figures(old.attempts) != _but_figures(new.attempts):
        return 0
    if waits:
        return 0 if wrote is None else _left(wrote, now, waiting_seconds)
    if old.progress is None or old.progress.updated_at is None or new.progress == old.progress:
        return 0
    return _left(old.progress.updated_at, now, progress_seconds)


def _but_figures(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """With an older attempt's figures: they are corrected once."""
    moving = dict.fromkeys(FIGURES_OF_ATTEMPT)
    return [*attempts[:-1], *(newest.model_copy(update=moving) for newest in attempts[-1:])]


def _left(since: datetime, now: datetime, every: float) -> float:
    passed = (now - since).total_seconds()
    return max(0.0, every - passed) if passed >= 0 else 0.0  # the clock was set back
