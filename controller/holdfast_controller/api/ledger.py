"""The account of a job: what each attempt did, saved and lost, computed from what the run wrote itself.

The run directory's ledger and steps are the evidence; the job's status adds the verdicts. Pure.

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

from ..jobs import AttemptRecord, Model, Phase, TrainingJob, Verdict
from ..policy.lost_work import Work, lost_steps, work_of

Line = Mapping[str, Any]


class AttemptAccount(Model):
    attempt: int
    verdict: Verdict | None = Field(description="None while it runs, or where it is no longer remembered.")
    reason: str = ""
    world_size: int | None = None
    resumed_step: int | None = Field(default=None, description="The step of the checkpoint it went on from.")
    first_step: int | None = None
    last_step: int | None = None
    durable_step: int | None = Field(default=None, description="Newest step covered by a checkpoint.")
    lost_steps: int | None = Field(default=None, description="None while it runs.")
    checkpoints: int = 0
    started_at: datetime | None = None
    first_step_at: datetime | None = None
    ended_at: datetime | None = None
    recovery_seconds: float | None = Field(
        default=None,
        description="From the last sign of life of the attempt before to the end of this one's first step; "
        "None for the first attempt and after a suspension.",
    )
    outcome: str | None = Field(default=None, description="As its rank 0 told at the end, if it could.")
    digest: str | None = Field(default=None, description="Of the parameters at its end.")


class Totals(Model):
    attempts: int
    disruptions: int
    failures: int
    lost_steps: int
    goodput: float | None
    recovery_seconds: list[float]
    wall_seconds: float | None = Field(description="From the first start to the end, or to now.")


class LedgerDocument(Model):
    job: str = Field(description="`namespace/name`")
    phase: Phase
    attempts: list[AttemptAccount]
    totals: Totals
    lines: list[dict[str, Any]] = Field(description="The ledger as the trainer wrote it.")


@dataclass
class _Evidence:
    """What one attempt left in the run directory."""

    ledger: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)

    def line(self, event: str) -> Line:
        """The newest line of an event; empty where there is none."""
        return next((line for line in reversed(self.ledger) if line.get("event") == event), {})

    @property
    def last_sign(self) -> float | None:
        """Seconds since the epoch of its newest line."""
        times = [line.get("time") for line in (*self.ledger, *self.steps)]
        return max((float(time) for time in times if isinstance(time, int | float)), default=None)


def account(
    job: TrainingJob, lines: Sequence[dict[str, Any]], steps: Sequence[Line], now: datetime | None = None
) -> LedgerDocument:
    """The account of all attempts of which the run directory or the status knows."""
    evidence: defaultdict[int, _Evidence] = defaultdict(_Evidence)
    for line in lines:
        evidence[int(line["attempt"])].ledger.append(line)
    for step in steps:
        evidence[int(step["attempt"])].steps.append(step)
    records = {record.number: record for record in job.status.attempts}
    numbers = sorted(evidence.keys() | records.keys())
    attempts = [_attempt(number, evidence[number], records.get(number)) for number in numbers]
    for index, attempt in enumerate(attempts):
        _book(attempt, attempts[index + 1 :])
        if index:
            _time_recovery(attempt, attempts[index - 1], evidence)
    return LedgerDocument(
        job=job.key,
        phase=job.status.phase,
        attempts=attempts,
        totals=_totals(job, attempts, now or datetime.now(UTC)),
        lines=list(lines),
    )


def _attempt(number: int, seen: _Evidence, record: AttemptRecord | None) -> AttemptAccount:
    work = work_of(number, seen.ledger, seen.steps)
    stop = seen.line("stop")
    done = [step for step in (work.last_step, record.last_step if record else None) if step is not None]
    saved = [
        step for step in (work.durable_step, record.durable_step if record else None) if step is not None
    ]
    # A validation has a line too, of the step it went on from: that one was done by the attempt before.
    first = [line["step"] for line in (*seen.steps, seen.line("first_step")) if "seconds" in line]
    started = _moment(seen.line("attempt_start").get("time"))
    return AttemptAccount(
        attempt=number,
        verdict=record.verdict if record else None,
        reason=record.reason if record else "",
        world_size=seen.line("attempt_start").get("world_size"),
        resumed_step=work.resumed_step,
        first_step=min(first, default=None),
        last_step=max(done, default=None),
        durable_step=max(saved, default=None),
        checkpoints=sum(line.get("event") == "checkpoint" for line in seen.ledger),
        started_at=(record.started_at if record else None) or started,
        first_step_at=_moment(work.first_step_at),
        ended_at=record.ended_at if record else _moment(stop.get("time")),
        digest=stop.get("digest") or None,
        outcome=stop.get("outcome"),
    )


def _book(attempt: AttemptAccount, later: Sequence[AttemptAccount]) -> None:
    if attempt.ended_at is None and not later:
        return
    resumed = next((other.resumed_step for other in later if other.resumed_step is not None), None)
    finished = attempt.verdict == Verdict.FINISHED or attempt.outcome == "finished"
    work = Work(attempt.resumed_step, attempt.last_step, attempt.durable_step, None)
    # An attempt that ended before it could say anything had nothing of its own to lose.
    attempt.lost_steps = lost_steps(work, Verdict.FINISHED if finished else Verdict.DISRUPTED, resumed) or 0


def _time_recovery(
    attempt: AttemptAccount, before: AttemptAccount, evidence: Mapping[int, _Evidence]
) -> None:
    ended = evidence[before.attempt].last_sign
    if ended is None and before.ended_at is not None:
        ended = before.ended_at.timestamp()
    if attempt.first_step_at is None or ended is None or before.verdict == Verdict.SUSPENDED:
        return
    attempt.recovery_seconds = round(attempt.first_step_at.timestamp() - ended, 3)


def _totals(job: TrainingJob, attempts: Sequence[AttemptAccount], now: datetime) -> Totals:
    started, finished = job.status.first_started_at, job.status.finished_at
    return Totals(
        attempts=max(job.status.attempt, len(attempts)),
        disruptions=job.status.disruptions,
        failures=job.status.failures,
        lost_steps=sum(attempt.lost_steps or 0 for attempt in attempts),
        goodput=job.status.goodput,
        recovery_seconds=[a.recovery_seconds for a in attempts if a.recovery_seconds is not None],
        wall_seconds=((finished or now) - started).total_seconds() if started else None,
    )


def _moment(seconds: object) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if isinstance(seconds, int | float) else None
