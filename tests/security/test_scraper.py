"""Prometheus asks with the token that the chart makes for it: it gets all metrics, and nothing else."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
import yaml
from tests.chart.conftest import CHART, ELSEWHERE, KUBERNETES, Helm, helm  # noqa: F401  a fixture
from tests.security.conftest import SYSTEM, TEAM, Live
from waiting import wait_until

pytestmark = pytest.mark.cluster


def monitors(helm: Helm, *arguments: str) -> dict[str, dict[str, Any]]:  # noqa: F811
    """What the release has for the Prometheus operator, by kind."""
    done = helm.attempt(
        *("template", "live", str(CHART), "-n", SYSTEM, "--kube-version", KUBERNETES),
        f"--api-versions={ELSEWHERE[0]}",
        *("--show-only=templates/monitors.yaml", *arguments),
    )
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one}


def sent(monitor: dict[str, Any]) -> dict[str, str]:
    (endpoint,) = monitor["spec"]["endpoints"]
    found: dict[str, str] = endpoint["authorization"]["credentials"]
    return found


def test_what_the_service_monitor_sends_reads_metrics_and_nothing_else(live: Live, helm: Helm) -> None:  # noqa: F811
    made = monitors(helm)
    named = sent(made.pop("ServiceMonitor"))
    assert made.keys() == {"ServiceAccount", "Secret", "ClusterRoleBinding"}
    live.plane.kubectl.apply(*made.values())

    def token() -> str:
        secret = live.plane.kubectl.get("secret", f"-n={SYSTEM}", named["name"])
        return base64.b64decode(secret.get("data", {}).get(named["key"], "")).decode()

    headers = {"Authorization": f"Bearer {wait_until(token, 'Kubernetes to make the token')}"}
    with httpx.Client(base_url=live.url, headers=headers, trust_env=False, timeout=300) as prometheus:
        # What an account may do is known a moment after its binding is there.
        wait_until(lambda: prometheus.get("/metrics").status_code == 200, "its role to count")
        assert "holdfast_jobs{" in prometheus.get("/metrics").text
        assert prometheus.get(f"/v1/namespaces/{TEAM}/jobs").status_code == 403
        assert prometheus.get("/v1/jobs").status_code == 403


def test_a_secret_of_ones_own_takes_its_place(helm: Helm) -> None:  # noqa: F811
    made = monitors(helm, "--set=monitoring.credentials.name=scraper,monitoring.credentials.key=bearer")
    assert made.keys() == {"ServiceMonitor"}
    assert sent(made["ServiceMonitor"]) == {"name": "scraper", "key": "bearer"}
