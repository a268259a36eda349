"""PromQL for our series, whatever a Prometheus does with their labels. Pure.

Series of the controller and the exporter name a job in their own labels `namespace` and `job`, which
Prometheus has names of its own for. With `honorLabels` ours stay; without, ours are called
`exported_namespace` and `exported_job`, or `exported_job` alone where the target has no namespace, as on
one machine. Every query here reads all three. Series of a trainer name no job: the
scrape gives them `namespace` and `holdfast_dev_job` (the PodMonitor; prometheus-targets.json on one machine).
"""

from __future__ import annotations

TRAINER = 'namespace="$namespace",holdfast_dev_job="$job"'
"""Selects the trainer of the dashboard's job."""


def trainer(series: str, labels: str = "") -> str:
    """A series of the trainer of the dashboard's job."""
    return f"{series}{{{TRAINER}{',' if labels else ''}{labels}}}"


def of_job(series: str, labels: str = "", over: str = "{}") -> str:
    """A series of the controller or the exporter, of the dashboard's job; `over` may be `changes({}[1m])`."""
    kept = 'namespace="$namespace",exported_namespace=""'
    selectors = (
        f'{kept},job="$job",exported_job=""',
        f'{kept},exported_job="$job"',
        'exported_namespace="$namespace",exported_job="$job"',
    )
    more = f",{labels}" if labels else ""
    return f"({' or '.join(over.format(f'{series}{{{selector}{more}}}') for selector in selectors)})"


def in_namespace(series: str) -> str:
    """A series of the controller, of all jobs in the dashboard's namespace, with their own `job`."""
    kept = f'{series}{{namespace="$namespace",exported_namespace=""}}'
    renamed = f'{series}{{exported_namespace="$namespace"}}'
    return own(f"({kept} or {renamed})", "job")


def one(series: str, over: str = "{}") -> str:
    """As `of_job`, as one series without labels: a controller that just took over shows the same jobs."""
    return f"max({of_job(series, over=over)})"


def own(expression: str, *labels: str) -> str:
    """`expression` with these labels as we gave them, for queries over all jobs."""
    for label in labels:
        expression = f'label_replace({expression}, "{label}", "$1", "exported_{label}", "(.+)")'
    return expression


def jobs(expression: str) -> str:
    """The highest value by namespace and job, of a series of the controller or the exporter."""
    return f"max by (namespace, job) ({own(expression, 'namespace', 'job')})"


def counted(counter: str, window: str) -> str:
    """By how much a counter of the controller rose in a window, by namespace and job. It is the job's, and
    who leads next goes on with it: what comes as the lead passes on is a rise of neither alone, and where the
    lead comes back, what came meanwhile is one of both."""
    of_all = f"max by (namespace, job, exported_namespace, exported_job) ({counter})"
    return jobs(f"round(increase(({of_all})[{window}:30s]))")


def trainers(expression: str) -> str:
    """The same of a trainer's series: its labels are given the controller's names."""
    named = f'label_replace({expression}, "job", "$1", "holdfast_dev_job", "(.+)")'
    return f"max by (namespace, job) ({named})"


def mean(histogram: str, window: str) -> str:
    """Of a histogram's observations in a window; `histogram` may have a selector."""
    name, _, rest = histogram.partition("{")
    selector = f"{{{rest}" if rest else ""
    return f"rate({name}_sum{selector}[{window}]) / rate({name}_count{selector}[{window}])"


def step_share(phase: str, selector: str, window: str) -> str:
    """The share of the steps' time that a phase took, in a window."""
    spans = f'holdfast_step_span_seconds_sum{{{selector}{"," if selector else ""}phase="{phase}"}}'
    steps = f"holdfast_step_seconds_sum{{{selector}}}" if selector else "holdfast_step_seconds_sum"
    return f"rate({spans}[{window}]) / ignoring(phase) rate({steps}[{window}])"
