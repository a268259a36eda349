"""On a cluster without the Training Operator: the controller stays up, says what is missing, and jobs wait.

The operator's definitions come while it runs, and jobs go on by themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Processes
from tests.chart.as_installed import give, install, start
from tests.chart.conftest import Helm
from tests.cluster import training_operator
from tests.cluster.control_plane import start_control_plane
from tests.cluster.errors import MissingTool
from tests.cluster.site import Site
from tests.security.conftest import TEAM, a_job
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_jobs_wait_for_the_operator_and_go_on_when_it_comes(
    short_lived: Site, helm: Helm, processes: Processes, tmp_path: Path
) -> None:
    try:
        kubectl = start_control_plane(short_lived).kubectl
    except MissingTool as error:
        pytest.skip(str(error))
    install(kubectl, helm, "bare", "holdfast-system")
    kubectl.run("create", "namespace", TEAM)
    give(kubectl, TEAM, editor="cluster-admin")
    running = start(
        kubectl,
        helm,
        processes,
        tmp_path,
        release="bare",
        system="holdfast-system",
        namespace=TEAM,
        defaultClaim="runs",
    )

    def asked() -> httpx.Response:
        return httpx.get(f"{running.url}/readyz", trust_env=False, timeout=300)

    try:
        # Ready, or nobody could reach it; and it says what it lacks.
        def still_missing() -> list[str]:
            found: list[str] = asked().json()["missing"]
            return found

        ready = asked()
        assert ready.status_code == 200
        (missing,) = wait_until(still_missing, "the controller to say what is missing")
        assert missing == (
            "the Kubeflow Training Operator: the CRD pytorchjobs.kubeflow.org is not there; jobs are taken "
            "and wait; install the operator (k8s/README.md), nothing has to be restarted"
        )
        made = running.call("editor", "POST", f"/v1/namespaces/{TEAM}/jobs", json=a_job("early"))
        assert made.status_code == 201, made.text

        def status() -> dict[str, Any]:
            found: dict[str, Any] = kubectl.get("tj", "early", f"-n={TEAM}").get("status") or {}
            return found

        def waits() -> bool:
            return "waits for the Kubeflow Training Operator" in status().get("message", "")

        wait_until(waits, "the job to say why it waits")
        assert status()["phase"] == "Queued"
        (admitted,) = [one for one in status()["conditions"] if one["type"] == "Admitted"]
        assert "the cluster has no CRD pytorchjobs.kubeflow.org" in admitted["message"]
        events = running.call("editor", "GET", f"/v1/namespaces/{TEAM}/jobs/early/events").json()["items"]
        assert "StartFailed" not in {event["reason"] for event in events}, "nothing failed: it waits"

        kubectl.apply(training_operator.crd(kubectl))
        words = ("get", "pytorchjob", "early-1", f"-n={TEAM}")
        wait_until(lambda: kubectl.attempt(*words).returncode == 0, "the attempt", 240)
        wait_until(
            lambda: still_missing() == [],
            "nothing to be missing",
        )
        wait_until(lambda: status().get("attempt") == 1, "the job to tell of its attempt")
        assert running.process.poll() is None, json.dumps(running.log.read_text()[-2000:])
    finally:
        processes.end_all()
        running.process.wait()
