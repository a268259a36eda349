"""Series that alerts ask for, and that promtool is given in alerts.test.yaml, are series that the product
writes: one that is called otherwise tomorrow would let an alert sleep for ever, with all its tests green."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from scripts.monitoring import RULES
from scripts.verify import ROOT

from holdfast_controller.exporter.attribution import Held, Holder, Use
from holdfast_controller.exporter.collector import Snapshot
from holdfast_controller.exporter.readings import DeviceReading
from holdfast_controller.exporter.series import families
from holdfast_controller.job_series import JobFigures
from holdfast_controller.jobs import JobProgress, Phase, Status, TrainingJob
from holdfast_controller.metrics import Metrics, WatchMetrics
from holdfast_trainer.checkpoint import Saved
from holdfast_trainer.telemetry import Telemetry

TESTS = Path(__file__).with_name("alerts.test.yaml")
SCRAPED = {"job", "namespace", "instance", "pod"}
"""Labels that Prometheus gives a target; what a series has of these itself may become exported_*."""
TARGET = {"holdfast_dev_job"}
"""What a trainer is found with (targets.py, and the chart's PodMonitor)."""

Labels = frozenset[str]


def controller() -> str:
    metrics = Metrics()
    WatchMetrics(metrics.registry).follow("pods", lambda: 1.0)
    for every in ("20", "90s"):
        spec = {"command": ["x"], "checkpoint": {"every": every}, "retries": {"disruptions": 5}}
        job = TrainingJob.model_validate({"metadata": {"name": f"every-{every}"}, "spec": spec})
        job.status = Status(phase=Phase.RUNNING, progress=JobProgress(step=9, updated_at=datetime.now(UTC)))
        metrics.jobs[job.key] = JobFigures.of(job)
    return b"".join(metrics.text()).decode()


def trainer() -> str:
    telemetry = Telemetry(attempt=1, world_size=1)
    telemetry.begin(0, 10, 0, None, None)
    telemetry.step(1, 0.1, 0.1)
    telemetry.timed(0.1, {"data": 0.05, "forward": 0.05})
    telemetry.saved(Saved(step=1, seconds=1.0, stall_seconds=0.1, bytes=1, digest=""), 27.0)
    return generate_latest(telemetry.registry).decode()


def exporter() -> Iterable[Metric]:
    holder = Holder("a", "p", "c", "j", "1", "0", "0")
    device = DeviceReading(0, "GPU-0", figures={"utilization": 0.5})
    uses = (Use("GPU-0", "", holder, 1, 1.0, 0.1), Use("GPU-0", "", None, 1, 1.0, 0.1))
    return families(
        Snapshot(
            driver="1", cuda="1", devices=(device,), uses=uses,
            held=(Held("GPU-0", "", "nvidia.com/gpu", holder, 1),), shares={}, sources={"nvml": None},
            failures={}, xids={("GPU-0", 79): 1}, read_seconds=0.1,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def written() -> dict[str, Labels]:
    """Every series of one scrape of each, with its labels."""
    found: dict[str, Labels] = {}
    texts = [text_string_to_metric_families(text) for text in (controller(), trainer())]
    for family in [*(family for text in texts for family in text), *exporter()]:
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | frozenset(sample.labels)
    return found


def test_no_job_s_program_can_tell_figures_of_other_jobs_or_of_gpus() -> None:
    """Whatever a pod of a job serves is scraped, and labels of its own become exported_*, as the controller's
    may: with them it told on dashboards and to alerts how another one's job stands."""
    template = (ROOT / "helm/holdfast/templates/monitors.yaml").read_text()
    (dropped,) = re.findall(
        r'PodMonitor\n.*metricRelabelings:\n +- action: drop\n +sourceLabels: \[__name__\]\n +regex: "(.+)"',
        template,
        re.DOTALL,
    )
    texts = [list(text_string_to_metric_families(text)) for text in (controller(), trainer())]
    of_others, own_series = (
        {name for family in told for name in (family.name, *(sample.name for sample in family.samples))}
        for told in ([*texts[0], *exporter()], texts[1])
    )
    assert {"holdfast_jobs", "holdfast_job_phase", "holdfast_leader", "holdfast_gpu_up"} <= of_others
    assert {name for name in of_others if not re.fullmatch(dropped, name)} == set()
    assert {name for name in own_series if re.fullmatch(dropped, name)} == set()


def test_what_a_job_s_program_serves_is_bounded_and_a_trainer_s_series_are_well_within_it() -> None:
    """One that served a million of them filled the Prometheus of all."""
    template = (ROOT / "helm/holdfast/templates/monitors.yaml").read_text()
    (most,) = re.findall(r"PodMonitor\n.*\n  sampleLimit: (\d+)\n", template, re.DOTALL)
    series = sum(len(family.samples) for family in text_string_to_metric_families(trainer()))
    assert 10 * series < int(most) <= 10_000


def given() -> list[tuple[str, Labels]]:
    """Of alerts.test.yaml, without what a scrape adds."""
    series = [
        one["series"] for test in yaml.safe_load(TESTS.read_text())["tests"] for one in test["input_series"]
    ]
    return [
        (one.partition("{")[0], frozenset(re.findall(r"[{,](\w+)=", one)))
        for one in series
    ]  # fmt: skip


def own(labels: Labels) -> Labels:
    exported = {label for label in labels if label.startswith("exported_")}
    kept = {label.removeprefix("exported_") for label in exported}
    scraped = SCRAPED if exported else SCRAPED - {"job", "namespace", "pod"}
    return frozenset(labels - exported - scraped - TARGET | kept)


def test_what_promtool_is_given_is_what_is_written(written: dict[str, Labels]) -> None:
    for name, labels in given():
        assert name in written, f"{name} is written by nobody"
        of_a_trainer = "holdfast_dev_job" in labels
        told = own(labels) - ({"namespace"} if of_a_trainer else set())
        surplus = told - written[name]
        assert not surplus, f"{name} has no label {sorted(surplus)}"


def test_what_alerts_ask_for_is_what_is_written(written: dict[str, Labels]) -> None:
    for group in yaml.safe_load((ROOT / RULES).read_text())["groups"]:
        for rule in group["rules"]:
            names = set(re.findall(r"\bholdfast_\w+", rule["expr"])) - TARGET
            assert names, rule["alert"]
            assert names <= written.keys(), f"{rule['alert']} asks for {sorted(names - written.keys())}"
            for name, matchers in re.findall(r"\b(holdfast_\w+)\{([^}]*)\}", rule["expr"]):
                asked = set(re.findall(r"(\w+)\s*[!=]", matchers))
                assert asked <= written[name], (
                    f"{rule['alert']}: {name} has no {sorted(asked - written[name])}"
                )
