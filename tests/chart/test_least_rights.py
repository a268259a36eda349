"""The controller as the chart runs it: its arguments, its environment, its account and no right more.

There are no nodes and no operator here, so pods come by hand: what counts is what the apiserver allows.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from processes import Processes
from tests.chart.conftest import CHART, Helm
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


@dataclass(frozen=True)
class Running:
    """The controller, and how to ask it."""

    kubectl: Kubectl
    url: str
    log: Path
    process: subprocess.Popen[str]

    def call(self, account: str, method: str, path: str, **options: Any) -> httpx.Response:
        token = self.kubectl.run("create", "token", account, f"-n={TEAM}").strip()
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=30, **options)

    def refusals(self) -> list[str]:
        """What the apiserver did not let it do, or what it said of its settings."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "forbidden" in line.lower() or "is no setting" in line]


@pytest.fixture
def running(
    control_plane: ControlPlane, helm: Helm, processes: Processes, tmp_path: Path
) -> Iterator[Running]:
    kubectl = control_plane.kubectl
    kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
    kubectl.apply(*training_operator.crds(kubectl))
    at = ("-n", SYSTEM, "--kubeconfig", str(kubectl.kubeconfig))
    done = helm.attempt("install", "rights", str(CHART), "--create-namespace", *at)
    assert done.returncode == 0, done.stderr
    kubectl.run("wait", "--for=condition=Established", "crd/trainingjobs.holdfast.dev", "--timeout=30s")
    kubectl.run("create", "namespace", TEAM)
    for role in ("view", "edit"):
        kubectl.run("create", "serviceaccount", role, f"-n={TEAM}")
        kubectl.run(
            *("create", "rolebinding", role, f"-n={TEAM}"),
            *(f"--clusterrole={role}", f"--serviceaccount={TEAM}:{role}"),
        )
    kubectl.run("create", "serviceaccount", "stranger", f"-n={TEAM}")
    started: list[Running] = []
    try:
        started.append(start(kubectl, helm, processes, tmp_path))
        yield started[0]
    finally:
        processes.end_all()
        for one in started:
            one.process.wait()
        clear(kubectl)
        helm.attempt("uninstall", "rights", *at)
        kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
        kubectl.run("delete", "namespace", SYSTEM, TEAM, "--ignore-not-found", "--wait=false")


def start(kubectl: Kubectl, helm: Helm, processes: Processes, directory: Path) -> Running:
    """The command of the Deployment's container, on this machine."""
    documents = [
        one
        for one in yaml.safe_load_all(
            helm.render().replace("namespace: holdfast-system", f"namespace: {SYSTEM}")
        )
        if one
    ]
    by_kind = {one["kind"]: one for one in documents}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    settings = directory / "jobs.yaml"
    settings.write_text(by_kind["ConfigMap"]["data"]["jobs.yaml"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert env["HOLDFAST_POD_SETTINGS"] == "/etc/holdfast/jobs.yaml"
    env |= {
        "HOLDFAST_LISTEN_HOST": "127.0.0.1",
        "HOLDFAST_LISTEN_PORT": str(port),
        "HOLDFAST_POD_SETTINGS": str(settings),
        "HOLDFAST_LEADER_ELECTION": "rights-holdfast",  # the name that the release's Role allows
        "POD_NAME": "controller-0",
        "POD_NAMESPACE": SYSTEM,
        "KUBECONFIG": str(as_account(kubectl, "rights-holdfast", directory)),
    }
    log = directory / "controller.log"
    with open(log, "w") as output:
        process = processes.start(
            [sys.executable, "-m", "holdfast_controller", *container["args"]],
            env=env,
            stdout=output,
            stderr=output,
        )
    running = Running(kubectl, f"http://127.0.0.1:{port}", log, process)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return httpx.get(f"{running.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(ready, f"the controller to be ready:\n{log.read_text()[-2000:]}", seconds=60)
    return running


def as_account(kubectl: Kubectl, account: str, directory: Path) -> Path:
    """A kubeconfig of that service account and of nobody else."""
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    token = kubectl.run("create", "token", account, f"-n={SYSTEM}").strip()
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = directory / "account.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


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
