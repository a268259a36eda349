"""What the cluster holds of our attempts, found by job and attempt: two reflectors, indexed by the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.manifests import attempt_name
from holdfast_controller.metrics import WatchMetrics
from holdfast_controller.pod_template import ATTEMPT_LABEL, JOB_LABEL, MANAGED_BY, UID_LABEL
from holdfast_controller.queueing import Keys

from .connection import Connection, Document
from .reflector import Notice, Reflector, Timing, key_of, uid_of

PODS = "/api/v1/pods"
PYTORCH_JOBS = "/apis/kubeflow.org/v1/pytorchjobs"
SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())

Attempt = tuple[str, int]
"""The job's uid and the number."""


def pod_path(pod: Document) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


def pytorch_jobs_path(namespace: str) -> str:
    return f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs"


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
    """PyTorchJobs and pods of all attempts; `run` keeps them true."""

    def __init__(
        self, connection: Connection, *, timing: Timing | None = None, metrics: WatchMetrics | None = None
    ):
        self.pods = Reflector(connection, PODS, selector=SELECTOR, keep=_pod, timing=timing, metrics=metrics)
        self.pytorch_jobs = Reflector(
            connection, PYTORCH_JOBS, selector=SELECTOR, keep=_pytorch_job, timing=timing, metrics=metrics
        )
        self._pods = _ByJob()
        self._jobs = _ByJob()
        self._changed = Keys()
        self.pods.listen(self._pods.take)
        self.pods.listen(self._tell)
        self.pytorch_jobs.listen(self._jobs.take)
        self.pytorch_jobs.listen(self._tell)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pods.run())
            tasks.create_task(self.pytorch_jobs.run())

    async def synced(self) -> None:
        """Wait until all is known, be it that there is no Training Operator."""
        await self.pods.synced()
        await self.pytorch_jobs.answered()

    @property
    def operator_missing(self) -> bool:
        """PyTorchJobs are not installed."""
        return self.pytorch_jobs.missing

    def pods_of(self, job: TrainingJob, attempt: int) -> list[Document]:
        whose = (job.metadata.uid, attempt)
        return [pod for pod in self.all_pods_of(job) if attempt_of(pod) == whose]

    def all_pods_of(self, job: TrainingJob) -> list[Document]:
        """Of its own namespace: labels are anybody's to write who may make a pod anywhere."""
        namespace = job.metadata.namespace
        return [pod for pod in self._pods.of(job.metadata.uid) if pod["metadata"]["namespace"] == namespace]

    def pytorch_job_of(self, job: TrainingJob, attempt: int) -> Document | None:
        """None also where another job has the name."""
        found = self.pytorch_jobs.get(f"{job.metadata.namespace}/{attempt_name(job, attempt)}")
        return found if found is not None and attempt_of(found) == (job.metadata.uid, attempt) else None

    def pytorch_jobs_of(self, job: TrainingJob) -> list[Document]:
        namespace = job.metadata.namespace
        return [one for one in self._jobs.of(job.metadata.uid) if one["metadata"]["namespace"] == namespace]

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
    """Without what the pod was asked to be, which is three quarters of it: what became of it counts."""
    node = (document.get("spec") or {}).get("nodeName")
    return {**document, "spec": {"nodeName": node} if node else {}}


def _pytorch_job(document: Document) -> Document:
    """Without the pods' template."""
    run_policy = (document.get("spec") or {}).get("runPolicy") or {}
    return {**document, "spec": {"runPolicy": run_policy}}


class _ByJob:
    """Objects by the uid of the job that their labels name."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Document]] = {}

    def of(self, uid: str) -> list[Document]:
        return list(self._objects.get(uid, {}).values())

    def take(self, notice: Notice) -> None:
        whose = attempt_of(notice.object)
        if whose is None:
            return
        uid, key = whose[0], key_of(notice.object)
        if notice.type != "DELETED":
            self._objects.setdefault(uid, {})[key] = notice.object
        elif (known := self._objects.get(uid)) is not None:
            known.pop(key, None)
            if not known:
                del self._objects[uid]
