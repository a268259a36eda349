"""What becomes of the times in a job's status when the controller's clock is set. Pure.

They are moved with the clock, as if it had been right all along: how far they lie apart, and from now, stays
what it was. So a job is neither deleted before its time nor billed for an hour that never was, and its
back-off does not last until a clock that was set back has caught up. Times of before the machine booted are
left: nobody knows whether the clock was wrong then, too. So are those that lay ahead: they were not its.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from pydantic import BaseModel

from holdfast_controller.jobs import Status, TrainingJob

from .backoff import LONGEST_SECONDS

_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True)
class ClockStep:
    """One time that the clock was set."""

    booted: datetime
    """When the machine booted, as the clock said before."""
    was: datetime
    """What it showed just before."""
    by: timedelta
    began: datetime
    """When this controller began to watch it, as it said before."""

    def moved(self, moment: datetime, ahead: timedelta = timedelta(0)) -> datetime:
        """What the clock would have shown then, had it been right; `ahead`: of how far in the future it may
        have told."""
        return moment + self.by if self.booted <= moment <= self.was + ahead else moment


def moved(job: TrainingJob, steps: Sequence[ClockStep]) -> Status:
    """The job's status after these; as it is where nothing more is to come of its times.

    A job that had finished before this controller began may have done so by a clock that was right: it is not
    made to have finished sooner, and be deleted."""
    status = job.status
    if status.phase.final and job.spec.ttl_seconds_after_finished is None:
        return status
    for step in steps:
        finished = status.finished_at
        if finished is not None and finished < step.began and step.by < timedelta(0):
            continue
        start_at = status.next_start_at
        status = _moved(status, step)
        if start_at is not None:
            status.next_start_at = step.moved(start_at, timedelta(seconds=LONGEST_SECONDS))
    return status


def said(steps: Sequence[ClockStep]) -> str:
    """In a sentence, for whoever wonders about the times."""
    seconds = sum(step.by.total_seconds() for step in steps)
    way = "forward" if seconds > 0 else "back"
    return (
        f"the controller's clock was set {way} by {timedelta(seconds=round(abs(seconds)))}; the times in the "
        "job's status were moved with it, those of earlier events were not"
    )


def _moved(model: _M, step: ClockStep) -> _M:
    changes: dict[str, object] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, datetime):
            changes[name] = step.moved(value)
        elif isinstance(value, BaseModel):
            changes[name] = _moved(value, step)
        elif isinstance(value, list):
            changes[name] = [_moved(one, step) if isinstance(one, BaseModel) else one for one in value]
    return model.model_copy(update=changes)
