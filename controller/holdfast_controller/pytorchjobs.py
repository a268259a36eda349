"""Attempts as PyTorchJobs v1 of the Kubeflow Training Operator; all that is PyTorchJob's own is here. Pure.

All replicas are Workers; there is no Master. With a Master the Training Operator (1.8) calls a job
Succeeded when the Master alone has ended well, gives Workers an init container that the restricted Pod
Security Standard refuses (it sets no security context), and numbers the replicas of two types together.
Without one it is Succeeded when every replica is, adds no container, and leaves rendezvous to us: each
replica has a headless Service of its own name, so replica 0 is `<attempt>-worker-0`, and its own number
is in a label that the operator sets. torchrun looks the name up again until it is there.

Nothing is ever restarted in place (`restartPolicy: Never`): all ranks of an attempt start together and
end together, and finished pods stay for their evidence (`cleanPodPolicy: None`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .attempt_kind import AttemptKind, Document, Resource
from .jobs import TrainingJob

REPLICA_TYPE = "Worker"
RESOURCE = Resource("kubeflow.org/v1", "PyTorchJob", "pytorchjobs")


def _documents(job: TrainingJob, metadata: Document, template: Document) -> tuple[Document, ...]:
    pytorch_job = {
        "apiVersion": RESOURCE.api_version,
        "kind": RESOURCE.kind,
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(job.spec.processes_per_replica),
            "runPolicy": {"cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {
                REPLICA_TYPE: {
                    "replicas": job.spec.replicas,
                    "restartPolicy": "Never",
                    "template": template,
                }
            },
        },
    }
    return (pytorch_job,)


_NONE_MADE = ("Created", "Suspended")
"""Conditions that it has before its first pod: of one that its queue has admitted the operator says that it
is suspended until it has made all pods."""


def _has_made(status: Mapping[str, Any]) -> bool:
    return any(one["type"] not in _NONE_MADE for one in status.get("conditions") or ())


PYTORCH_JOB = AttemptKind(
    resource=RESOURCE,
    operator="the Kubeflow Training Operator",
    beside=(),
    index_label="training.kubeflow.org/replica-index",
    container="pytorch",
    port="pytorchjob-port",
    longest_suffix="-worker-9999",
    address=lambda name: f"{name}-{REPLICA_TYPE.lower()}-0",
    suspend=("runPolicy", "suspend"),
    maker=lambda name: (RESOURCE.kind, name),
    refused="FailedCreatePod",
    nameless="FailedCreateService",
    has_made=_has_made,
    documents=_documents,
)
