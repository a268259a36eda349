"""The series of all jobs, written as Prometheus reads them.

There are a dozen of every job, so of ten thousand jobs more than a hundred thousand lines a scrape. The
client library takes five microseconds for each, and keeps the whole process from its work meanwhile: here a
line is one formatted string, for names of namespaces and jobs need no escapes, and the text comes in pieces
of a millisecond.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction

from .jobs import Phase, TrainingJob
from .policy.cost import Meter, meter_of
from .policy.lost_work import goodput_at, idle_from, known_lost_steps
from .policy.recovery import newest_recovery

BATCH = 1000
"""Lines of a piece."""


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What the series of one job need: a tenth of the job, which counts where there are thousands."""

    namespace: str
    name: str
    phase: Phase
    attempts: int
    disruptions: int
    failures: int
    lost_steps: int | None
    """None: not known of a program that tells nothing of its steps."""
    goodput: float | None
    """As written; what it is at a scrape follows from the three that come next."""
    useful_seconds: float | None
    started_at: datetime | None
    idle_from: datetime | None
    step: int | None
    durable_step: int | None
    tokens_per_second: float | None
    """Of the running attempt; None where none trains."""
    recovery_seconds: float | None
    recovery_stages: tuple[tuple[str, float], ...]
    """Of the newest recovery; together they are `recovery_seconds`."""
    cost: float | None
    """Of the attempts that have ended; with `meter` also of the one that runs."""
    meter: Meter | None
    currency: str | None
    gpus: float | None
    """By all replicas; None for parts that MIG cut, whose share of a GPU a profile's name does not say."""
    disruptions_allowed: int | None
    every_steps: int | None
    every_seconds: int | None
    unheard: bool = False
    """Nobody hears rank 0 now, so nobody knows how fast it is."""

    @classmethod
    def of(cls, job: TrainingJob) -> JobFigures:
        spec, status, progress = job.spec, job.status, job.status.progress
        opened = job.as_of(status.attempt).spec
        every = opened.checkpoint.every
        recovery = newest_recovery(status.attempts)
        stages = recovery.breakdown.stages() if recovery and recovery.breakdown else {}
        meter = meter_of(status)
        return cls(
            job.metadata.namespace,
            job.metadata.name,
            status.phase,
            status.attempt,
            status.disruptions,
            status.failures,
            known_lost_steps(status),
            status.goodput,
            status.useful_seconds,
            status.first_started_at,
            idle_from(status),
            progress.step if progress else None,
            progress.durable_step if progress else None,
            progress.tokens_per_second if progress and status.phase is Phase.RUNNING else None,
            recovery.recovery_seconds if recovery else None,
            tuple(stages.items()),
            status.cost,
            meter,
            status.cost_currency if meter is None else meter.currency,
            None if opened.mig else opened.replicas * float(Fraction(opened.gpus)),
            spec.retries.disruptions,
            int(every) if every.isdigit() else None,
            int(every[:-1]) if every.endswith("s") else None,
        )


def job_series(jobs: Sequence[JobFigures], now: datetime) -> Iterator[bytes]:
    """The text format, in pieces, as of `now`; all lines of a series follow each other."""
    phases = Tally(job.phase for job in jobs)
    lines = [f'holdfast_jobs{{phase="{phase.value}"}} {phases[phase]}\n' for phase in Phase]
    yield _head("holdfast_jobs", "gauge", "Jobs by phase.") + "".join(lines).encode()
    yield _head("holdfast_job_phase", "gauge", "1 for the job's phase.")
    yield from _pieces(jobs, _phase_line)
    yield _head("holdfast_job_recovery_stage_seconds", "gauge", "What the newest recovery went into.")
    yield from _pieces(jobs, _stage_lines)
    yield _head("holdfast_job_goodput_ratio", "gauge", "Time on steps that count / wall time.")
    yield from _pieces(jobs, lambda job: _goodput_line(job, now))
    yield _head("holdfast_job_cost", "gauge", "Of all attempts so far, where their nodes have prices.")
    yield from _pieces(jobs, lambda job: _cost_line(job, now))
    for name, kind, text, value in _SERIES:
        yield _head(name, kind, text)

        def line(job: JobFigures, name: str = name, value: Value = value) -> str:
            known = value(job)
            if known is None:
                return ""
            return f'{name}{{namespace="{job.namespace}",job="{job.name}"}} {known}\n'

        yield from _pieces(jobs, line)


def _pieces(jobs: Sequence[JobFigures], line: Callable[[JobFigures], str]) -> Iterator[bytes]:
    for first in range(0, len(jobs), BATCH):
        yield "".join([line(job) for job in jobs[first : first + BATCH]]).encode()


def _head(name: str, kind: str, text: str) -> bytes:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode()


def _phase_line(job: JobFigures) -> str:
    labels = f'namespace="{job.namespace}",job="{job.name}",phase="{job.phase.value}"'
    return f"holdfast_job_phase{{{labels}}} 1\n"


def _stage_lines(job: JobFigures) -> str:
    labels = f'namespace="{job.namespace}",job="{job.name}"'
    return "".join(
        f'holdfast_job_recovery_stage_seconds{{{labels},stage="{stage}"}} {seconds}\n'
        for stage, seconds in job.recovery_stages
    )


def _goodput_line(job: JobFigures, now: datetime) -> str:
    known = goodput_at(job.goodput, job.useful_seconds, job.started_at, job.idle_from, now)
    if known is None:
        return ""
    return f'holdfast_job_goodput_ratio{{namespace="{job.namespace}",job="{job.name}"}} {known}\n'


def _cost_line(job: JobFigures, now: datetime) -> str:
    known = job.cost if job.meter is None else job.meter.at(now)
    if known is None:
        return ""
    labels = f'namespace="{job.namespace}",job="{job.name}",currency="{job.currency}"'
    return f"holdfast_job_cost{{{labels}}} {known}\n"


def _speed(job: JobFigures) -> float | None:
    return None if job.unheard else job.tokens_per_second


Value = Callable[[JobFigures], float | None]

_SERIES: tuple[tuple[str, str, str, Value], ...] = (
    ("holdfast_job_attempts_total", "counter", "Attempts opened.", lambda job: job.attempts),
    ("holdfast_job_disruptions_total", "counter", "Disruptions.", lambda job: job.disruptions),
    ("holdfast_job_failures_total", "counter", "Failures.", lambda job: job.failures),
    ("holdfast_job_lost_steps", "gauge", "Steps that were done again.", lambda job: job.lost_steps),
    ("holdfast_job_step", "gauge", "Last step done.", lambda job: job.step),
    ("holdfast_job_durable_step", "gauge", "Last durable step.", lambda job: job.durable_step),
    ("holdfast_job_tokens_per_second", "gauge", "Tokens per second.", _speed),
    (
        "holdfast_job_recovery_seconds",
        "gauge",
        "From the last sign of life of an attempt to the first step of the next, the newest.",
        lambda job: job.recovery_seconds,
    ),
    ("holdfast_job_gpus", "gauge", "GPUs that the job asks for; not of MIG devices.", lambda job: job.gpus),
    (
        "holdfast_job_disruptions_allowed",
        "gauge",
        "Restarts that the job allows for disruptions.",
        lambda job: job.disruptions_allowed,
    ),
    ("holdfast_job_checkpoint_every_steps", "gauge", "Steps between saves.", lambda job: job.every_steps),
    (
        "holdfast_job_checkpoint_every_seconds",
        "gauge",
        "Seconds between saves.",
        lambda job: job.every_seconds,
    ),
)
"""Name, type, help, and what is shown of a job; None shows nothing."""
