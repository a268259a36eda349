"""All Prometheus series of the controller.

Series about jobs are read from the jobs' own status at the time of a scrape, so they are the same before
and after a restart of the controller, and end with the job.

| series | labels | what |
| --- | --- | --- |
| holdfast_jobs | phase | jobs in a phase |
| holdfast_job_attempts_total | namespace, job | attempts opened |
| holdfast_job_disruptions_total, holdfast_job_failures_total | namespace, job | incidents |
| holdfast_job_lost_steps | namespace, job | a gauge: corrected when the next attempt resumes |
| holdfast_job_goodput_ratio | namespace, job | time on steps that count / wall time |
| holdfast_job_step, holdfast_job_durable_step | namespace, job | the newest known |
| holdfast_job_tokens_per_second | namespace, job | of the running attempt |
| holdfast_job_phase | namespace, job, phase | 1 for the phase that the job is in |
| holdfast_job_recovery_seconds | namespace, job | the newest: from an attempt's end to the next first step |
| holdfast_job_gpus | namespace, job | asked for, by all replicas |
| holdfast_job_disruptions_allowed | namespace, job | where the job sets a budget |
| holdfast_job_checkpoint_every_steps, _seconds | namespace, job | where the job sets one |
| holdfast_reconcile_seconds | | histogram of reconcile passes |
| holdfast_reconcile_errors_total | | passes that ended in an error and are tried again |
| holdfast_queue_depth | | jobs that wait for a reconcile pass |
| holdfast_slots, holdfast_slots_used | resource | of the local engine: cpu, gpu |
| holdfast_watch_age_seconds | resource | since the apiserver was last heard of |
| holdfast_watch_restarts_total | resource, reason | watches that ended: ended, failed, expired |
| holdfast_apiserver_requests_total | method, resource | requests sent to the apiserver |
| holdfast_leader | | 1 while this controller leads |
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .jobs import AttemptRecord, Phase, TrainingJob

Slots = Callable[[], Mapping[str, tuple[float, float]]]
"""Used and total, by resource."""

_LABELS = ("namespace", "job")


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What the series of one job need: a tenth of the job, which counts where there are thousands."""

    namespace: str
    name: str
    phase: Phase
    attempts: int
    disruptions: int
    failures: int
    lost_steps: int
    goodput: float | None
    step: int | None
    durable_step: int | None
    tokens_per_second: float | None
    """Of the running attempt; None where none trains."""
    recovery_seconds: float | None
    gpus: float
    disruptions_allowed: int | None
    every_steps: int | None
    every_seconds: int | None

    @classmethod
    def of(cls, job: TrainingJob) -> JobFigures:
        spec, status, progress = job.spec, job.status, job.status.progress
        every = spec.checkpoint.every
        return cls(
            job.metadata.namespace,
            job.metadata.name,
            status.phase,
            status.attempt,
            status.disruptions,
            status.failures,
            status.lost_steps,
            status.goodput,
            progress.step if progress else None,
            progress.durable_step if progress else None,
            progress.tokens_per_second if progress and status.phase is Phase.RUNNING else None,
            recovery_seconds(status.attempts),
            spec.replicas * float(Fraction(spec.gpus)),
            spec.retries.disruptions,
            int(every) if every.isdigit() else None,
            int(every[:-1]) if every.endswith("s") else None,
        )


def recovery_seconds(attempts: Sequence[AttemptRecord]) -> float | None:
    """From the end of the newest attempt that another one followed to that one's first step; None where no
    step followed yet. What lies between is waiting for room, starting and loading."""
    for before, after in reversed(list(pairwise(attempts))):
        if before.ended_at is not None and after.first_step_at is not None:
            return max(0.0, (after.first_step_at - before.ended_at).total_seconds())
    return None


class Metrics:
    """One registry for the process; serve `registry` at /metrics."""

    def __init__(self, slots: Slots | None = None):
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "holdfast_reconcile_seconds",
            "Duration of a reconcile pass.",
            registry=self.registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )
        self.reconcile_errors = Counter(
            "holdfast_reconcile_errors", "Reconcile passes that ended in an error.", registry=self.registry
        )
        self.queue_depth = Gauge(
            "holdfast_queue_depth", "Jobs that wait for a reconcile pass.", registry=self.registry
        )
        self.jobs: dict[str, JobFigures] = {}
        """What is shown of every job, by key; the reconciler keeps it."""
        self.registry.register(_Jobs(self.jobs, slots))


