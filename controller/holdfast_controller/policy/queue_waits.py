"""Why a queue does not admit an attempt, and what would help: what Kueue says of its Workload. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .waits import Remedy, explain

NO_KUEUE = (
    "waits for Kueue, which its queue {queue!r} belongs to: the cluster has no API kueue.x-k8s.io, and "
    "without it no quota would be kept; install Kueue (k8s/kueue) and it goes on by itself, or take queue "
    "out of the job"
)
NO_WORKLOAD = (
    "waits for Kueue, which has taken no notice of it: see that its controller runs, and that its "
    "configuration names kubeflow.org/pytorchjob among integrations.frameworks"
)
NO_QUEUE = (
    "somebody keeps it suspended, though it is in no queue: a Kueue that takes jobs without one does "
    "(manageJobsWithoutQueueName); name its queue (queue), or have it leave such jobs alone"
)
NO_PRIORITY = "; or there is no WorkloadPriorityClass {priority!r}, which its priority names (k8s/kueue)"
QUEUEING = (
    Remedy(
        r"insufficient quota for ([\w./-]+) in flavor ([\w.-]+), .*(?:maximum capacity|> )",
        "the queue can never hold so much {1}: ask for less (replicas, gpus, resources), or have its quota "
        "raised",
    ),
    Remedy(
        r"insufficient (?:unused )?quota for ([\w./-]+) in flavor ([\w.-]+)",
        "wait for the queue's jobs to end, ask for less (replicas, gpus, resources), or have its quota "
        "raised",
    ),
    Remedy(
        r"resource ([\w./-]+) unavailable in ClusterQueue",
        "the queue has no quota of {1} at all: name another one (queue), or have it added",
    ),
    Remedy(
        r"LocalQueue ([\w.-]+) doesn't exist",
        "make it in the job's namespace (k8s/kueue/queues.yaml), or name another one (queue)",
    ),
    Remedy(
        r"ClusterQueue ([\w.-]+) doesn't exist",
        "make it (k8s/kueue/queues.yaml), or name another queue (queue)",
    ),
    Remedy(
        r"(?:LocalQueue|ClusterQueue) ([\w.-]+) is (?:inactive|stopped)",
        "it admits nothing: `kubectl describe localqueue,clusterqueue` says why",
    ),
    Remedy(
        r"namespace doesn't match",
        "the queue is not for the job's namespace: name another one (queue), or change the ClusterQueue's "
        "namespaceSelector",
    ),
    Remedy(
        r"workload is deactivated",
        "somebody has set spec.active of its Workload to false, or Kueue has, where pods were too often not "
        "ready in time: set it to true, and it queues again",
    ),
)
PUT_ASIDE = "its Workload in queue "


def queue_wait(queue: str, conditions: Sequence[Mapping[str, Any]]) -> str | None:
    """Of an attempt that has not begun; None where its Workload says nothing of that yet."""
    by_type = {condition["type"]: condition for condition in conditions}
    reserved = by_type.get("QuotaReserved", {})
    if reserved.get("status") == "True":
        checks = by_type.get("Admitted", {})
        if checks.get("status") == "True":
            return None
        return f"has its quota in queue {queue!r} and waits for the queue's admission checks"
    said = str(reserved.get("message", ""))
    return f"waits in its queue {queue!r}: {explain(said, QUEUEING)}" if said else None


def put_aside(queue: str, workload: Mapping[str, Any]) -> str:
    """Why a queue that took an admitted attempt back wants no other in its place; empty: it just waits."""
    if (workload.get("spec") or {}).get("active", True):
        return ""
    conditions = (workload.get("status") or {}).get("conditions") or []
    said = next((one["message"] for one in conditions if one["type"] == "Evicted" and one.get("message")), "")
    return f"{PUT_ASIDE}{queue!r} was made inactive{': ' if said else ''}{said.rstrip('. ')}"


def why_put_aside(reason: str) -> str:
    """For a suspended job's message, by the reason of its last attempt: empty, or `, for ...`."""
    return f", for {reason}" if reason.startswith(PUT_ASIDE) else ""


def in_queue(queue: str) -> str:
    """Of one whose Workload has not been read, or may not be; empty: it was made without a queue."""
    if not queue:
        return NO_QUEUE
    return (
        f"waits for room in its queue {queue!r}: wait for its jobs to end, ask for less (replicas, gpus, "
        "resources), or have its quota raised; `kubectl describe workloads` shows its place, and says so "
        "where the queue is stopped, missing, or smaller than the job"
    )
