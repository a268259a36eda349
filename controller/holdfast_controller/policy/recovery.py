"""What the time from a loss to the next step went into.

Between the last sign of life of one attempt and the end of the first step of the next lie boundaries that
different clocks have seen: the trainer's (signs, process, first step), the controller's (known, opened), the
platform's (placed, ended; a pod's times are whole seconds). A boundary that would lie before the one before
it is taken to coincide with that, so that no stage is negative and together they are the whole.

An attempt that found no place, ended before its first step, or was made anew as its spec was corrected while
it waited, came back from nothing: the one after it comes back from the loss before it, and its time is part
of the wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from holdfast_controller.breakdown import Breakdown
from holdfast_controller.jobs import ATTEMPTS_KEPT, AttemptRecord, Verdict

from .lost_work import STAGES, Told, Work

CORRECTED = "its spec was changed while it waited; the next one is as it asks now"
"""Of an attempt that was made anew, why: its verdict is Suspended, though nobody asked its job to rest."""


def lost_in(earlier: Sequence[Told]) -> int:
    """Which of the attempts before one this comes back from, -1 where there is none: the newest that did a
    step, unless a suspension lies between; where none did, the newest."""
    for index in reversed(range(len(earlier))):
        one = earlier[index]
        rested = one.verdict == Verdict.SUSPENDED and one.reason != CORRECTED
        if one.first_step_at is not None or rested:
            return index
    return len(earlier) - 1


def remembered(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Those that a status keeps: the newest; and, however many came since of which nothing began, the last
    that did a step: what it lost is known for sure once another goes on, and how long that took to come.
    Likewise the last that trained, for a program may tell of no steps: what it began with is waited for."""
    stepped = [index for index, one in enumerate(attempts) if one.first_step_at is not None]
    trained = [index for index, one in enumerate(attempts) if one.trained]
    needed = {lost_in(attempts), *stepped[-1:], *trained[-1:]}
    surplus = max(0, len(attempts) - ATTEMPTS_KEPT)
    dropped = [index for index in range(len(attempts)) if index not in needed][:surplus]
    return [one for index, one in enumerate(attempts) if index not in dropped]


def recovery_seconds(before: AttemptRecord | None, record: AttemptRecord) -> float | None:
    """From the last sign of life of the attempt that was lost to the end of this one's first step.

    None for the first attempt, after a suspension, and where no step is done yet.
    """
    began = _last_sign(before)
    if began is None or record.first_step_at is None:
        return None
    return round(max(0.0, (record.first_step_at - began).total_seconds()), 3)


def breakdown(before: AttemptRecord | None, record: AttemptRecord, work: Work) -> Breakdown | None:
    """The stages of a start that is over; None before its first step was done, and where nobody told of it.

    Of an attempt that the status has forgotten the trainer's own stages are left.
    """
    first_step, opened = _seconds(record.first_step_at), _seconds(record.opened_at)
    began = opened if opened is not None else work.process_time
    if first_step is None or began is None:
        return None
    boundaries: list[tuple[str, float | None]] = [("", began)]
    sign = _last_sign(before)
    if before is not None and sign is not None:
        boundaries = [
            ("", sign.timestamp()),
            ("detect", _seconds(before.detected_at)),
            ("tear_down", _seconds(before.ended_at)),
            ("wait", opened),
        ]
    at = work.process_time
    if opened is not None:
        boundaries += [("schedule", _seconds(record.placed_at)), ("start", at)]
    for stage in STAGES:
        seconds = work.startup.get(stage)
        at = at + seconds if at is not None and seconds is not None else None
        boundaries.append((stage, at))
    boundaries.append(("first_step", first_step))
    return Breakdown(**{f"{stage}_seconds": seconds for stage, seconds in _stages(boundaries, first_step)})


def _stages(boundaries: list[tuple[str, float | None]], end: float) -> Iterable[tuple[str, float]]:
    """What is unknown has no stage of its own: the next one known has its time, so that all is in the sum."""
    began = boundaries[0][1]
    assert began is not None
    latest = min(began, end)
    for stage, boundary in boundaries[1:]:
        if boundary is None:
            continue
        clamped = min(max(boundary, latest), end)
        yield stage, round(clamped - latest, 3)
        latest = clamped


def newest_recovery(attempts: Iterable[AttemptRecord]) -> AttemptRecord | None:
    """The newest attempt that came back after a loss."""
    return next((one for one in reversed(list(attempts)) if one.recovery_seconds is not None), None)


def _last_sign(before: AttemptRecord | None) -> datetime | None:
    if before is None or before.verdict is Verdict.SUSPENDED:
        return None
    return before.last_sign_at or before.ended_at


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.astimezone(UTC).timestamp()
