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
from tests.cluster import trainer, training_operator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Kubectl
from tests.cluster.rights import wait_until_allowed
from tests.cluster.trainingjobs import clear, remove_namespaces
from waiting import wait_until

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

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
NODE: dict[str, Any] = {"apiVersion": "v1", "kind": "Node"}


@pytest.fixture
def running(
    control_plane: ControlPlane,
    helm: Helm,
    processes: Processes,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Running]:
    """With values of the chart's `jobs` where a test gives some."""
    jobs: dict[str, Any] = getattr(request, "param", {})
    kubectl = control_plane.kubectl
    kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
    training_operator.serve_crd(kubectl)
    trainer.serve_crds(kubectl)
    values = [f"--set-json=jobs.{key}={json.dumps(value)}" for key, value in jobs.items()]
    install(kubectl, helm, "rights", SYSTEM, *values)
    kubectl.run("create", "namespace", TEAM)
    give(kubectl, TEAM, view="view", edit="edit", stranger=None)
    started: list[Running] = []
    try:
        started.append(
            start(kubectl, helm, processes, tmp_path, release="rights", system=SYSTEM, namespace=TEAM, **jobs)
        )
        # The cluster's own roles take the chart's rules in within a moment.
        wait_until_allowed(kubectl, TEAM, "view", "list")
        wait_until_allowed(kubectl, TEAM, "edit", "create")
        yield started[0]
    finally:
        processes.end_all()
        for one in started:
            one.process.wait()
        clear(kubectl)
        helm.attempt("uninstall", "rights", "-n", SYSTEM, "--kubeconfig", str(kubectl.kubeconfig))
        remove_namespaces(kubectl, SYSTEM, TEAM)
        kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")


def there(kubectl: Kubectl, kind: str) -> list[str]:
    items = kubectl.get(kind, f"-n={TEAM}", "-l=app.kubernetes.io/managed-by=holdfast")["items"]
    return [item["metadata"]["name"] for item in items]


def template_of(kubectl: Kubectl, attempt: int, kind: AttemptKind) -> dict[str, Any]:
    """Of its pods."""
    if kind is TRAIN_JOB:
        runtime = kubectl.get("trainingruntime", f"-n={TEAM}", f"a-{attempt}")
        (pods,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        return dict(pods["template"]["spec"]["template"])
    job = kubectl.get("pytorchjob", f"-n={TEAM}", f"a-{attempt}")
    return dict(job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])


def start_replica(
    kubectl: Kubectl, attempt: int, node: str | None = None, kind: AttemptKind = PYTORCH_JOB
) -> None:
    """The pod of an attempt of one replica, as the operator would make it and a kubelet run it."""
    template, name = template_of(kubectl, attempt, kind), f"a-{attempt}-worker-0"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {
            **template["metadata"],
            "name": name,
            "namespace": TEAM,
            "labels": {**template["metadata"]["labels"], kind.index_label: "0"},
        },
        "spec": {**template["spec"], "nodeName": node},
    }
    kubectl.run("create", "-f", "-", document=json.dumps(pod))
    status = {"phase": "Running", "conditions": [], "containerStatuses": []}
    where = (f"-n={TEAM}", "pod", name, "--subresource=status", "--type=merge")
    kubectl.run("patch", *where, f"-p={json.dumps({'status': status})}")


def drilled(running: Running, kind: str) -> bool:
    drill = f"/v1/namespaces/{TEAM}/jobs/a/drill"
    return running.call("edit", "POST", drill, json={"kind": kind}).status_code < 300


