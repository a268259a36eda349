"""The alerts, each with what it waits for and what it says; docs/runbooks.md says what to do.

A job is named by the labels `namespace` and `job` on every alert that is about one, whatever Prometheus
does with labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from .gpus import HELD, IDLE_BELOW, busy_over
from .job import DATA_WAIT_GOAL
from .queries import counted, jobs, own, step_share, trainers

RUNBOOKS = "docs/runbooks.md"
LOW_BELOW = 0.5
"""A GPU that is held and busy for less of an hour than this is worth a look; the goal is 85 %."""
LATE = 2
"""Intervals between saves after which a checkpoint is late."""
LONGEST_AUTO_SECONDS = 900
"""`checkpoint.every: auto` saves at least this often (checkpoint/cadence.py of the trainer)."""
STALE_SECONDS = 180
"""The apiserver sends a bookmark about once a minute where nothing else happens."""
OFTEN = 6
"""Disruptions of one job in an hour."""


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    lasts: str
    """How long it must be true."""
    severity: str
    """info, warning or critical"""
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


JOB = "{{ $labels.namespace }}/{{ $labels.job }}"
GPU = "GPU {{ $labels.uuid }}"
SHARE = "{{ $value | humanizePercentage }}"
SECONDS = "{{ $value | humanizeDuration }}"


def _running(expression: str) -> str:
    return f'({expression}) and on (namespace, job) {jobs("""holdfast_job_phase{phase="Running"}""")}'


def _of_jobs() -> list[Alert]:
    at_rest = _running(f"{jobs('changes(holdfast_job_step[5m])')} == 0")
    phases = 'holdfast_job_phase{phase=~"Starting|Recovering"}'
    between = f"({jobs(phases)} and on (namespace, job) {jobs(f'{phases} offset 5m')})"
    disruptions, allowed = jobs("holdfast_job_disruptions_total"), jobs("holdfast_job_disruptions_allowed")
    # A job that allows none from the start has spent nothing yet: nobody needs to be told of it.
    spent = f"({disruptions} > 0) >= on (namespace, job) {allowed}"
    ended = jobs('holdfast_job_phase{phase=~"Succeeded|Failed"}')
    return [
        Alert(
            "HoldfastJobMakesNoProgress",
            f"({at_rest}) or on (namespace, job) {between}",
            "15m",  # five more have passed where the expression is true
            "warning",
            f"{JOB} makes no progress",
            f"No step of {JOB} has ended for 20 minutes, and it does not wait for room.",
        ),
        Alert(
            "HoldfastDataBound",
            f"{trainers(step_share('data', '', '10m'))} > {DATA_WAIT_GOAL}",
            "15m",
            "warning",
            f"{JOB} waits for data",
            f"{JOB} spends {SHARE} of its steps' time waiting for data.",
        ),
        Alert(
            "HoldfastDisruptionsAboveBudget",
            f"({spent}) unless on (namespace, job) {ended}",
            "0m",
            "warning",
            f"{JOB} has no restarts left for disruptions",
            f"{JOB} was disrupted {{{{ $value }}}} times and allows no more: the next disruption ends it.",
        ),
        Alert(
            "HoldfastDisruptedOften",
            f"{counted('holdfast_job_disruptions_total', '1h')} > {OFTEN}",
            "0m",
            "warning",
            f"{JOB} is disrupted often",
            f"{JOB} lost replicas to the platform {{{{ $value | humanize }}}} times in an hour.",
        ),
    ]


def _of_saves() -> list[Alert]:
    unsaved = _running(
        f"{jobs('holdfast_job_step')} - on (namespace, job) {jobs('holdfast_job_durable_step')}"
    )
    # The mean of all steps: where one takes an hour, most ten minutes have none.
    a_step = "holdfast_step_seconds_sum / holdfast_step_seconds_count"
    at_risk = trainers(f"(holdfast_step - holdfast_durable_step) * ({a_step})")
    steps, seconds = (jobs(f"holdfast_job_checkpoint_every_{unit}") for unit in ("steps", "seconds"))
    auto = f"({steps} or on (namespace, job) {seconds})"
    late = (
        f"(({unsaved}) > on (namespace, job) {LATE} * {steps})",
        f"({at_risk} > on (namespace, job) {LATE} * {seconds})",
        f"(({at_risk} > {LATE * LONGEST_AUTO_SECONDS}) unless on (namespace, job) {auto})",
    )
    return [
        Alert(
            "HoldfastCheckpointLate",
            " or on (namespace, job) ".join(late),
            "5m",
            "critical",
            f"{JOB} does not save",
            f"{JOB} has done more work since its newest durable checkpoint than {LATE} of its intervals: "
            "{{ $value | humanize }} (steps, where checkpoint.every counts steps; else seconds).",
        ),
        Alert(
            "HoldfastSaveDoesNotFit",
            trainers("(holdfast_checkpoint_newest_seconds > holdfast_notice_seconds)"),
            "1m",
            "warning",
            f"A save of {JOB} takes longer than a notice leaves",
            f"The newest save of {JOB} took {SECONDS}, more than a notice leaves for one: "
            "a stop on notice would lose the steps since the newest checkpoint.",
        ),
    ]


def _of_gpus() -> list[Alert]:
    pods = own("holdfast_gpu_shares_allocated", "namespace", "pod")
    users = own('holdfast_gpu_processes{attempt!=""}', "namespace", "job")
    # On one machine nobody gives out shares: a GPU is held by the job whose processes are on it.
    held = (
        f"max by (uuid, namespace, pod) ({pods}) > 0 or on (uuid) max by (uuid, namespace, job) ({users}) > 0"
    )
    holder = "{{ $labels.namespace }}/{{ with $labels.pod }}{{ . }}{{ else }}{{ $labels.job }}{{ end }}"
    hour, quarter = busy_over("1h"), busy_over("15m")
    device = "max by (uuid, gpu, instance)"
    sources = "max by (source, instance) (holdfast_gpu_exporter_up) == 0"
    return [
        Alert(
            "HoldfastGpuIdle",
            f"({held}) and on (uuid) ({quarter} < {IDLE_BELOW})",
            "15m",
            "warning",
            f"{GPU} is held by {holder} and idle",
            f"{{{{ if $labels.pod }}}}Pod{{{{ else }}}}Job{{{{ end }}}} {holder} holds {GPU}, which did "
            "nothing for half an hour.",
        ),
        Alert(
            "HoldfastGpuUtilizationLow",
            f"(({hour} < {LOW_BELOW}) >= {IDLE_BELOW}) and on (uuid) {HELD}",
            "1h",
            "info",
            f"{GPU} is used little",
            f"{GPU} is held and was busy for {SHARE} of the last hour.",
        ),
        Alert(
            "HoldfastGpuXid",
            f"{device} (round(increase(holdfast_gpu_xid_errors_total[15m]))) > 0",
            "0m",
            "critical",
            f"The driver reports errors of {GPU}",
            f"{{{{ $value | humanize }}}} Xid events of {GPU} (number {{{{ $labels.gpu }}}} at "
            "{{ $labels.instance }}) in 15 minutes.",
        ),
        Alert(
            "HoldfastExporterBlind",
            f"({sources}) or {device} (holdfast_gpu_up) == 0",
            "5m",
            "critical",
            "GPUs at {{ $labels.instance }} cannot be read",
            "The exporter at {{ $labels.instance }} gets no figures of "
            "{{ with $labels.source }}{{ . }}{{ else }}GPU {{ with $labels.uuid }}{{ . }}{{ else }}"
            "number {{ $labels.gpu }}{{ end }}{{ end }}.",
        ),
    ]


def _of_controller() -> list[Alert]:
    leading = "holdfast_watch_age_seconds and on (instance) (holdfast_leader == 1)"
    return [
        Alert(
            "HoldfastControllerStale",
            f"max by (resource) ({leading}) > {STALE_SECONDS}",
            "2m",
            "critical",
            "The controller does not hear of {{ $labels.resource }}",
            f"The controller that leads has heard nothing of {{{{ $labels.resource }}}} for {SECONDS}.",
        ),
        Alert(
            "HoldfastNoLeader",
            "sum(holdfast_leader) == 0",
            "5m",
            "critical",
            "No controller leads",
            "Controllers run and none of them has led for five minutes: jobs train on, and nothing is "
            "started or recovered.",
        ),
        # One that is frozen or gone writes nothing that the others could rest on.
        Alert(
            "HoldfastNoController",
            "absent(holdfast_jobs)",
            "5m",
            "critical",
            "No controller is heard",
            "Prometheus has had no figures of any controller for five minutes: where none works, jobs train "
            "on, and nothing is started or recovered.",
        ),
    ]


def groups() -> dict[str, Any]:
    """A Prometheus rules document."""
    parts = {"jobs": _of_jobs(), "saves": _of_saves(), "gpus": _of_gpus(), "controller": _of_controller()}
    return {
        "groups": [
            {"name": f"holdfast-{name}", "rules": [alert.rule() for alert in alerts]}
            for name, alerts in parts.items()
        ]
    }


def rules() -> str:
    """The text of the rules file: Prometheus reads it as it is, the chart wraps it in a PrometheusRule."""
    return yaml.safe_dump(groups(), sort_keys=False, width=110, allow_unicode=True)
