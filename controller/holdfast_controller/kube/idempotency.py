"""Which job an Idempotency-Key made, so that a request sent twice makes one.

The record is an Event whose name is the key's digest: making it is atomic, two controllers cannot both
do so, it outlives the job (a key is not to be used again), and the server forgets it after an hour
(`--event-ttl`) with nobody cleaning up. It says first which job is to be made, and after that which
uid it got; a repeat that finds the first alone goes on where the first request died. Where that one is still
under way both may come to make the job: one does, and both have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

from holdfast_controller.cluster import (
    AlreadyExists,
    Conflict,
    HoldfastError,
    Idempotency,
    NotFound,
    Unavailable,
)
from holdfast_controller.jobs import API_VERSION, KIND, TrainingJob

from .connection import MERGE_PATCH, Connection, Document
from .errors import Refused
from .events import COMPONENT, events_path
from .resource import path_of

FINGERPRINT = "holdfast.dev/fingerprint"
MADE = "holdfast.dev/made"
KEY_DIGEST = "holdfast.dev/idempotency-key"
"""On the job: the digest of the key that made it."""
TRIES = 3
"""For a key that others take and give back again."""

Create = Callable[[], Awaitable[Document]]


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:40]


class KeyRecords:
    """Of one cluster."""

    def __init__(self, connection: Connection):
        self._connection = connection

    async def create_once(self, job: TrainingJob, idempotency: Idempotency, create: Create) -> Document:
        """The job that this key made, by `create` where it made none yet.

        Raises Conflict where the key was used for something else or its job is gone, and what `create`
        raises; then the key is free again, where it was taken for this request.
        """
        digest = digest_of(idempotency.key)
        path = f"{events_path(job.metadata.namespace)}/holdfast-key.{digest}"
        known = await self._take(path, job, digest, idempotency)
        if known is not None:
            made = await self._made_before(job, known, digest, idempotency)
            if made is not None:
                noted = MADE in (known["metadata"].get("annotations") or {})
                return made if noted else await self._noted(path, made)
        try:
            created = await create()
        except Unavailable:
            raise  # It may have been made: the key stays taken, and the repeat finds out.
        except HoldfastError as error:
            made = await self._found(job, digest) if isinstance(error, AlreadyExists) else None
            if made is not None:
                return await self._noted(path, made)
            if known is None:
                await self._forget(path)
            raise
        return await self._noted(path, created)

    async def _noted(self, path: str, made: Document) -> Document:
        """That the key made this job: once it is deleted, nothing else would tell. By whoever finds it: the
        request that made it may have died in between."""
        # Forgotten after an hour, or with the namespace; where a policy refuses it, the job is made anyhow.
        with suppress(NotFound, Refused):
            await self._connection.patch(
                path, {"metadata": {"annotations": {MADE: made["metadata"]["uid"]}}}, MERGE_PATCH
            )
        return made

    async def _take(
        self, path: str, job: TrainingJob, digest: str, idempotency: Idempotency
    ) -> Document | None:
        """Take the key for this request, or get the record of the one that has it."""
        for _ in range(TRIES):
            try:
                await self._connection.post(path.rpartition("/")[0], _record(job, digest, idempotency))
                return None
            except AlreadyExists:
                with suppress(NotFound):  # that one was refused meanwhile, and the key is free again
                    return await self._connection.get(path)
        raise Unavailable(f"idempotency key {idempotency.key!r} is in use by other requests; try again")

    async def _made_before(
        self, job: TrainingJob, known: Document, digest: str, idempotency: Idempotency
    ) -> Document | None:
        notes = known["metadata"].get("annotations") or {}
        if notes.get(FINGERPRINT) != idempotency.fingerprint:
            raise Conflict(
                f"idempotency key {idempotency.key!r} was used for another request; take a new key"
            )
        found = await self._found(job, digest)
        if found is not None:
            return found
        if notes.get(MADE):
            raise Conflict(
                f"idempotency key {idempotency.key!r} made a job that was deleted since; take a new key"
            )
        return None

    async def _found(self, job: TrainingJob, digest: str) -> Document | None:
        """The job, where it is there and this key made it."""
        try:
            found = await self._connection.get(path_of(job))
        except NotFound:
            return None
        return found if (found["metadata"].get("annotations") or {}).get(KEY_DIGEST) == digest else None

    async def _forget(self, path: str) -> None:
        with suppress(NotFound):
            await self._connection.delete(path)


def _record(job: TrainingJob, digest: str, idempotency: Idempotency) -> Document:
    meta = job.metadata
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"holdfast-key.{digest}",
            "namespace": meta.namespace,
            "annotations": {FINGERPRINT: idempotency.fingerprint},
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": meta.namespace,
            "name": meta.name,
        },
        "type": "Normal",
        "reason": "Submitted",
        "message": "submitted with an Idempotency-Key; the same request makes no second job",
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": COMPONENT},
    }
