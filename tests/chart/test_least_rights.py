"""The controller as the chart runs it: its arguments, its environment, its account and no right more.

There are no nodes and no operator here, so pods come by hand: what counts is what the apiserver allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Processes
from tests.chart.as_installed import Running, give, install, start
from tests.chart.conftest import Helm
from tests.cluster import training_operator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Kubectl
from tests.cluster.trainingjobs import clear
from waiting import wait_until

pytestmark = pytest.mark.cluster

SYSTEM, TEAM = "holdfast-rights", "team-rights"
JOB: dict[str, Any] = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "a"},
    "spec": {
        "image": "docker.io/library/holdfast-trainer:0.1",
        "command": ["true"],
        "storage": {"claim": "runs"},
    },
}


@pytest.fixture
def running(
    control_plane: ControlPlane, helm: Helm, processes: Processes, tmp_path: Path
) -> Iterator[Running]:
    kubectl = control_plane.kubectl
    kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
    kubectl.apply(*training_operator.crds(kubectl))
    install(kubectl, helm, "rights", SYSTEM)
    kubectl.run("create", "namespace", TEAM)
    give(kubectl, TEAM, view="view", edit="edit", stranger=None)
    started: list[Running] = []
    try:
        started.append(
            start(kubectl, helm, processes, tmp_path, release="rights", system=SYSTEM, namespace=TEAM)
        )
        yield started[0]
    finally:
        processes.end_all()
        for one in started:
            one.process.wait()
        clear(kubectl)
        helm.attempt("uninstall", "rights", "-n", SYSTEM, "--kubeconfig", str(kubectl.kubeconfig))
        kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
        kubectl.run("delete", "namespace", SYSTEM, TEAM, "--ignore-not-found", "--wait=false")


def there(kubectl: Kubectl, kind: str) -> list[str]:
    items = kubectl.get(kind, f"-n={TEAM}", "-l=app.kubernetes.io/managed-by=holdfast")["items"]
    return [item["metadata"]["name"] for item in items]


def test_a_job_lives_and_dies_with_the_rights_of_the_chart(running: Running) -> None:
    kubectl = running.kubectl
    jobs = f"/v1/namespaces/{TEAM}/jobs"
    assert httpx.get(f"{running.url}{jobs}").status_code == 401
    assert running.call("stranger", "GET", jobs).status_code == 403
    assert running.call("view", "GET", jobs).status_code == 200
    assert running.call("view", "POST", jobs, json=JOB).status_code == 403

    # Submitted twice over REST, it is one job; the controller opens its first attempt.
    key = {"Idempotency-Key": "once"}
    made = [running.call("edit", "POST", jobs, json=JOB, headers=key) for _ in range(2)]
    assert [one.status_code for one in made] == [201, 201], made[-1].text
    assert made[0].json()["metadata"]["uid"] == made[1].json()["metadata"]["uid"]
    wait_until(lambda: there(kubectl, "pytorchjobs") == ["a-1"], "the first attempt", seconds=60)
    assert there(kubectl, "configmaps") == ["a-1"]

    # A replica appears, is drilled, and ends: all of it is seen and written down.
    (job,) = kubectl.get("pytorchjobs", f"-n={TEAM}")["items"]
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {
            **template["metadata"],
            "name": "a-1-worker-0",
            "namespace": TEAM,
            "labels": {**template["metadata"]["labels"], "training.kubeflow.org/replica-index": "0"},
        },
    }
    kubectl.run("create", "-f", "-", document=json.dumps(pod))
    status = {"phase": "Running", "conditions": [], "containerStatuses": []}
    where = (f"-n={TEAM}", "pod", "a-1-worker-0", "--subresource=status", "--type=merge")
    kubectl.run("patch", *where, f"-p={json.dumps({'status': status})}")

    def drilled() -> bool:
        return running.call("edit", "POST", f"{jobs}/a/drill", json={"kind": "notice"}).status_code < 300

    wait_until(drilled, "the drill to be accepted", seconds=60)
    assert running.call("view", "GET", f"{jobs}/a/events").status_code == 200

    # Deleted, it leaves nothing, and at no time was anything asked that the chart does not allow.
    assert running.call("edit", "DELETE", f"{jobs}/a").status_code < 300
    wait_until(
        lambda: not any(there(kubectl, kind) for kind in ("pytorchjobs", "configmaps", "pods")),
        "nothing of the job to be left",
        seconds=90,
    )
    wait_until(
        lambda: not kubectl.get("trainingjobs", f"-n={TEAM}")["items"], "the job to be gone", seconds=60
    )
    assert running.refusals() == []
