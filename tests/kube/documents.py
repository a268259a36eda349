"""Documents of an attempt as Kubernetes gives them, with what a test is about and nothing else."""

from __future__ import annotations

import copy
from typing import Any

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.jobs import TrainingJob, Verdict
from holdfast_controller.kube.observation import attempt_observation
from holdfast_controller.pod_template import attempt_labels
from holdfast_controller.policy.classify import classify
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_trainer.contract import Termination

NOON = "2026-05-01T12:00:00Z"
NOON_SECONDS = 1777636800.0


def job(**changes: Any) -> dict[str, Any]:
    """The attempt's PyTorchJob; `annotations`, `suspend`, `going`, `queue`."""
    queue = changes.get("queue", "team-queue")
    document: dict[str, Any] = {
        "kind": "PyTorchJob",
        "metadata": {
            "name": "gpt-1",
            "namespace": "team",
            "labels": {"kueue.x-k8s.io/queue-name": queue} if queue else {},
            "annotations": changes.get("annotations", {}),
        },
        "spec": {"runPolicy": {"suspend": changes.get("suspend", False)}},
    }
    if changes.get("going"):
        document["metadata"]["deletionTimestamp"] = NOON
    return document


def pod(index: int = 0, phase: str = "Running", state: dict[str, Any] | None = None, **changes: Any) -> Any:
    """One as a kubelet reports it; `deleted` is (deletionTimestamp, grace)."""
    metadata: dict[str, Any] = {
        "name": f"gpt-1-worker-{index}",
        "labels": {"training.kubeflow.org/replica-index": str(index)},
        "annotations": changes.get("annotations", {}),
    }
    if "deleted" in changes:
        metadata["deletionTimestamp"], metadata["deletionGracePeriodSeconds"] = changes["deleted"]
    status: dict[str, Any] = {"phase": phase, "conditions": changes.get("conditions", [])}
    if "reason" in changes:
        status["reason"] = changes["reason"]
        status["message"] = changes.get("message", "The node was low on resource: memory.")
    if state is not None:
        status["containerStatuses"] = [{"name": "pytorch", "state": state}]
    return {"metadata": metadata, "spec": {}, "status": status}


def of_attempt(job: TrainingJob, document: dict[str, Any]) -> dict[str, Any]:
    """As the apiserver has it, of this job's attempt 1."""
    document["metadata"] |= {
        "namespace": job.metadata.namespace,
        "uid": document["metadata"]["name"],
        "resourceVersion": "5",
        "labels": {**document["metadata"].get("labels", {}), **attempt_labels(job, 1)},
    }
    return document


def in_kind(kind: AttemptKind, document: Any) -> Any:
    """The same PyTorchJob, or pod of one, where attempts are made in this kind."""
    changed = copy.deepcopy(document)
    if changed is None or kind is PYTORCH_JOB:
        return changed
    if "kind" in changed:
        spec: dict[str, Any] = {}
        place = spec
        for key in kind.suspend[:-1]:
            place = place.setdefault(key, {})
        place[kind.suspend[-1]] = PYTORCH_JOB.is_suspended(changed)
        return {**changed, "kind": kind.resource.kind, "spec": spec}
    labels = changed["metadata"]["labels"]
    labels[kind.index_label] = labels.pop(PYTORCH_JOB.index_label)
    for status in changed["status"].get("containerStatuses", []):
        status["name"] = kind.container
    return changed


RUNNING = {"running": {"startedAt": NOON}}


def ended(code: int, message: str = "", reason: str = "Error", at: str = "2026-05-01T12:10:00Z") -> Any:
    end = {"exitCode": code, "startedAt": NOON, "finishedAt": at, "reason": reason, "message": message}
    return {"terminated": end}


def disruption(reason: str, message: str = "") -> dict[str, Any]:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


UNREADY = {"type": "Ready", "status": "False"}


def limited(one: Any, memory: str | None) -> Any:
    """As a kubelet of today tells; None: nothing limits its memory."""
    limits = {} if memory is None else {"limits": {"memory": memory}}
    one["status"]["containerStatuses"][0]["resources"] = {**limits, "requests": {"cpu": "1"}}
    return one


SAVED = Termination("interrupted", 812, 812).to_json()
FINISHED = Termination("finished", 900, 900).to_json()


def verdict(attempt: Any, *pods: Any) -> tuple[Verdict, str]:
    """What an attempt that is over came to, and why."""
    seen = attempt_observation(1, len(pods), attempt, pods)
    assert seen.gone
    incident = classify(seen)
    return incident.verdict, incident.reason