class WatchMetrics:
    """How alive the watches of an apiserver are, what it is asked, and whether this controller leads."""

    def __init__(self, registry: CollectorRegistry):
        self._age = Gauge(
            "holdfast_watch_age_seconds",
            "Seconds since the apiserver was last heard of.",
            ("resource",),
            registry=registry,
        )
        self._restarts = Counter(
            "holdfast_watch_restarts",
            "Watches that ended and were opened again.",
            ("resource", "reason"),
            registry=registry,
        )
        self._requests = Counter(
            "holdfast_apiserver_requests",
            "Requests sent to the apiserver.",
            ("method", "resource"),
            registry=registry,
        )
        self.leader = Gauge("holdfast_leader", "1 while this controller leads.", registry=registry)

    def follow(self, resource: str, age: Callable[[], float]) -> None:
        """Ask `age` at every scrape."""
        self._age.labels(resource).set_function(age)

    def requested(self, method: str, resource: str) -> None:
        self._requests.labels(method, resource).inc()

    def restarted(self, resource: str, reason: str) -> None:
        self._restarts.labels(resource, reason).inc()


class _Jobs(Collector):
    def __init__(self, jobs: Mapping[str, JobFigures], slots: Slots | None):
        self._jobs = jobs
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        jobs = list(self._jobs.values())
        phases = Tally(job.phase for job in jobs)
        by_phase = GaugeMetricFamily("holdfast_jobs", "Jobs by phase.", labels=("phase",))
        for phase in Phase:
            by_phase.add_metric((phase.value,), phases[phase])
        yield by_phase
        yield from _counters(jobs)
        yield from _gauges(jobs)
        if self._slots is not None:
            total = GaugeMetricFamily("holdfast_slots", "Slots of this machine.", labels=("resource",))
            used = GaugeMetricFamily("holdfast_slots_used", "Slots in use.", labels=("resource",))
            for resource, (taken, there) in self._slots().items():
                total.add_metric((resource,), there)
                used.add_metric((resource,), taken)
            yield total
            yield used


def _counters(jobs: list[JobFigures]) -> Iterator[Metric]:
    attempts = CounterMetricFamily("holdfast_job_attempts", "Attempts opened.", labels=_LABELS)
    disruptions = CounterMetricFamily("holdfast_job_disruptions", "Disruptions.", labels=_LABELS)
    failures = CounterMetricFamily("holdfast_job_failures", "Failures.", labels=_LABELS)
    for job in jobs:
        labels = (job.namespace, job.name)
        attempts.add_metric(labels, job.attempts)
        disruptions.add_metric(labels, job.disruptions)
        failures.add_metric(labels, job.failures)
    yield from (attempts, disruptions, failures)


def _gauges(jobs: list[JobFigures]) -> Iterator[Metric]:
    phase = GaugeMetricFamily("holdfast_job_phase", "1 for the job's phase.", labels=(*_LABELS, "phase"))
    for job in jobs:
        phase.add_metric((job.namespace, job.name, job.phase.value), 1)
    yield phase
    for name, text, value in _GAUGES:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for job in jobs:
            if (known := value(job)) is not None:
                family.add_metric((job.namespace, job.name), known)
        yield family


_GAUGES: tuple[tuple[str, str, Callable[[JobFigures], float | None]], ...] = (
    ("holdfast_job_lost_steps", "Steps that were done again.", lambda job: job.lost_steps),
    ("holdfast_job_goodput_ratio", "Time on steps that count / wall time.", lambda job: job.goodput),
    ("holdfast_job_step", "Last step done.", lambda job: job.step),
    ("holdfast_job_durable_step", "Last durable step.", lambda job: job.durable_step),
    ("holdfast_job_tokens_per_second", "Tokens per second.", lambda job: job.tokens_per_second),
    (
        "holdfast_job_recovery_seconds",
        "From the end of an attempt to the first step of the next, the newest.",
        lambda job: job.recovery_seconds,
    ),
    ("holdfast_job_gpus", "GPUs that the job asks for.", lambda job: job.gpus),
    (
        "holdfast_job_disruptions_allowed",
        "Restarts that the job allows for disruptions.",
        lambda job: job.disruptions_allowed,
    ),
    ("holdfast_job_checkpoint_every_steps", "Steps between saves.", lambda job: job.every_steps),
    ("holdfast_job_checkpoint_every_seconds", "Seconds between saves.", lambda job: job.every_seconds),
)
"""Name, help, and what is shown of a job; None shows nothing."""
