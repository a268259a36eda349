"""Why a queue does not admit a job, in the words of a real Kueue (0.15), and what would help.

tests/kube/captured_workloads.json has the conditions of the Workloads of nine jobs in a quota of 2 CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_controller.policy.queue_waits import queue_wait

CAPTURED = json.loads(
    (Path(__file__).parents[1] / "kube" / "captured_workloads.json").read_text(encoding="utf-8")
)
ASSIGN = "couldn't assign flavors to pod set worker: "
SAID = {
    "dangling": (
        "ClusterQueue nowhere doesn't exist; make it (k8s/kueue/queues.yaml), or name another queue (queue)"
    ),
    "full": (
        f"{ASSIGN}insufficient unused quota for cpu in flavor any, 500m more needed; wait for the queue's "
        "jobs to end, ask for less (replicas, gpus, resources), or have its quota raised"
    ),
    "no-flavor": (
        "ClusterQueue noflavor is inactive; it admits nothing: `kubectl describe localqueue,clusterqueue` "
        "says why"
    ),
    "no-queue": (
        "LocalQueue missing doesn't exist; make it in the job's namespace (k8s/kueue/queues.yaml), or name "
        "another one (queue)"
    ),
    "not-covered": (
        f"{ASSIGN}resource example.com/fpga unavailable in ClusterQueue; the queue has no quota of "
        "example.com/fpga at all: name another one (queue), or have it added"
    ),
    "not-here": (
        "Workload namespace doesn't match ClusterQueue selector; the queue is not for the job's namespace: "
        "name another one (queue), or change the ClusterQueue's namespaceSelector"
    ),
    "stopped": (
        "ClusterQueue held is inactive; it admits nothing: `kubectl describe localqueue,clusterqueue` "
        "says why"
    ),
    "too-large": (
        f"{ASSIGN}insufficient quota for cpu in flavor any, previously considered podsets requests (0) + "
        "current podset request (3) > maximum capacity (2); the queue can never hold so much cpu: ask for "
        "less (replicas, gpus, resources), or have its quota raised"
    ),
}


@pytest.mark.parametrize("name", sorted(CAPTURED))
def test_a_queued_job_says_why_and_what_would_help(name: str) -> None:
    said = queue_wait("training", CAPTURED[name])
    assert said == (f"waits in its queue 'training': {SAID[name]}" if name in SAID else None)


def test_one_that_has_its_quota_and_is_not_admitted_waits_for_checks() -> None:
    reserved = {"type": "QuotaReserved", "status": "True", "message": "Quota reserved"}
    assert queue_wait("training", [reserved]) == (
        "has its quota in queue 'training' and waits for the queue's admission checks"
    )


def test_one_that_kueue_has_not_looked_at_yet_has_no_reason_of_its_own() -> None:
    assert queue_wait("training", []) is None
