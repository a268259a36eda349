"""The account of a job: what each attempt did, saved and lost, computed from what the run wrote itself.

The run directory's ledger and steps are the evidence; the job's status adds the verdicts, and what it
remembers of each attempt where the lines are out of reach. Pure.

What an attempt lost is decided in policy/lost_work.py, as the reconciler does it: beyond where its
successor resumed. Summed over the attempts that is exactly the number of steps done once too often.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from holdfast_trainer.contract import is_count, is_time

from ..breakdown import (
    Breakdown,
    BreakdownOfStart,
    CostOfAttempt,
    GoodputOfAttempt,
    Placed,
    RecoverySeconds,
)
from ..jobs import AttemptRecord, Model, Phase, TrainingJob, Verdict
from ..policy.lost_work import Work, lost_steps, lost_unheard, work_of
from ..policy.recovery import breakdown, lost_in

Line = Mapping[str, Any]


class AttemptAccount(Model):
    attempt: int
    verdict: Verdict | None = Field(description="None while it runs, or where it is no longer remembered.")
    reason: str = ""
    world_size: int | None = None
    resumed_step: int | None = Field(default=None, description="The step of the checkpoint it went on from.")
    resume_differences: list[str] = Field(
        default_factory=list,
        description="What was not as it was where that checkpoint was written: its bits may differ.",
    )
    passed_over: list[str] = Field(
        default_factory=list,
        description="Newer checkpoints that could not be gone on from, as they were damaged or gone, each "
        "with why.",
    )
    first_step: int | None = None
    last_step: int | None = Field(
        default=None,
        description="None of a program that tells nothing of its steps, and where the attempt was killed, is "
        "no longer remembered and its steps are out of reach.",
    )
    durable_step: int | None = Field(default=None, description="Newest step covered by a checkpoint.")
    lost_steps: int | None = Field(
        default=None, description="None while it runs, and where lastStep is not known."
    )
    checkpoints: int | None = Field(default=None, description="How many it made durable.")
    started_at: datetime | None = None
    first_step_at: datetime | None = None
    ended_at: datetime | None = Field(
        default=None,
        description="Of one that is no longer remembered and did not tell: when it was last heard of.",
    )
    recovery_seconds: RecoverySeconds = None
    breakdown: BreakdownOfStart = None
    whereabouts: Placed = None
    cost: CostOfAttempt = None
    goodput: GoodputOfAttempt = None
    outcome: str | None = Field(default=None, description="As its rank 0 told at the end, if it could.")
    digest: str | None = Field(
        default=None, description="Of the state in the checkpoint of durableStep, over all ranks."
    )


class Totals(Model):
    attempts: int
    disruptions: int
    failures: int
    lost_steps: int | None = Field(
        description="None where a program was ended, or failed, that tells nothing of its steps."
    )
    goodput: float | None
    recovery_seconds: list[float]
    wall_seconds: float | None = Field(description="From the first start to the end, or to now.")
    cost: float | None = Field(
        default=None,
        description="Of all attempts, up to now; None where one of them has no price.",
    )
    cost_currency: str | None = None


class LedgerDocument(Model):
    job: str = Field(description="`namespace/name`")
    phase: Phase
    run_directory: str | None = Field(
        default=None,
        description="Where its checkpoints, logs and ledger are: on one machine a path, else a directory of "
        "a PersistentVolumeClaim.",
    )
    attempts: list[AttemptAccount]
    totals: Totals
    lines: list[dict[str, Any]] = Field(
        description="The ledger as the trainer wrote it, as far as the controller has read it: on Kubernetes "
        "the whole of it is in the run directory alone, attempts/NNNN/ledger.jsonl."
    )


@dataclass
class _Evidence:
    """What one attempt left in the run directory."""

    ledger: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)

    def line(self, event: str) -> Line:
        """The newest line of an event; empty where there is none."""
        return next((line for line in reversed(self.ledger) if line.get("event") == event), {})

    @property
    def tells_its_end(self) -> bool:
        """Whether its last step is in it: what was killed said nothing, but for the steps themselves."""
        return bool(self.steps or self.line("stop"))

    @property
    def last_sign(self) -> float | None:
        """Seconds since the epoch of its newest line."""
        times = [line.get("time") for line in (*self.ledger, *self.steps)]
        return max((float(time) for time in times if is_time(time)), default=None)


def account(
    job: TrainingJob, lines: Sequence[dict[str, Any]], steps: Sequence[Line], now: datetime | None = None
) -> LedgerDocument:
    """The account of all attempts of which the run directory or the status knows."""
    evidence: defaultdict[int, _Evidence] = defaultdict(_Evidence)
    for line in lines:
        if is_count(line.get("attempt")):
            evidence[line["attempt"]].ledger.append(line)
    for step in steps:
        if is_count(step.get("attempt")):
            evidence[step["attempt"]].steps.append(step)
    records = {record.number: record for record in job.status.attempts}
    numbers = sorted(evidence.keys() | records.keys())
    attempts = [_attempt(number, evidence[number], records.get(number)) for number in numbers]
    last_signs = [_last_sign(evidence[number], records.get(number)) for number in numbers]
    for attempt, last_sign in list(zip(attempts, last_signs, strict=True))[:-1]:
        if attempt.ended_at is None:  # killed, and forgotten since
            attempt.ended_at = _moment(last_sign)
    unheard = lost_unheard(attempts)
    untold = {number for number in numbers if number not in records and not evidence[number].tells_its_end}
    for index, attempt in enumerate(attempts):
        if attempt.attempt in untold:
            attempt.last_step = None
        else:
            _book(attempt, attempts[index + 1 :], unheard=unheard)
        if index:
            before = lost_in(attempts[:index])
            _time_recovery(attempt, attempts[before], last_signs[before])
    return LedgerDocument(
        job=job.key,
        phase=job.status.phase,
        attempts=attempts,
        totals=_totals(
            job,
            attempts,
            now or datetime.now(UTC),
            unheard=unheard,
            whole=not untold and len(attempts) >= job.status.attempt,
        ),
        lines=list(lines),
    )


def _attempt(number: int, seen: _Evidence, record: AttemptRecord | None) -> AttemptAccount:
    """The lines, and where there are none the status: an engine that does not mount the run directory has
    lines only of what its controller lived to see."""
    work = work_of(number, seen.ledger, seen.steps)
    known = record or AttemptRecord(number=number)
    # A validation has a line too, of the step it went on from: that one was done by the attempt before.
    steps = (*seen.steps, seen.line("first_step"))
    first = [line["step"] for line in steps if "seconds" in line and is_count(line.get("step"))]
    started = _moment(seen.line("attempt_start").get("time"))
    return AttemptAccount(
        attempt=number,
        verdict=known.verdict,
        reason=known.reason,
        world_size=work.world_size or known.world_size,
        resumed_step=work.resumed_step if work.resumed_step is not None else known.resumed_step,
        resume_differences=list(work.resume_differences) or known.resume_differences,
        passed_over=list(work.passed_over) or known.passed_over,
        first_step=min(first, default=known.first_step),
        last_step=_most(work.last_step, known.last_step),
        durable_step=_most(work.durable_step, known.durable_step),
        checkpoints=_most(work.checkpoints, known.checkpoints),
        started_at=known.started_at or started,
        first_step_at=known.first_step_at or _moment(work.first_step_at),  # which a wrong clock may have told
        ended_at=known.ended_at if record else _moment(seen.line("stop").get("time")),
        recovery_seconds=known.recovery_seconds,
        breakdown=known.breakdown or _start_of(number, work),
        whereabouts=known.whereabouts,
        cost=known.cost,
        goodput=known.goodput,
        digest=_of_newest(work, known),
        outcome=work.outcome or known.outcome,
    )


def _of_newest(work: Work, known: AttemptRecord) -> str | None:
    """The digest of the newest durable step, which the lines may end before; None where that of an older one
    alone is known."""
    lines, status = work.durable_step or 0, known.durable_step or 0
    if lines == status:
        return work.digest or known.digest
    return work.digest if lines > status else known.digest


def _start_of(number: int, work: Work) -> Breakdown | None:
    """What the trainer alone tells of its start."""
    return breakdown(None, AttemptRecord(number=number, first_step_at=_moment(work.first_step_at)), work)


def _most(*figures: int | None) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _book(attempt: AttemptAccount, later: Sequence[AttemptAccount], *, unheard: bool) -> None:
    if attempt.ended_at is None and not later:
        return
    resumed = next((other.resumed_step for other in later if other.resumed_step is not None), None)
    finished = attempt.verdict == Verdict.FINISHED or attempt.outcome == "finished"
    work = Work(attempt.resumed_step, attempt.last_step, attempt.durable_step, None)
    lost = lost_steps(work, Verdict.FINISHED if finished else Verdict.DISRUPTED, resumed)
    # One that ended before it could say anything had nothing of its own to lose, where others do say it.
    attempt.lost_steps = 0 if lost is None and not (unheard and attempt.started_at) else lost


def _last_sign(seen: _Evidence, record: AttemptRecord | None) -> float | None:
    known = record.last_sign_at if record else None
    signs = [seen.last_sign, known.timestamp() if known else None]
    return max((sign for sign in signs if sign is not None), default=None)


def _time_recovery(attempt: AttemptAccount, before: AttemptAccount, ended: float | None) -> None:
    """Of an attempt that the status has forgotten; else it is the figure that is shown everywhere."""
    if attempt.recovery_seconds is not None:
        return
    if ended is None and before.ended_at is not None:
        ended = before.ended_at.timestamp()
    if attempt.first_step_at is None or ended is None or before.verdict == Verdict.SUSPENDED:
        return
    attempt.recovery_seconds = round(max(0.0, attempt.first_step_at.timestamp() - ended), 3)


def _totals(
    job: TrainingJob, attempts: Sequence[AttemptAccount], now: datetime, *, unheard: bool, whole: bool
) -> Totals:
    """`whole`: what each attempt of the job lost is in `attempts`; else the status remembers their sum."""
    started, ended = job.status.first_started_at, job.status.wall_ended_at
    lost = sum(attempt.lost_steps or 0 for attempt in attempts)
    return Totals(
        attempts=max(job.status.attempt, len(attempts)),
        disruptions=job.status.disruptions,
        failures=job.status.failures,
        lost_steps=None if unheard else lost if whole else max(lost, job.status.lost_steps),
        goodput=job.status.goodput,
        recovery_seconds=[a.recovery_seconds for a in attempts if a.recovery_seconds is not None],
        wall_seconds=max(0.0, ((ended or now) - started).total_seconds()) if started else None,
        cost=job.status.cost,
        cost_currency=job.status.cost_currency,
    )


def _moment(seconds: object) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if is_time(seconds) else None
