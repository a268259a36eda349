"""The dashboard of the controller: its work, how fast it does it, and whether it hears the cluster."""

from __future__ import annotations

from .panels import WINDOW, Panel, dashboard, figure, graph, table
from .queries import counted, mean, own

TOP = 20
"""Jobs in a table."""


def controller() -> Panel:
    return dashboard(
        "holdfast-controller",
        "Holdfast / Controller",
        "The controller: jobs by phase, its queue and its passes, and how it gets on with the apiserver.",
        [*_now(), *_work(), *_apiserver(), _jobs()],
    )


def _now() -> list[Panel]:
    running = 'max(holdfast_jobs{phase="Running"})'
    latency = f"histogram_quantile(0.99, sum by (le) (rate(holdfast_reconcile_seconds_bucket[{WINDOW}])))"
    return [
        figure("Running", "Jobs that train.", running),
        figure("Queued", "Jobs that wait for room.", 'max(holdfast_jobs{phase="Queued"})'),
        figure("Recovering", "Jobs between two attempts.", 'max(holdfast_jobs{phase="Recovering"})'),
        figure("Wait for a pass", "Jobs that wait for the reconciler.", "max(holdfast_queue_depth)"),
        figure("A pass, 99 %", "99 of 100 passes take at most this long.", latency, unit="s", decimals=3),
        figure(
            "Leads",
            "Controllers that lead; 1 on a cluster, not known on one machine.",
            "sum(holdfast_leader)",
        ),
    ]


def _work() -> list[Panel]:
    rate = f"histogram_quantile({{}}, sum by (le) (rate(holdfast_reconcile_seconds_bucket[{WINDOW}])))"
    return [
        graph("Jobs by phase", "", [("max by (phase) (holdfast_jobs)", "{{phase}}")], stacked=True),
        graph("Queue", "Jobs that wait for a pass.", [("max(holdfast_queue_depth)", "jobs")]),
        graph(
            "A pass",
            "Duration of a reconcile pass.",
            [
                (rate.format(0.5), "half"),
                (rate.format(0.99), "99 %"),
                (f"max({mean('holdfast_reconcile_seconds', WINDOW)})", "mean"),
            ],
            unit="s",
        ),
        graph(
            "Passes",
            "A second; errors are tried again.",
            [
                (f"sum(rate(holdfast_reconcile_seconds_count[{WINDOW}]))", "all"),
                (f"sum(rate(holdfast_reconcile_errors_total[{WINDOW}]))", "errors"),
            ],
            unit="ops",
        ),
        graph(
            "Slots",
            "Of a controller that runs jobs on its own machine.",
            [
                ("max by (resource) (holdfast_slots_used)", "{{resource}} used"),
                ("max by (resource) (holdfast_slots)", "{{resource}} there"),
            ],
        ),
        graph(
            "Disruptions and failures of all jobs",
            "In the last hour.",
            [
                (f"sum({counted('holdfast_job_disruptions_total', '1h')})", "disruptions"),
                (f"sum({counted('holdfast_job_failures_total', '1h')})", "failures"),
            ],
        ),
    ]


def _apiserver() -> list[Panel]:
    return [
        graph(
            "Since the apiserver was heard of",
            "By kind of object. A quiet watch gets a bookmark about once a minute.",
            [("max by (resource) (holdfast_watch_age_seconds)", "{{resource}}")],
            unit="s",
        ),
        graph(
            "Watches that ended",
            "In five minutes, by why; all are opened again.",
            [
                (
                    "sum by (resource, reason) (increase(holdfast_watch_restarts_total[5m]))",
                    "{{resource}} {{reason}}",
                )
            ],
        ),
        graph(
            "Requests to the apiserver",
            "A second, by method and kind of object.",
            [
                (
                    f"sum by (method, resource) (rate(holdfast_apiserver_requests_total[{WINDOW}]))",
                    "{{method}} {{resource}}",
                )
            ],
            unit="reqps",
        ),
    ]


def _jobs() -> Panel:
    def by_job(series: str) -> str:
        return f"max by (namespace, job) ({own(series, 'namespace', 'job')})"

    worst = f"topk({TOP}, {by_job('holdfast_job_lost_steps')})"

    def of_worst(series: str) -> str:
        return f"{by_job(series)} and on (namespace, job) {worst}"

    return table(
        "What interruptions cost",
        f"The {TOP} jobs that lost most.",
        [
            (worst, "lost steps"),
            (of_worst("holdfast_job_disruptions_total"), "disruptions"),
            (of_worst("holdfast_job_failures_total"), "failures"),
            (of_worst("holdfast_job_goodput_ratio"), "goodput"),
            (of_worst("holdfast_job_recovery_seconds"), "newest recovery, s"),
        ],
    )
