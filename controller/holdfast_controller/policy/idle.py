"""Whether a job uses the GPUs that it holds: from one look at them after another to a verdict. Pure.

A GPU is idle as long as every look at it found it below `IDLE_BELOW`, and no two looks with a figure lie
further apart than `gap`: what nobody saw is neither idle nor used. Only figures count; a job whose GPUs
cannot be read has no verdict. A job is idle where one of its GPUs has been so for `idleSeconds`. It is
stopped only where all of them have, for the others' work would be lost with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from fractions import Fraction
from typing import Literal

from holdfast_controller.cluster import GpuUse
from holdfast_controller.jobs import Condition, Status
from holdfast_controller.spec import Idle, Spec

IDLE_BELOW = 0.05
"""Share of the time in which a GPU that is used has at least to be at work."""
CONDITION = "GPUsIdle"
STOPPED = "Stopped"
"""The condition's reason where the job was suspended for it."""
NAMED = 4
"""GPUs that a message names."""


@dataclass(frozen=True)
class Stretch:
    """What the looks at one GPU of one attempt have found so far."""

    use: GpuUse
    """The newest with a figure."""
    last: datetime
    """When that was."""
    since: datetime | None = None
    """From when on every look found it idle; None: the newest did not."""
    most: float = 0.0
    """The highest figure since then."""

    def is_recent(self, now: datetime, gap: timedelta) -> bool:
        """Whether what was found still counts: not of before the clock was set back, either."""
        return abs(now - self.last) <= gap


Stretches = Mapping[str, Stretch]
"""Of one attempt, by GPU."""


def follow(before: Stretch | None, use: GpuUse, now: datetime, gap: timedelta) -> Stretch | None:
    """The stretch after one more look; None where nothing is known of the GPU any more."""
    if before is not None and not before.is_recent(now, gap):
        before = None
    if use.busy is None:
        return before
    if use.busy >= IDLE_BELOW:
        return Stretch(use, now)
    if before is None or before.since is None:
        return Stretch(use, now, now, use.busy)
    return Stretch(use, now, before.since, max(before.most, use.busy))


def current(stretches: Stretches, opened_at: datetime | None, now: datetime, gap: timedelta) -> Stretches:
    """What is known now of the GPUs of an attempt that was opened then: nothing of those that nobody has
    seen for longer than `gap`, and nothing of before it was opened: another job may have had its name."""
    known = {gpu: stretch for gpu, stretch in stretches.items() if stretch.is_recent(now, gap)}
    if opened_at is None:
        return known
    return {
        gpu: replace(stretch, since=stretch.since and max(stretch.since, opened_at))
        for gpu, stretch in known.items()
        if stretch.last >= opened_at
    }


class Standing(StrEnum):
    USED = "Used"
    IDLE = "Idle"
    UNDECIDED = "Undecided"
    """Idle, and not for long enough, as far as anybody looked."""
    UNKNOWN = "Unknown"
    """No figures."""


@dataclass(frozen=True)
class GpuVerdict:
    """What the looks come to for one attempt."""

    standing: Standing
    message: str = ""
    """Which GPUs are idle, of which ranks, since when and how much: where `standing` is IDLE."""
    all_idle: bool = False
    """Every GPU that the job asks for was seen to be idle for so long, and it is on no other."""
    decided_in: float | None = None
    """Seconds until a GPU that stays idle makes another verdict."""


def judge(stretches: Stretches, spec: Spec, now: datetime) -> GpuVerdict:
    """The verdict on an attempt, by all that is known of its GPUs."""
    resting = {gpu: stretch for gpu, stretch in stretches.items() if stretch.since is not None}
    ages = {gpu: _age(stretch, now) for gpu, stretch in resting.items()}
    left = [spec.idle_seconds - age for age in ages.values() if age < spec.idle_seconds]
    decided_in = min(left, default=None)
    idle = [resting[gpu] for gpu, age in ages.items() if age >= spec.idle_seconds]
    if idle:
        asked = spec.replicas * max(1, int(Fraction(spec.gpus)))
        all_idle = asked <= len(idle) == len(stretches)  # it may be at work on one that it was not given
        return GpuVerdict(Standing.IDLE, _said(idle, asked), all_idle, decided_in)
    if not stretches:
        return GpuVerdict(Standing.UNKNOWN)
    used = len(resting) < len(stretches)
    return GpuVerdict(Standing.USED if used else Standing.UNDECIDED, decided_in=decided_in)


