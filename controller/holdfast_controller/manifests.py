"""One attempt of a job as Kubernetes objects, as plain dicts: a ConfigMap, and what the kind takes. Pure.

The pod is pod_template.py's and knows nothing of the kind; what is a kind's own is in its module.

A kind's way to suspend an attempt is Kueue's, but for one thing: an attempt with a queue is made suspended,
so that it waits where no Kueue admits it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .attempt_kind import CONFIG_MAPS, AttemptKind, Document
from .cluster import Invalid
from .jobs import API_VERSION, KIND, TrainingJob
from .json_values import NODE_LIMIT, more_values_than
from .pod_settings import PodSettings
from .pod_template import CONFIG_FILE, attempt_labels, pod_template
from .policy.refusals import refusals
from .policy.words import too_little_memory, unstartable
from .pytorchjobs import PYTORCH_JOB
from .trainjobs import TRAIN_JOB
from .yaml_text import dump

KINDS = {kind.resource.kind: kind for kind in (PYTORCH_JOB, TRAIN_JOB)}
"""All kinds, by the name that the setting `kind` and their documents have."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
CONFIG_LIMIT = 1024 * 1024
"""Kubernetes keeps at most 1 MiB in a ConfigMap."""
_LABEL_LIMIT = 63


@dataclass(frozen=True)
class Manifests:
    """Of one attempt."""

    beside: tuple[Document, ...]
    """What is made first, in this order; the configuration is the first of all."""
    attempt_object: Document
    pods: Document
    """The template of its pods, as it is within one of these."""

    def __iter__(self) -> Iterator[Document]:
        """In the order of creation."""
        return iter((*self.beside, self.attempt_object))


def kind_of(attempt_object: Mapping[str, Any]) -> AttemptKind:
    return KINDS[attempt_object["kind"]]


def attempt_name(job: TrainingJob, attempt: int, kind: AttemptKind = PYTORCH_JOB) -> str:
    """`<job>-<attempt>`, the name of its attempt object; a function of job, attempt and kind alone.

    Its operator adds a suffix, and what comes of it is a label of DNS, at most 63 characters: where that
    would not fit, the end of the job's name gives way to a digest of it. ConfigMaps, which need no such
    limit, have one name whatever the kind.
    """
    room = _LABEL_LIMIT - len(kind.longest_suffix) - len(f"-{attempt}")
    name = job.metadata.name
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: room - 9].rstrip('-')}-{digest}"
    return f"{name}-{attempt}"


def attempt_manifests(job: TrainingJob, attempt: int, settings: PodSettings) -> Manifests:
    """What one attempt needs. Raises Invalid where the cluster's operator does not allow the job."""
    job = job.as_of(attempt)
    faults = [*refusals(job, settings), *unstartable(job.spec), *too_little_memory(job.spec)]
    many = more_values_than(NODE_LIMIT, job.spec.config)
    config = "" if many else dump(job.spec.config)  # of a million it takes ten seconds, at each look
    size = len(config.encode())
    if many or size > CONFIG_LIMIT // 2:
        has = f"more than {NODE_LIMIT} values" if many else f"{size} bytes"
        faults.append(
            f"spec.config has {has} and may have {CONFIG_LIMIT // 2} bytes: "
            "put large tables into files beside the data"
        )
    if faults:
        raise Invalid(f"{job.key} cannot run on this cluster: {'; '.join(faults)}", faults)
    # One an attempt: a job's configuration may change between two, never under one.
    configuration = config_map(job, attempt, {CONFIG_FILE: config})
    kind = KINDS[settings.kind]
    name = attempt_name(job, attempt, kind)
    template = pod_template(
        job,
        attempt,
        settings,
        container=kind.container,
        port=kind.port,
        # Alone it need not wait until its own name is known.
        master="127.0.0.1" if job.spec.replicas == 1 else kind.address(name),
        index_label=kind.index_label,
        config_map=configuration["metadata"]["name"],
    )
    metadata = owned_metadata(job, attempt, name)
    metadata["labels"] = template["metadata"]["labels"].copy()  # for the operator's objects, and Kueue's
    if job.spec.queue:
        metadata["labels"][QUEUE_LABEL] = job.spec.queue
        if job.spec.priority:
            metadata["labels"][PRIORITY_LABEL] = job.spec.priority
    *beside, attempt_object = kind.documents(job, metadata, template)
    if job.spec.queue:
        _suspend(attempt_object, kind)
    return Manifests((configuration, *beside), attempt_object, template)


def _suspend(attempt_object: Document, kind: AttemptKind) -> None:
    *outer, last = ("spec", *kind.suspend)
    place = attempt_object
    for key in outer:
        place = place.setdefault(key, {})
    place[last] = True


def config_map(job: TrainingJob, attempt: int, data: dict[str, str], *, name: str = "") -> Document:
    """Of an attempt, named as it is or as said: what is in it never changes, and it goes with the job."""
    return {
        "apiVersion": CONFIG_MAPS.api_version,
        "kind": CONFIG_MAPS.kind,
        "metadata": owned_metadata(job, attempt, name or attempt_name(job, attempt)),
        "immutable": True,
        "data": data,
    }


def owned_metadata(job: TrainingJob, attempt: int, name: str) -> Document:
    """Of an object that belongs to an attempt, and goes with its job."""
    meta = job.metadata
    return {
        "name": name,
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
