"""One attempt of a job as Kubernetes objects: a PyTorchJob v1 and the ConfigMap it mounts, as plain dicts.

Pure, and all that is PyTorchJob's own is here: the pod is pod_template.py's and knows nothing of it.

All replicas are Workers; there is no Master. With a Master the Training Operator (1.8) calls a job
Succeeded when the Master alone has ended well, gives Workers an init container that the restricted Pod
Security Standard refuses (it sets no security context), and numbers the replicas of two types together.
Without one it is Succeeded when every replica is, adds no container, and leaves rendezvous to us: each
replica has a headless Service of its own name, so replica 0 is `<attempt>-worker-0`, and its own number
is in a label that the operator sets. torchrun looks the name up again until it is there.

Nothing is ever restarted in place (`restartPolicy: Never`): all ranks of an attempt start together and
end together, and finished pods stay for their evidence (`cleanPodPolicy: None`). `runPolicy.suspend` is
Kueue's, but for one thing: an attempt with a queue is made suspended, so that it waits where no Kueue
admits it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import yaml

from .cluster import Invalid
from .jobs import API_VERSION, KIND, TrainingJob
from .pod_settings import PodSettings
from .pod_template import CONFIG_FILE, attempt_labels, pod_template
from .policy.refusals import refusals

PYTORCHJOB_API_VERSION = "kubeflow.org/v1"
PYTORCHJOB_KIND = "PyTorchJob"
CONTAINER = "pytorch"
PORT = ("pytorchjob-port", 23456)
REPLICA_TYPE = "Worker"
INDEX_LABEL = "training.kubeflow.org/replica-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
CONFIG_LIMIT = 1024 * 1024
"""Kubernetes keeps at most 1 MiB in a ConfigMap."""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, five times as fast, where PyYAML has it; both write what safe_load reads."""
_LABEL_LIMIT = 63
_LONGEST_SUFFIX = len("-worker-9999")


@dataclass(frozen=True)
class Manifests:
    """Of one attempt, in the order of creation."""

    config_map: dict[str, Any]
    pytorch_job: dict[str, Any]

    def __iter__(self) -> Any:
        return iter((self.config_map, self.pytorch_job))


def attempt_name(job: TrainingJob, attempt: int) -> str:
    """`<job>-<attempt>`, the name of its PyTorchJob and ConfigMap; a function of job and attempt alone.

    Its Services add `-worker-<n>` and are labels of DNS, at most 63 characters: where that would not fit,
    the end of the job's name gives way to a digest of it.
    """
    room = _LABEL_LIMIT - _LONGEST_SUFFIX - len(f"-{attempt}")
    name = job.metadata.name
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: room - 9].rstrip('-')}-{digest}"
    return f"{name}-{attempt}"


def pod_name(job: TrainingJob, attempt: int, replica: int) -> str:
    """Of the pod and of the Service that the operator makes for a replica."""
    return f"{attempt_name(job, attempt)}-{REPLICA_TYPE.lower()}-{replica}"


def attempt_manifests(job: TrainingJob, attempt: int, settings: PodSettings) -> Manifests:
    """What one attempt needs. Raises Invalid where the cluster's operator does not allow the job."""
    job = job.as_of(attempt)
    faults = list(refusals(job, settings))
    config = yaml.dump(job.spec.config, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    if len(config.encode()) > CONFIG_LIMIT // 2:
        faults.append(
            f"spec.config has {len(config.encode())} bytes and may have {CONFIG_LIMIT // 2}: "
            "put large tables into files beside the data"
        )
    if faults:
        raise Invalid(f"{job.key} cannot run on this cluster: {'; '.join(faults)}", faults)
    # One an attempt: a job's configuration may change between two, never under one.
    return Manifests(config_map(job, attempt, {CONFIG_FILE: config}), _pytorch_job(job, attempt, settings))


def config_map(job: TrainingJob, attempt: int, data: dict[str, str], *, name: str = "") -> dict[str, Any]:
    """Of an attempt, named as it is or as said: what is in it never changes, and it goes with the job."""
    metadata = owned_metadata(job, attempt)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": name or metadata["name"]},
        "immutable": True,
        "data": data,
    }


def _pytorch_job(job: TrainingJob, attempt: int, settings: PodSettings) -> dict[str, Any]:
    spec = job.spec
    metadata = owned_metadata(job, attempt)
    if spec.queue:
        metadata["labels"][QUEUE_LABEL] = spec.queue
        if spec.priority:
            metadata["labels"][PRIORITY_LABEL] = spec.priority
    one = spec.replicas == 1  # alone it need not wait until its own name is known
    template = pod_template(
        job,
        attempt,
        settings,
        container=CONTAINER,
        port=PORT,
        master="127.0.0.1" if one else pod_name(job, attempt, 0),
        index_label=INDEX_LABEL,
        config_map=metadata["name"],
    )
    return {
        "apiVersion": PYTORCHJOB_API_VERSION,
        "kind": PYTORCHJOB_KIND,
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(spec.processes_per_replica),
            "runPolicy": {"cleanPodPolicy": "None", **({"suspend": True} if spec.queue else {})},
            "pytorchReplicaSpecs": {
                REPLICA_TYPE: {
                    "replicas": spec.replicas,
                    "restartPolicy": "Never",
                    "template": template,
                }
            },
        },
    }


def owned_metadata(job: TrainingJob, attempt: int) -> dict[str, Any]:
    """Of an object that belongs to an attempt, and goes with its job."""
    meta = job.metadata
    return {
        "name": attempt_name(job, attempt),
        "namespace": meta.namespace,
        "labels": attempt_labels(job, attempt),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": meta.name,
                "uid": meta.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