def _age(stretch: Stretch, now: datetime) -> float:
    assert stretch.since is not None
    return (now - stretch.since).total_seconds()


def _said(idle: list[Stretch], asked: int) -> str:
    """Names the GPUs in a fixed order, so that it stays the same while they stay idle."""
    told = [_one(stretch) for stretch in sorted(idle, key=lambda each: (each.use.replica, each.use.gpu))]
    more = f"; and {len(told) - NAMED} more" if len(told) > NAMED else ""
    return f"{len(told)} of {asked} GPUs not used: {'; '.join(told[:NAMED])}{more}"


def _one(stretch: Stretch) -> str:
    use, since = stretch.use, stretch.since
    assert since is not None
    whose = f"replica {use.replica}" + (f" rank {use.ranks}" if use.ranks else " (no rank known to be on it)")
    return f"{use.gpu} of {whose}, at most {stretch.most:.0%} busy since {since:%Y-%m-%d %H:%M} UTC"


def judged(status: Status, verdict: GpuVerdict | None, spec: Spec, now: datetime) -> str:
    """Keep the condition of a job that runs in its status; what is to be told of it, if anything."""
    before = _condition(status)
    after = _after(before, verdict, spec.idle, now)
    if after is None or after is before:
        return ""
    _keep(status, after)
    if after.status != "True" or (before is not None and before.reason == after.reason):
        return ""
    stops = "; it is suspended after a checkpoint, for idle is Stop" if after.reason == STOPPED else ""
    return after.message + stops


def to_be_stopped(status: Status, action: Idle) -> bool:
    """Whether the condition of a job that runs asks for its end; so also where a crash came in between, but
    not where `action` asks for it no more."""
    known = _condition(status)
    return action is Idle.STOP and known is not None and (known.status, known.reason) == ("True", STOPPED)


def at_rest(status: Status, spec: Spec, now: datetime) -> None:
    """Keep the condition of a job that holds no GPU, or gives them back: why it was stopped stays for as
    long as it is suspended."""
    before = _condition(status)
    if before is None:
        return
    if spec.suspend and before.reason == STOPPED:
        _keep(status, _moved(before, "False", STOPPED, before.message, now))
    else:
        _keep(status, _moved(before, "False", "NotRunning", "", now))


def why_stopped(status: Status) -> str:
    """For a suspended job's message: empty, or `, for ...` where it was suspended for idle GPUs."""
    known = _condition(status)
    return f", for {known.message}" if known is not None and known.reason == STOPPED else ""


def _condition(status: Status) -> Condition | None:
    return next((one for one in status.conditions if one.type == CONDITION), None)


def _keep(status: Status, condition: Condition) -> None:
    status.conditions = [*(one for one in status.conditions if one.type != CONDITION), condition]


def _after(
    before: Condition | None, verdict: GpuVerdict | None, action: Idle, now: datetime
) -> Condition | None:
    if verdict is None or verdict.standing is Standing.UNDECIDED:
        return before
    if verdict.standing is Standing.IDLE:
        reason = STOPPED if action is Idle.STOP and verdict.all_idle else "Idle"
        if before is not None and (before.status, before.reason) == ("True", reason):
            return before  # the figures of its message move on, what it says does not
        return _moved(before, "True", reason, verdict.message, now)
    if before is None or (before.status != "True" and verdict.standing is Standing.UNKNOWN):
        return before
    if verdict.standing is Standing.UNKNOWN:
        return _moved(before, "Unknown", "NoFigures", f"no figures now; before: {before.message}", now)
    return _moved(before, "False", "InUse", "", now)


def _moved(
    before: Condition | None,
    status: Literal["True", "False", "Unknown"],
    reason: str,
    message: str,
    now: datetime,
) -> Condition:
    if before is not None and (before.status, before.reason, before.message) == (status, reason, message):
        return before
    same = before is not None and before.status == status
    return Condition(
        type=CONDITION,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=before.last_transition_time if before is not None and same else now,
    )
