"""All Prometheus series of the controller.

Series about jobs are read from the jobs' own status at the time of a scrape, so they are the same before
and after a restart of the controller, and end with the job.

| series | labels | what |
| --- | --- | --- |
| holdfast_jobs | phase | jobs in a phase |
| holdfast_job_attempts_total | namespace, job | attempts opened |
| holdfast_job_disruptions_total, holdfast_job_failures_total | namespace, job | incidents |
| holdfast_job_lost_steps | namespace, job | a gauge: corrected when the next attempt resumes; none of a \
program that was ended and tells nothing of its steps |
| holdfast_job_goodput_ratio | namespace, job | time on steps that count / wall time |
| holdfast_job_step, holdfast_job_durable_step | namespace, job | the newest known |
| holdfast_job_tokens_per_second | namespace, job | of the running attempt, while its rank 0 is heard |
| holdfast_job_phase | namespace, job, phase | 1 for the phase that the job is in |
| holdfast_job_recovery_seconds | namespace, job | the newest: from the last sign of life to the next step |
| holdfast_job_recovery_stage_seconds | namespace, job, stage | what it went into: detect, tear_down, wait, \
schedule, start, import, rendezvous, build, load, first_step |
| holdfast_job_cost | namespace, job, currency | of all attempts so far, where their nodes have prices |
| holdfast_job_gpus | namespace, job | asked for, by all replicas; none of a job with `mig` |
| holdfast_job_disruptions_allowed | namespace, job | where the job sets a budget |
| holdfast_job_checkpoint_every_steps, _seconds | namespace, job | of the newest attempt, where it has one |
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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .cluster import AttemptObservation
from .job_series import JobFigures, job_series
from .jobs import utcnow

Slots = Callable[[], Mapping[str, tuple[float, float]]]
"""Used and total, by resource."""


class Metrics:
    """All series of the process; serve `text` at /metrics."""

    def __init__(self, slots: Slots | None = None):
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "holdfast_reconcile_seconds",
            "Duration of a reconcile pass.",
            registry=self.registry,
            # One request to an apiserver that does not answer takes half a minute.
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )
        self.reconcile_errors = Counter(
            "holdfast_reconcile_errors", "Reconcile passes that ended in an error.", registry=self.registry
        )
        self.queue_depth = Gauge(
            "holdfast_queue_depth", "Jobs that wait for a reconcile pass.", registry=self.registry
        )
        self.jobs: dict[str, JobFigures] = {}
        """What is shown of every job, by key; the reconciler keeps it."""
        if slots is not None:
            self.registry.register(_Slots(slots))

    def looked_at(self, key: str, observation: AttemptObservation | None) -> None:
        """A job was looked at; where its rank 0 was not heard yet, how fast it is by now nobody knows. Of one
        that is heard no more the status tells no speed."""
        known = self.jobs.get(key)
        unheard = observation is None or observation.progress is None
        if known is not None and known.unheard != unheard:
            self.jobs[key] = replace(known, unheard=unheard)

    def text(self) -> Iterator[bytes]:
        """What Prometheus reads, in pieces: between two of them others may have their turn."""
        yield generate_latest(self.registry)
        yield from job_series(list(self.jobs.values()), utcnow())


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


class _Slots(Collector):
    def __init__(self, slots: Slots):
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        total = GaugeMetricFamily("holdfast_slots", "Slots of this machine.", labels=("resource",))
        used = GaugeMetricFamily("holdfast_slots_used", "Slots in use.", labels=("resource",))
        for resource, (taken, there) in self._slots().items():
            total.add_metric((resource,), there)
            used.add_metric((resource,), taken)
        yield total
        yield used
