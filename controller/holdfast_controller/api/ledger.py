"""The account of a job: what each attempt did, saved and lost, computed from what the run wrote itself.

The run directory's ledger and steps are the evidence; the job's status adds the verdicts. Pure.

Lost steps of an attempt are the steps it had done beyond the step where its successor resumed, or, as
long as it has none, beyond its newest durable checkpoint. Summed over the attempts this is exactly the
number of steps that were done more often than once. A checkpoint that proves unreadable afterwards
therefore adds to the loss, though it had counted as durable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from ..jobs import AttemptRecord, Model, Phase, TrainingJob, Verdict

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

    start: Line = field(default_factory=dict)
    first: Line = field(default_factory=dict)
    stop: Line = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    last_sign: float | None = None
    """Seconds since the epoch of the newest line."""


def account(
    job: TrainingJob, lines: Sequence[dict[str, Any]], steps: Sequence[Line], now: datetime | None = None
) -> LedgerDocument:
    """The account of all attempts of which the run directory or the status knows."""
    evidence = _gather(lines, steps)
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


def _gather(lines: Sequence[Line], steps: Sequence[Line]) -> defaultdict[int, _Evidence]:
    found: defaultdict[int, _Evidence] = defaultdict(_Evidence)
    for line in (*lines, *steps):
        if not isinstance(line.get("attempt"), int):
            continue
        of = found[line["attempt"]]
        if isinstance(line.get("time"), int | float):
            of.last_sign = max(of.last_sign or 0.0, float(line["time"]))
        match line.get("event"):
            case "attempt_start":
                of.start = line
            case "first_step":
                of.first = line
            case "checkpoint":
                of.checkpoints.append(int(line["step"]))
            case "stop":
                of.stop = line
            case None if "step" in line:
                of.steps.append(int(line["step"]))
    return found


def _attempt(number: int, seen: _Evidence, record: AttemptRecord | None) -> AttemptAccount:
    resumed = seen.start.get("resumed_step")
    done = [
        *seen.steps,
        *([seen.first["step"]] if seen.first else []),
        *([seen.stop["step"]] if seen.stop else []),
    ]
    durable = [*seen.checkpoints, *([resumed] if resumed is not None else [])]
    if seen.stop:
        durable.append(int(seen.stop["durable_step"]))
    ended = record.ended_at if record else _moment(seen.stop.get("time"))
    return AttemptAccount(
        attempt=number,
        verdict=record.verdict if record else None,
        reason=record.reason if record else "",
        world_size=seen.start.get("world_size"),
        resumed_step=resumed,
        first_step=min(seen.steps, default=seen.first.get("step")),
        last_step=max(done, default=record.last_step if record else None),
        durable_step=max(durable, default=None),
        checkpoints=len(seen.checkpoints),
        started_at=_moment(seen.start.get("time")) or (record.started_at if record else None),
        first_step_at=_moment(seen.first.get("time")),
        ended_at=ended,
        digest=seen.stop.get("digest") or None,
    )


def _book(attempt: AttemptAccount, later: Sequence[AttemptAccount]) -> None:
    resumed = next((other.resumed_step for other in later if other.resumed_step is not None), None)
    over = attempt.ended_at is not None or bool(later)
    if not over:
        return
    kept = resumed if resumed is not None else attempt.durable_step
    # An attempt that ended before its first step had nothing of its own to lose.
    attempt.lost_steps = 0 if attempt.last_step is None else max(0, attempt.last_step - (kept or 0))


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
