"""A TrainingJob as Kubernetes keeps it, and as we think of it. Pure.

What users wrote by kubectl passes the CRD's schema and then ours: where ours is the narrower, the job is
Invalid, and whoever reads it is told which key is wrong.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from holdfast_controller import columns
from holdfast_controller.cluster import Invalid
from holdfast_controller.jobs import API_VERSION, KIND, Model, Status, TrainingJob

from .connection import Document

JOBS = f"/apis/{API_VERSION}/trainingjobs"
ENGINE = "kubernetes"
FINALIZER = "holdfast.dev/attempts"
"""Keeps a deleted job until nothing of it runs any more."""

_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "annotations",
)


def jobs_path(namespace: str) -> str:
    group, _, version = API_VERSION.partition("/")
    return f"/apis/{group}/{version}/namespaces/{namespace}/trainingjobs"


def job_path(namespace: str, name: str) -> str:
    return f"{jobs_path(namespace)}/{name}"


def path_of(job: TrainingJob) -> str:
    return job_path(job.metadata.namespace, job.metadata.name)


def new_document(job: TrainingJob) -> Document:
    """What creates the job; the server gives it uid, version and times."""
    meta = job.metadata
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "labels": meta.labels,
            "annotations": meta.annotations,
            "finalizers": [FINALIZER],
        },
        "spec": spec_document(job),
    }


def spec_document(job: TrainingJob) -> Document:
    spec = _dump(job.spec)
    spec["config"] = job.spec.model_dump(mode="json")["config"]  # a null in it is the user's own
    whole: Document = _whole(spec)
    return whole


def status_document(status: Status) -> Document:
    """With the columns of `kubectl get`, which `decode` leaves out again."""
    return {**_dump(status), columns.KEY: columns.columns(status, ENGINE)}


def _dump(model: Model) -> Document:
    """Absent, not null, is what is not known: a schema need not allow nulls then."""
    document: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return document


def _whole(value: Any) -> Any:
    """With 30 for 30.0: the server keeps it so, and would take 30.0 for a change (a new generation)."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if exact else value


def decode(document: Document) -> TrainingJob:
    """Raises Invalid with a line for each wrong key."""
    meta = document["metadata"]
    body = {
        "metadata": {name: meta[name] for name in _METADATA if meta.get(name) is not None},
        "spec": document.get("spec") or {},
        "status": {
            name: value for name, value in (document.get("status") or {}).items() if name != columns.KEY
        },
    }
    try:
        return TrainingJob.model_validate(body)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_url=False)
        ]
        raise Invalid(
            f"TrainingJob {meta.get('namespace')}/{meta.get('name')}: {'; '.join(lines)}", lines
        ) from None


def held(document: Document) -> bool:
    """Whether our finalizer keeps it."""
    return FINALIZER in (document["metadata"].get("finalizers") or [])
