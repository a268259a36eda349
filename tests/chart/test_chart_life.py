"""From install to uninstall while jobs are there, by helm 3 and helm 4: no job is lost, nobody gets stuck.

Without nodes no pod runs; replicas come by hand, with the finalizer that the controller gives them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chart.conftest import CHART, SYSTEM, Helm, release
from tests.cluster import training_operator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Kubectl
from tests.cluster.trainingjobs import clear, wait_served
from waiting import wait_until

pytestmark = pytest.mark.cluster

LET_GO = Path(__file__).parents[2] / "k8s" / "let-go.sh"
JOB = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "a", "finalizers": ["holdfast.dev/attempts"]},
    "spec": {"command": ["true"], "storage": {"claim": "runs"}},
}
REPLICA = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "a-1-worker-0",
        "labels": {"app.kubernetes.io/managed-by": "holdfast", "holdfast.dev/job": "a"},
        "finalizers": ["example.org/theirs", "holdfast.dev/evidence"],
    },
    "spec": {"containers": [{"name": "pytorch", "image": "any"}]},
}


@pytest.fixture
def team(each_helm: Helm) -> str:
    """A namespace of its own for each: one that is going may take its time."""
    return f"life-{each_helm.binary.name}"


@pytest.fixture
def kubectl(control_plane: ControlPlane, each_helm: Helm, team: str) -> Iterator[Kubectl]:
    kubectl = control_plane.kubectl
    kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
    training_operator.serve_crd(kubectl)
    yield kubectl
    each_helm.attempt("uninstall", "holdfast", "-n", SYSTEM, "--kubeconfig", str(kubectl.kubeconfig))
    free = '-p={"metadata":{"finalizers":null}}'
    kubectl.attempt("patch", "pod", "a-1-worker-0", f"-n={team}", "--type=merge", free)
    if kubectl.attempt("get", "crd", "trainingjobs.holdfast.dev").returncode == 0:
        clear(kubectl)
    kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
    kubectl.run("delete", "namespace", team, "--ignore-not-found", "--wait=false")


def uid(kubectl: Kubectl, *what: str) -> str:
    found: str = kubectl.get(*what)["metadata"]["uid"]
    return found


def setting(kubectl: Kubectl) -> str:
    return kubectl.run("get", "cm", "holdfast", f"-n={SYSTEM}", "-o", "yaml")


def going(kubectl: Kubectl, *what: str) -> bool:
    """Deleted, and held."""
    done = kubectl.attempt("get", *what, "-o=jsonpath={.metadata.deletionTimestamp}")
    return done.returncode == 0 and bool(done.stdout)


def let_go(kubectl: Kubectl, directory: Path) -> subprocess.CompletedProcess[str]:
    """The script as a user runs it: with the kubectl and the cluster of his shell."""
    (directory / "kubectl").symlink_to(kubectl.binary)
    environment = {**os.environ, "KUBECONFIG": str(kubectl.kubeconfig)}
    environment["PATH"] = f"{directory}{os.pathsep}{environment['PATH']}"
    try:
        return subprocess.run(
            ["sh", str(LET_GO)], capture_output=True, text=True, check=False, env=environment, timeout=300
        )
    finally:
        (directory / "kubectl").unlink()


def test_no_job_is_lost_and_nobody_gets_stuck(
    each_helm: Helm, kubectl: Kubectl, team: str, tmp_path: Path
) -> None:
    helm, there = each_helm, f"-n={team}"
    told = release(helm, kubectl, "install", "holdfast", str(CHART), "--create-namespace")
    assert "MISSING" not in told
    assert "kubectl get tj -w" in told
    assert "port-forward svc/holdfast 8765" in told
    wait_served(kubectl, "trainingjobs.holdfast.dev")
    kubectl.run("create", "namespace", team)
    kubectl.run("wait", there, "--for=create", "serviceaccount/default", "--timeout=300s")
    kubectl.apply(JOB, namespace=team)
    kubectl.run("create", there, "-f", "-", document=json.dumps(REPLICA))
    before = uid(kubectl, "tj", "a", there), uid(kubectl, "pod", "a-1-worker-0", there)

    release(helm, kubectl, "upgrade", "holdfast", str(CHART), "--set=jobs.provider=gke")
    assert "provider: gke" in setting(kubectl)
    release(helm, kubectl, "rollback", "holdfast", "1")
    assert "provider: auto" in setting(kubectl)
    refused = let_go(kubectl, tmp_path)
    assert refused.returncode == 1
    assert "deployment.apps/holdfast is installed and takes finalizers off itself" in refused.stderr

    told = release(helm, kubectl, "uninstall", "holdfast")
    assert "customresourcedefinition" in told.lower(), "what is kept is told"
    assert (uid(kubectl, "tj", "a", there), uid(kubectl, "pod", "a-1-worker-0", there)) == before
    release(helm, kubectl, "install", "holdfast", str(CHART))
    assert uid(kubectl, "tj", "a", there) == before[0]
    release(helm, kubectl, "uninstall", "holdfast")

    # Gone for good: what is deleted now is held by finalizers that nobody takes off, until somebody does.
    kubectl.run("delete", "tj", "a", there, "--wait=false")
    kubectl.run("delete", "pod", "a-1-worker-0", there, "--wait=false", "--grace-period=0", "--force")
    assert going(kubectl, "tj", "a", there)
    assert going(kubectl, "pod", "a-1-worker-0", there)
    done = let_go(kubectl, tmp_path)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: kubectl.attempt("get", "tj", "a", there).returncode == 1, "the job to go")
    left = kubectl.get("pod", "a-1-worker-0", there)["metadata"]["finalizers"]
    assert left == ["example.org/theirs"], "what others hold is theirs"
    assert let_go(kubectl, tmp_path).returncode == 0, "again is no error"
