"""A TrainingJob as Kubernetes keeps it, and as we think of it. Pure.

What users wrote by kubectl passes the CRD's schema and then ours: where ours is the narrower, the job comes
without the keys that cannot be read, and says which they are (`TrainingJob.faults`).
"""

from __future__ import annotations

import copy
import json
from typing import Any

from pydantic import ValidationError

from holdfast_controller import columns
from holdfast_controller.cluster import Invalid
from holdfast_controller.jobs import API_VERSION, KIND, Model, Status, TrainingJob
from holdfast_controller.spec import not_given

from .connection import Document

JOBS = f"/apis/{API_VERSION}/trainingjobs"
ENGINE = "kubernetes"
FINALIZER = "holdfast.dev/attempts"
"""Keeps a deleted job until nothing of it runs any more."""
PASSING = frozenset((FINALIZER, "foregroundDeletion", "orphan"))
"""Finalizers that come off by themselves: ours, and those of Kubernetes' own collector."""

FITTED = ("mig", "minReplicas", "processes")
"""Keys of the spec that must fit others; a job without them fits whatever those are."""

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
    whole: Document = _whole(job.spec.model_dump(mode="json", by_alias=True, exclude=not_given(job.spec)))
    return whole


def changes_to(document: Document, job: TrainingJob) -> list[Document]:
    """What of the job is another thing than `document` says, as a JSON Patch. What means the same stays as
    its user wrote it (gpus: 1, which is "1" to us): written by us, it would be in conflict with their next
    server-side apply.
    """
    known = decode(document)
    changes: list[Document] = []
    for name in ("labels", "annotations"):
        value = getattr(job.metadata, name)
        if value != getattr(known.metadata, name):
            changes.append({"op": "add", "path": f"/metadata/{name}", "value": value})
    before, after = spec_document(known), spec_document(job)
    for key in sorted(before | after):
        told = [json.dumps(one.get(key), sort_keys=True) for one in (before, after)]  # in which 1 is not true
        if told[0] == told[1]:
            continue
        if key in after:
            changes.append({"op": "add", "path": f"/spec/{key}", "value": after[key]})
        elif key in document["spec"]:
            changes.append({"op": "remove", "path": f"/spec/{key}"})
    return changes


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
    """The job; where keys of its spec cannot be read, without those, and with their `faults`.

    So it can still be listed, carried on and deleted. Keys of the status that we do not know were written by
    a newer controller and are left out. Raises Invalid, with a line for each wrong key, for what is beyond
    that; whatever the spec holds is not.
    """
    body = _body(document)
    faults: list[str] = []
    while True:  # how keys fit together is judged only once each can be read by itself
        try:
            job = TrainingJob.model_validate(body)
            return job.with_faults(tuple(faults)).with_keepers(_keepers(document))
        except ValidationError as error:
            found = error.errors(include_url=False)
        # What is within a key of the spec goes or stays whole; copied, a deep one would be too deep.
        readable = {**body, "spec": dict(body["spec"]), "status": copy.deepcopy(body["status"])}
        for fault in found:
            _leave_out(readable, fault["loc"], unknown=fault["type"] == "extra_forbidden")
        readable["spec"].setdefault("command", ["false"])
        if readable == body:
            lines = [_line(fault) for fault in found]
            meta = document["metadata"]
            name = f"{meta.get('namespace')}/{meta.get('name')}"
            raise Invalid(f"TrainingJob {name}: {'; '.join(lines)}", lines)
        faults += [_line(fault) for fault in found if fault["loc"][0] == "spec"]
        body = readable


def _body(document: Document) -> Document:
    """What there is to read; the containers within are the document's."""
    meta, status = document["metadata"], document.get("status") or {}
    return {
        "metadata": {name: meta[name] for name in _METADATA if meta.get(name) is not None},
        "spec": dict(document.get("spec") or {}),
        "status": {name: value for name, value in status.items() if name != columns.KEY},
    }


def _leave_out(body: Document, where: tuple[int | str, ...], *, unknown: bool) -> None:
    """A key of the spec as a whole, those that must fit where some do not; of the status the unknown."""
    if where[0] == "spec":
        for name in where[1:2] or FITTED:
            body["spec"].pop(name, None)
    elif where[0] == "status" and unknown:
        holder: Any = body
        for part in where[:-1]:
            holder = holder[part]
        holder.pop(where[-1], None)


def _line(fault: Any) -> str:
    place = ".".join(str(part) for part in fault["loc"])
    return f"{place}: {fault['msg'].removeprefix('Value error, ')}"


def _keepers(document: Document) -> tuple[str, ...]:
    return tuple(name for name in document["metadata"].get("finalizers") or () if name not in PASSING)


def held(document: Document) -> bool:
    """Whether our finalizer keeps it."""
    return FINALIZER in (document["metadata"].get("finalizers") or [])
