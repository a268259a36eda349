"""Where the real scheduler puts a replica, by the job's capacity: on spot nodes first, on others first, and
on the other kind where the first has no room. The nodes are entries in the API: nothing has to run on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Kubectl
from tests.waiting import wait_until

from holdfast_controller.jobs import AttemptRecord, Capacity, TrainingJob
from holdfast_controller.manifests import attempt_manifests
from holdfast_controller.pod_settings import PodSettings
from holdfast_controller.policy.placement import Provider, marks_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
NAMESPACE = "capacity"
(MARK,) = marks_of(Provider.AKS)  # labelled and tainted
NODES = ("on-demand", "spot")
NOT_READY = "node.kubernetes.io/not-ready"
ROOM = {"cpu": "2", "memory": "4Gi", "pods": "10"}


def node(name: str, *, spot: bool) -> dict[str, Any]:
    labels = {"kubernetes.io/os": "linux"} | (
        {MARK.label: MARK.value} if spot else {}
    )  # the first by its kubelet
    taints = [{"key": MARK.label, "value": MARK.value, "effect": "NoSchedule"}]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints if spot else []},
    }


def beat(kubectl: Kubectl) -> None:
    """Say of the nodes what a kubelet says every few seconds, and wait until they are believed ready."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
    status = {"capacity": ROOM, "allocatable": ROOM, "conditions": [{**ready, "lastTransitionTime": now}]}
    patch = json.dumps({"status": status})
    for name in NODES:
        kubectl.run("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={patch}")

    def believed(name: str) -> bool:
        taints = kubectl.get("node", name)["spec"].get("taints", [])
        return all(taint["key"] != NOT_READY for taint in taints)

    wait_until(lambda: all(map(believed, NODES)), "the nodes to be ready", 120)


@pytest.fixture(scope="module")
def kubectl(control_plane: ControlPlane) -> Iterator[Kubectl]:
    if not control_plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS has no scheduler")
    kubectl = control_plane.kubectl
    kubectl.run("create", "namespace", NAMESPACE)
    kubectl.run("wait", f"-n={NAMESPACE}", "--for=create", "serviceaccount/default", "--timeout=300s")
    try:
        kubectl.apply(node("on-demand", spot=False), node("spot", spot=True))
        yield kubectl
    finally:
        kubectl.run("delete", "node", *NODES, "--ignore-not-found")
        kubectl.run("delete", "namespace", NAMESPACE)


@pytest.fixture
def lands(kubectl: Kubectl) -> Iterator[Callable[[str, TrainingJob], str]]:
    """The node that a replica of the job's first attempt is given."""

    def place(name: str, job: TrainingJob) -> str:
        made = attempt_manifests(job, 1, PodSettings()).attempt_object
        template = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        metadata, spec = {**template["metadata"], "name": name}, {**template["spec"], "volumes": []}
        for container in spec["containers"]:
            del container["volumeMounts"]  # there is no claim: where it lands is all that is asked
        kubectl.apply(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, namespace=NAMESPACE
        )

        def where() -> str:
            return str(kubectl.get("pod", name, f"-n={NAMESPACE}")["spec"].get("nodeName", ""))

        wait_until(lambda: bool(where()), f"a node for {name}", 120)
        return where()

    beat(kubectl)
    yield place
    kubectl.run("delete", "pods", "--all", f"-n={NAMESPACE}", "--force", "--grace-period=0")


def job(capacity: Capacity) -> TrainingJob:
    return TrainingJob.model_validate(
        {
            "metadata": {"name": "a", "namespace": NAMESPACE},
            "spec": {
                "image": "docker.io/library/any:1",
                "command": ["true"],
                "capacity": capacity,
                "storage": {"claim": "runs"},
                "resources": {"cpu": "1"},
            },
        }
    )


@pytest.mark.parametrize(
    ("capacity", "first", "then"),
    [
        (Capacity.SPOT_FIRST, "spot", "on-demand"),
        (Capacity.ON_DEMAND_FIRST, "on-demand", "spot"),
    ],
)
def test_the_kind_that_is_wished_for_is_filled_first(
    lands: Callable[[str, TrainingJob], str], capacity: Capacity, first: str, then: str
) -> None:
    found = [lands(f"replica-{number}", job(capacity)) for number in range(4)]
    assert found == [first, first, then, then]


def test_after_a_standstill_an_attempt_goes_where_its_record_says(
    lands: Callable[[str, TrainingJob], str],
) -> None:
    stuck = job(Capacity.SPOT_FIRST)
    stuck.status.attempts = [AttemptRecord(number=1, capacity=Capacity.ON_DEMAND_FIRST)]
    assert lands("elsewhere", stuck) == "on-demand"
