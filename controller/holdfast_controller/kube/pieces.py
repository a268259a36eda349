"""What the cluster holds of our attempts, found by job and attempt: a reflector for pods and one for each
kind of attempt object, indexed by the job. Of a kind that is not installed there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.manifests import KINDS, attempt_name, kind_of
from holdfast_controller.metrics import WatchMetrics
from holdfast_controller.pod_template import ATTEMPT_LABEL, JOB_LABEL, MANAGED_BY, UID_LABEL
from holdfast_controller.queueing import Keys

from .connection import Connection, Document
from .pod_state import CONDITIONS
from .reflector import Notice, Reflector, Timing, key_of, uid_of

PODS = "/api/v1/pods"
SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())

Attempt = tuple[str, int]
"""The job's uid and the number."""
_Key = tuple[str, str]
"""Kind; `namespace/name`."""


def pod_path(pod: Document) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


def object_path(attempt_object: Document) -> str:
    meta = attempt_object["metadata"]
    return f"{kind_of(attempt_object).resource.within(meta['namespace'])}/{meta['name']}"


def attempt_of(document: Document) -> Attempt | None:
    """Whose it is, or None where the labels do not say."""
    labels = document["metadata"].get("labels") or {}
    uid, number = labels.get(UID_LABEL), labels.get(ATTEMPT_LABEL, "")
    return (uid, int(number)) if uid and number.isdecimal() and labels.get(JOB_LABEL) else None


def job_of(document: Document, jobs: Reflector) -> Document | None:
    """The job that it belongs to, as `jobs` sees it; None where that is gone, or another of the name."""
    whose, meta = attempt_of(document), document["metadata"]
    if whose is None:
        return None
    job = jobs.get(f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}")
    return job if job is not None and uid_of(job) == whose[0] else None


class Pieces:
    """Attempt objects and pods of all attempts; `run` keeps them true."""

    def __init__(
        self, connection: Connection, *, timing: Timing | None = None, metrics: WatchMetrics | None = None
    ):
        self.pods = Reflector(connection, PODS, selector=SELECTOR, keep=_pod, timing=timing, metrics=metrics)
        self.objects: Mapping[AttemptKind, Reflector] = {
            kind: Reflector(
                connection,
                kind.resource.path,
                selector=SELECTOR,
                keep=partial(_attempt_object, kind),
                timing=timing,
                metrics=metrics,
            )
            for kind in KINDS.values()
        }
        self._pods = _ByJob()
        self._objects = _ByJob()
        self._changed = Keys()
        self.pods.listen(self._pods.take)
        self.pods.listen(self._tell)
        for objects in self.objects.values():
            objects.listen(self._objects.take)
            objects.listen(self._tell)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pods.run())
            for objects in self.objects.values():
                tasks.create_task(objects.run())

    async def synced(self) -> None:
        """Wait until all is known, be it that kinds are not there."""
        await self.pods.synced()
        for objects in self.objects.values():
            await objects.answered()

    @property
    def fault(self) -> str | None:
        """Why something of it may be old, or None; not that a kind is not installed."""
        kept = (self.pods, *(objects for objects in self.objects.values() if not objects.missing))
        return next((one.fault for one in kept if one.fault is not None), None)

    def lacks(self, kind: AttemptKind) -> bool:
        """Whether it is not installed."""
        return self.objects[kind].missing

    def pods_of(self, job: TrainingJob, attempt: int) -> list[Document]:
        whose = (job.metadata.uid, attempt)
        return [pod for pod in self.all_pods_of(job) if attempt_of(pod) == whose]

    def all_pods_of(self, job: TrainingJob) -> list[Document]:
        """Of its own namespace: labels are anybody's to write who may make a pod anywhere."""
        namespace = job.metadata.namespace
        return [pod for pod in self._pods.of(job.metadata.uid) if pod["metadata"]["namespace"] == namespace]

    def has_pods(self, attempt_object: Document) -> bool:
        """Whether one of its pods is there."""
        whose = attempt_of(attempt_object)
        return whose is not None and any(attempt_of(pod) == whose for pod in self._pods.of(whose[0]))

    def object_of(self, job: TrainingJob, attempt: int) -> Document | None:
        """In whatever kind it was made; None also where another job has the name."""
        for kind, objects in self.objects.items():
            found = objects.get(f"{job.metadata.namespace}/{attempt_name(job, attempt, kind)}")
            if found is not None and attempt_of(found) == (job.metadata.uid, attempt) and not objects.missing:
                return found
        return None

    def objects_of(self, job: TrainingJob) -> list[Document]:
        """Of all attempts, in whatever kind."""
        namespace = job.metadata.namespace
        return [
            one for one in self._objects.of(job.metadata.uid) if one["metadata"]["namespace"] == namespace
        ]

    def wrote(self, attempt_object: Document) -> None:
        """Take note of what the server answered to a write of ours."""
        self.objects[kind_of(attempt_object)].wrote(attempt_object)

    async def changes(self) -> AsyncGenerator[str]:
        """Keys of jobs something of which has changed, from now on."""
        async with aclosing(self._changed.follow()) as keys:
            async for key in keys:
                yield key

    def wake(self, key: str) -> None:
        self._changed.publish(key)

    def _tell(self, notice: Notice) -> None:
        meta: dict[str, Any] = notice.object["metadata"]
        name = (meta.get("labels") or {}).get(JOB_LABEL)
        if name:
            self.wake(f"{meta['namespace']}/{name}")


def _pod(document: Document) -> Document:
    """Without what the pod was asked to be, which is three quarters of it: what became of it counts, of its
    conditions those that are read. Items of a list do not say of which kind they are, those of a watch do."""
    node, status = (document.get("spec") or {}).get("nodeName"), document.get("status") or {}
    told = [one for one in status.get("conditions") or () if one["type"] in CONDITIONS]
    kept = {"spec": {"nodeName": node} if node else {}, "status": {**status, "conditions": told}}
    return {**document, "kind": "Pod", **kept}


def _attempt_object(kind: AttemptKind, document: Document) -> Document:
    """Without the pods' template."""
    key = kind.suspend[0]
    spec = document.get("spec") or {}
    return {**document, "kind": kind.resource.kind, "spec": {key: spec[key]} if key in spec else {}}


class _ByJob:
    """Objects by the uid of the job that their labels name."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[_Key, Document]] = {}
        self._uids: dict[_Key, str] = {}

    def of(self, uid: str) -> list[Document]:
        return list(self._objects.get(uid, {}).values())

    def take(self, notice: Notice) -> None:
        key = str(notice.object["kind"]), key_of(notice.object)
        whose = attempt_of(notice.object) if notice.type != "DELETED" else None
        self._forget(key)  # by what its labels said before, which are anybody's to change
        if whose is not None:
            self._uids[key] = whose[0]
            self._objects.setdefault(whose[0], {})[key] = notice.object

    def _forget(self, key: _Key) -> None:
        uid = self._uids.pop(key, None)
        if uid is not None:
            del self._objects[uid][key]
            if not self._objects[uid]:
                del self._objects[uid]
