"""Dashboards and alerts as the chart installs them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from scripts.monitoring import DASHBOARDS, RULES, text
from tests.chart.conftest import CHART, ELSEWHERE, Helm

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.manifests import KINDS
from holdfast_controller.pod_template import JOB_LABEL

pytestmark = pytest.mark.cluster

RULES_CRD = "--api-versions=monitoring.coreos.com/v1/PrometheusRule"


def of_kind(helm: Helm, kind: str, *arguments: str) -> list[dict[str, Any]]:
    return [one for one in helm.documents(*arguments) if one["kind"] == kind]


def dashboards(helm: Helm, *arguments: str) -> list[dict[str, Any]]:
    found = of_kind(helm, "ConfigMap", *arguments)
    return [one for one in found if "-dashboard-" in one["metadata"]["name"]]


def test_every_dashboard_reaches_grafana_as_it_was_built(helm: Helm) -> None:
    maps = {one["metadata"]["name"]: one for one in dashboards(helm)}
    assert len(maps) == len(DASHBOARDS)
    for name, build in DASHBOARDS.items():
        found = maps[f"holdfast-dashboard-{name}"]
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(found["data"][f"holdfast-{name}.json"]) == json.loads(text(build))
    folder = "--set=dashboards.annotations.grafana_folder=Holdfast"
    assert all(
        one["metadata"]["annotations"] == {"grafana_folder": "Holdfast"} for one in dashboards(helm, folder)
    )
    assert not dashboards(helm, "--set=dashboards.enabled=false")


def test_alerts_come_where_the_prometheus_operator_is(helm: Helm) -> None:
    assert not of_kind(helm, "PrometheusRule"), "zero values need no other chart"
    assert not of_kind(helm, "PrometheusRule", RULES_CRD, "--set=alerts.enabled=false")
    (rule,) = of_kind(helm, "PrometheusRule", RULES_CRD, "--set=alerts.labels.release=prometheus")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load((CHART.parents[1] / RULES).read_text()), "to the letter"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("index", "kept"), [("0", True), ("1", False), ("10", False)])
def test_rank_0_of_a_job_is_scraped_whatever_its_attempts_are_made_as(
    helm: Helm, kind: AttemptKind, index: str, kept: bool
) -> None:
    (monitor,) = of_kind(helm, "PodMonitor", f"--api-versions={ELSEWHERE[1]}")
    pod = {JOB_LABEL: "gpt", kind.index_label: index}
    assert monitor["spec"]["selector"] == {"matchExpressions": [{"key": JOB_LABEL, "operator": "Exists"}]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (rule,) = endpoint["relabelings"]
    assert rule["action"] == "keep"
    # As Prometheus does it: its own name for each label, what is not there is empty, all must match.
    known = {f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', k)}": v for k, v in pod.items()}
    joined = rule["separator"].join(known.get(name, "") for name in rule["sourceLabels"])
    assert bool(re.fullmatch(rule["regex"], joined)) is kept


def test_an_alert_can_be_left_out_and_its_runbook_moved(helm: Helm) -> None:
    (rule,) = of_kind(
        helm,
        "PrometheusRule",
        RULES_CRD,
        "--set=alerts.disabled[0]=HoldfastDataBound",
        "--set=alerts.runbooks=https://wiki.example.org/holdfast",
    )
    rules = [one for group in rule["spec"]["groups"] for one in group["rules"]]
    assert "HoldfastDataBound" not in {one["alert"] for one in rules}
    for one in rules:
        anchor = one["alert"].lower()
        assert one["annotations"]["runbook_url"] == f"https://wiki.example.org/holdfast#{anchor}"
    done = helm.template("--set=alerts.disabled[0]=HoldfastDataBond")
    assert done.returncode
    assert "alerts.disabled: no alert is called HoldfastDataBond; there are: Holdfast" in done.stderr
