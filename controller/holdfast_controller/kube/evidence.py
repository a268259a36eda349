"""Pods that have ended are held by our finalizer until their attempt has its verdict, then let go.

So is the mark of a stop that nobody carries out any more: its controller died before it deleted a pod, and
the job was resumed before the next one looked. What ends the attempt now is not we, and would pass for it.

What has its verdict and runs on all the same is ended: a pod into which somebody's webhook has put a sidecar
that does not end by itself would hold its GPUs until the job is deleted; and an attempt object that a busy
apiserver made late, by a request that nobody waited for any more, would train beside the next attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from holdfast_controller.cluster import HoldfastError, Invalid, NotFound
from holdfast_controller.jobs import TrainingJob

from .connection import JSON_PATCH, MERGE_PATCH, Connection, Document
from .observation import EVIDENCE, STOPPED
from .pieces import Pieces, attempt_of, job_of, object_path, pod_path
from .pod_state import is_wanted, outlived, terminated
from .reflector import Reflector, uid_of
from .resource import decode

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 10.0


class Evidence:
    """Of what `pieces` and `jobs` see; `keep_logs` writes down the last lines of an attempt's pods."""

    def __init__(
        self,
        connection: Connection,
        pieces: Pieces,
        jobs: Reflector,
        keep_logs: Callable[[TrainingJob, int], Awaitable[None]],
    ):
        self._connection = connection
        self._pieces = pieces
        self._jobs = jobs
        self._keep_logs = keep_logs

    async def sweep(self) -> None:
        """Let go of what nobody needs any more. Until cancelled."""
        await self._jobs.synced()
        await self._pieces.synced()
        while True:
            for pod in self._pieces.pods.all():
                if self._needed(pod):
                    continue
                try:
                    if "deletionTimestamp" in pod["metadata"]:
                        await self.release(pod)
                    elif outlived(pod) or self._is_late(pod):
                        await self._end(pod)
                except HoldfastError as error:
                    log.warning("a pod is still held", pod=pod["metadata"]["name"], error=str(error))
            for objects in self._pieces.objects.values():
                for one in objects.all():
                    try:
                        if self._goes_on(one):
                            await self._unmark(one)
                    except HoldfastError as error:  # as of a job that only another version can read
                        path = object_path(one)
                        log.warning("the mark of a stop is still there", object=path, error=str(error))
            await asyncio.sleep(SWEEP_SECONDS)

    def _goes_on(self, attempt_object: Document) -> bool:
        """Whether it has a mark of a stop that its job does not ask for and that has reached no pod."""
        meta = attempt_object["metadata"]
        if STOPPED not in (meta.get("annotations") or {}) or "deletionTimestamp" in meta:
            return False
        job = job_of(attempt_object, self._jobs)
        if job is None or "deletionTimestamp" in job["metadata"] or job["spec"].get("suspend"):
            return False
        whose = attempt_of(attempt_object)
        return whose is not None and all(map(is_wanted, self._pieces.pods_of(decode(job), whose[1])))

    async def _unmark(self, attempt_object: Document) -> None:
        path, version = object_path(attempt_object), attempt_object["metadata"]["resourceVersion"]
        change = {"metadata": {"annotations": {STOPPED: None}, "resourceVersion": version}}
        self._pieces.wrote(await self._connection.patch(path, change, MERGE_PATCH))

    def _needed(self, pod: Document) -> bool:
        """Whether the attempt it belongs to is open: that has no verdict yet."""
        whose, job = attempt_of(pod), job_of(pod, self._jobs)
        if whose is None or job is None:
            return False
        _, number = whose
        records = (job.get("status") or {}).get("attempts") or []
        return any(record["number"] == number and not record.get("verdict") for record in records)

    def _is_late(self, pod: Document) -> bool:
        """Whether it is to run, though a later attempt was opened, which is when all of its own has ended."""
        whose, job = attempt_of(pod), job_of(pod, self._jobs)
        newest = ((job or {}).get("status") or {}).get("attempt")
        runs = is_wanted(pod) and not terminated(pod)
        return runs and whose is not None and isinstance(newest, int) and whose[1] < newest

    async def _end(self, pod: Document) -> None:
        """By its attempt object, whose operator would make it again; of a job that is gone all go anyway."""
        whose, document = attempt_of(pod), job_of(pod, self._jobs)
        if whose is None or document is None:
            return
        job, number = decode(document), whose[1]
        attempt_object = self._pieces.object_of(job, number)
        if attempt_object is None or "deletionTimestamp" in attempt_object["metadata"]:
            return
        await self._keep_logs(job, number)
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid_of(attempt_object)}}
        with suppress(NotFound):
            await self._connection.delete(object_path(attempt_object), options)

    async def release(self, pod: Document, *, delete: bool = False) -> None:
        """Take our finalizer off; with `delete` the pod goes too."""
        finalizers = pod["metadata"].get("finalizers") or []
        with suppress(NotFound):
            if delete and "deletionTimestamp" not in pod["metadata"]:
                await self._connection.delete(pod_path(pod), {"preconditions": {"uid": uid_of(pod)}})
            if EVIDENCE in finalizers:
                at = f"/metadata/finalizers/{finalizers.index(EVIDENCE)}"
                with suppress(Invalid):  # the test fails: it is off already, or the next sweep finds it
                    changes = [
                        {"op": "test", "path": at, "value": EVIDENCE},
                        {"op": "remove", "path": at},
                    ]
                    await self._connection.patch(pod_path(pod), changes, JSON_PATCH)
