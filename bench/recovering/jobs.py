"""The same training as a TrainingJob, as a plain PyTorchJob, as a JobSet, and as a process alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.claims import USER

SCRIPT = Path(__file__).with_name("train.py")
COMMAND = ["python", f"/holdfast/data/{SCRIPT.name}"]
GRACE = 15
"""Seconds between the notice to a pod and its end."""
TOLD = "told.jsonl"
PORT = "23456"
RANKS = 2
ENOUGH = 1000
"""Restarts are not what a peer should run out of."""
REQUESTS = {"cpu": "100m", "memory": "1Gi"}

Document = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is trained."""

    steps: int
    every: int
    """Steps between two checkpoints."""
    pace: float
    """Seconds that a step rests."""

    def environment(self, way: str) -> dict[str, str]:
        return {
            "WAY": way,
            "STEPS": str(self.steps),
            "EVERY": str(self.every),
            "PACE": str(self.pace),
            "TOLD": f"/holdfast/run/{TOLD}",
            "OMP_NUM_THREADS": "1",
        }


def training_job(name: str, work: Work) -> Document:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "command": COMMAND,
            "replicas": RANKS,
            "resources": REQUESTS,
            "checkpoint": {"every": str(work.every), "keep": 2},
            "storage": {"claim": "runs", "data": "data"},
            "env": work.environment("holdfast"),
            "graceSeconds": GRACE,
        },
    }


def pytorch_job(name: str, work: Work, image: str) -> Document:
    """As the operator's own examples have it."""

    def replica() -> Document:
        return {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": _pod(name, work, image)}}

    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "runPolicy": {"backoffLimit": ENOUGH, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {"Master": replica(), "Worker": replica()},
        },
    }


def job_set(name: str, work: Work, image: str) -> Document:
    """As JobSet's documentation has it for training that is preempted.

    One Job for the gang, which the first pod that fails ends (backoffLimit 0), for its peers cannot go on. A
    pod that the platform took (DisruptionTarget) ends it by its podFailurePolicy: the JobSet knows that
    reason, and such restarts it does not count. Those for any other it does, up to maxRestarts: a pod killed
    outright, and an evicted one's peer where its crash is seen first.
    """
    ranks = {"MASTER_ADDR": f"{name}-workers-0-0.{name}", "MASTER_PORT": PORT, "WORLD_SIZE": str(RANKS)}
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    pod = _pod(name, work, image) | {"restartPolicy": "Never"}
    pod["containers"][0]["env"] += [*_variables(ranks), {"name": "RANK", "valueFrom": {"fieldRef": index}}]
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    job = {
        "completionMode": "Indexed",
        "parallelism": RANKS,
        "completions": RANKS,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [disrupted]},
        "template": {"spec": pod},
    }
    free = {"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {
                "maxRestarts": ENOUGH,
                "restartStrategy": "Recreate",
                "rules": [
                    {"name": "disruption", **free},
                    {"name": "failure", "action": "RestartJobSet"},
                ],
            },
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def lone_pod(name: str, work: Work, image: str) -> Document:
    """One process alone, which nobody disturbs."""
    spec = _pod(name, work, image) | {"restartPolicy": "Never"}
    gang = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    spec["containers"][0]["env"] += _variables(gang)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _pod(name: str, work: Work, image: str) -> Document:
    return {
        "terminationGracePeriodSeconds": GRACE,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "pytorch",
                "image": image,
                "command": COMMAND,
                "env": _variables(work.environment("usual")),
                "resources": {"requests": REQUESTS},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [
                    {"name": "data", "mountPath": "/holdfast/data", "readOnly": True},
                    {"name": "runs", "mountPath": "/holdfast/run", "subPath": name},
                ],
            }
        ],
        "volumes": [
            {"name": each, "persistentVolumeClaim": {"claimName": each}} for each in ("data", "runs")
        ],
    }


def _variables(values: Mapping[str, str]) -> list[Document]:
    return [{"name": name, "value": value} for name, value in values.items()]