@pytest.mark.parametrize(
    ("running", "kind"),
    [({}, PYTORCH_JOB), ({"kind": "TrainJob"}, TRAIN_JOB)],
    ids=["PyTorchJob", "TrainJob"],
    indirect=["running"],
)
def test_a_job_lives_and_dies_with_the_rights_of_the_chart(running: Running, kind: AttemptKind) -> None:
    kubectl = running.kubectl
    objects = [one.plural for one in (kind.resource, *kind.beside)]
    jobs = f"/v1/namespaces/{TEAM}/jobs"
    assert httpx.get(f"{running.url}{jobs}", trust_env=False, timeout=300).status_code == 401
    assert running.call("stranger", "GET", jobs).status_code == 403
    assert running.call("view", "GET", jobs).status_code == 200
    assert running.call("view", "POST", jobs, json=JOB).status_code == 403

    # Submitted twice over REST, it is one job; the controller opens its first attempt.
    key = {"Idempotency-Key": "once"}
    made = [running.call("edit", "POST", jobs, json=JOB, headers=key) for _ in range(2)]
    assert [one.status_code for one in made] == [201, 201], made[-1].text
    assert made[0].json()["metadata"]["uid"] == made[1].json()["metadata"]["uid"]
    wait_until(lambda: there(kubectl, kind.resource.plural) == ["a-1"], "the first attempt")
    assert there(kubectl, "configmaps") == ["a-1"]

    # Replicas appear, are drilled in every way that a cluster has, and end: each costs an attempt.
    for attempt, drill in enumerate(("notice", "evict", "kill"), 1):
        start_replica(kubectl, attempt, kind=kind)
        wait_until(lambda drill=drill: drilled(running, drill), f"the drill {drill} to be accepted")
        following = f"a-{attempt + 1}"
        wait_until(lambda following=following: following in there(kubectl, kind.resource.plural), following)
    ended = kubectl.get("trainingjob", f"-n={TEAM}", "a")["status"]["attempts"][:3]
    assert [one["verdict"] for one in ended] == ["Disrupted"] * 3, ended
    assert running.call("view", "GET", f"{jobs}/a/events").status_code == 200

    refused = running.call("edit", "POST", f"{jobs}/a/drill", json={"kind": "node", "replica": 0})
    assert refused.status_code == 422
    assert "has not allowed that (jobs.drillNodes in the chart's values)" in refused.text
    for drill in ("freeze", "oom"):
        refused = running.call("edit", "POST", f"{jobs}/a/drill", json={"kind": drill, "replica": 0})
        assert refused.status_code == 422
        assert "has not allowed that (jobs.execInPods in the chart's values)" in refused.text

    # Deleted, it leaves nothing, and at no time was anything asked that the chart does not allow.
    assert running.call("edit", "DELETE", f"{jobs}/a").status_code < 300
    wait_until(
        lambda: not any(there(kubectl, one) for one in (*objects, "configmaps", "pods")),
        "nothing of the job to be left",
    )
    wait_until(lambda: not kubectl.get("trainingjobs", f"-n={TEAM}")["items"], "the job to be gone")
    assert running.refusals() == []


@pytest.mark.parametrize("running", [{"drillNodes": True}], indirect=True)
def test_a_node_is_drilled_where_the_values_allow_it(running: Running) -> None:
    kubectl, node = running.kubectl, "drilled"
    kubectl.run("create", "-f", "-", document=json.dumps(NODE | {"metadata": {"name": node}}))
    try:
        document = JOB | {"metadata": {"name": "a", "namespace": TEAM}}
        assert running.call("edit", "POST", f"/v1/namespaces/{TEAM}/jobs", json=document).status_code == 201
        wait_until(lambda: there(kubectl, "pytorchjobs") == ["a-1"], "the first attempt")
        start_replica(kubectl, 1, node)
        wait_until(lambda: drilled(running, "node"), "the drill to be accepted")
        assert kubectl.get("node", node)["spec"]["unschedulable"]
        assert (
            kubectl.get("node", node)["metadata"]["annotations"]["holdfast.dev/cordoned-for"] == f"{TEAM}/a"
        )
        kubectl.run(
            "delete", "pod", f"-n={TEAM}", "a-1-worker-0", "--grace-period=0", "--force", "--wait=false"
        )
        wait_until(lambda: "a-2" in there(kubectl, "pytorchjobs"), "the next attempt")
        first = kubectl.get("trainingjob", f"-n={TEAM}", "a")["status"]["attempts"][0]
        assert first["reason"] == "replica 0: Drilled: its node drained on request"
        assert running.refusals() == []
    finally:
        kubectl.run("delete", "node", node)
