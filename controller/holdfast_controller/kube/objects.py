"""What an attempt consists of beside its pods: the attempt object, and what was made before it, in its order.

Names are functions of job, attempt and kind, so everything here may be asked for twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal

import structlog
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_fixed

from holdfast_controller.attempt_kind import CONFIG_MAPS, AttemptKind, Resource
from holdfast_controller.cluster import AlreadyExists, HoldfastError, NotFound, NotReady
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.manifests import KINDS, Manifests, attempt_name, kind_of

from .connection import MERGE_PATCH, Connection, Document
from .last_words import ledger_name
from .pieces import Pieces, attempt_of, object_path
from .queue_waits import leave
from .reflector import uid_of

CONTENT = "holdfast.dev/content"
"""On what is made before the attempt object: a digest of what we wrote, to which defaults are added there."""
LATE_TRIES = 30
LATE_SECONDS = 0.2
"""Between two tries to make an attempt object whose operator has yet to see what was made before it."""


log = structlog.get_logger(__name__)


class Objects:
    """Of all attempts."""

    def __init__(self, connection: Connection, pieces: Pieces):
        self._connection = connection
        self._pieces = pieces

    async def create(self, job: TrainingJob, attempt: int, kind: AttemptKind, manifests: Manifests) -> None:
        """Make what is not there yet. Raises NotReady where something else has a name of these."""
        whose = object_path(manifests.attempt_object)
        for body, resource in zip(manifests.beside, (CONFIG_MAPS, *kind.beside), strict=True):
            await self._create_beside(job, attempt, resource, body, whose)

        tries = AsyncRetrying(
            retry=retry_if_exception(lambda error: _is_late(kind, error)),
            stop=stop_after_attempt(LATE_TRIES),
            wait=wait_fixed(LATE_SECONDS),
            reraise=True,
        )
        self._pieces.wrote(await tries(self._create, job, attempt, kind.resource, manifests.attempt_object))

    async def _create_beside(
        self, job: TrainingJob, attempt: int, resource: Resource, body: Document, whose: str
    ) -> None:
        """As the job asks now: what an earlier try has left may be from before its spec was corrected. But
        where the attempt object, at the path `whose`, is there, it goes by what it found."""
        body = _with_digest(body)
        found = await self._create(job, attempt, resource, body)
        if _digest_of(found) == _digest_of(body):
            return
        with suppress(NotFound):
            await self._connection.get(whose)
            return
        with suppress(NotFound):
            path = f"{resource.within(job.metadata.namespace)}/{body['metadata']['name']}"
            await self._connection.delete(path, {"preconditions": {"uid": uid_of(found)}})
        await self._create(job, attempt, resource, body)

    async def _create(self, job: TrainingJob, attempt: int, resource: Resource, body: Document) -> Document:
        path = resource.within(job.metadata.namespace)
        name = body["metadata"]["name"]
        try:
            return await self._connection.post(path, body)
        except AlreadyExists:
            found = await self._connection.get(f"{path}/{name}")
            if attempt_of(found) == (job.metadata.uid, attempt) and (
                "deletionTimestamp" not in found["metadata"]
            ):
                return found
            raise NotReady(f"{body['kind']} {job.metadata.namespace}/{name} {_in_the_way(found)}") from None

    async def find(self, job: TrainingJob, attempt: int, kind: AttemptKind) -> Document | None:
        """The attempt object as the apiserver has it, where no watch has told of it. One that died in silence
        is opened anew after a minute: to who begins to lead meanwhile, what runs would seem to be gone."""
        if self._pieces.lacks(kind):
            return None
        with suppress(NotFound):
            path = f"{kind.resource.within(job.metadata.namespace)}/{attempt_name(job, attempt, kind)}"
            found = await self._connection.get(path)
            if attempt_of(found) == (job.metadata.uid, attempt):
                self._pieces.wrote(found)
        return self._pieces.object_of(job, attempt)

    async def mark(self, attempt_object: Document, mark: str, *, needed: bool) -> None:
        """Write the time under this name, once. What is not `needed` keeps nobody from ending it."""
        if mark in (attempt_object["metadata"].get("annotations") or {}):
            return
        change = {"metadata": {"annotations": {mark: datetime.now(UTC).isoformat()}}}
        with suppress(NotFound):
            path = object_path(attempt_object)
            try:
                self._pieces.wrote(await self._connection.patch(path, change, MERGE_PATCH))
            except HoldfastError as error:
                if needed and not _is_late(kind_of(attempt_object), error):
                    raise
                # Its operator is down, whose webhook every change goes through; or somebody else has deleted
                # what was made beside it. It has to end all the same.
                log.warning("its end cannot be marked", object=path, error=str(error))

    async def end(self, attempt_object: Document, *, all_made: bool) -> None:
        """See to it that no further pod is made; `all_made`: there is one for every replica. Until all have
        ended it stays, going or not, for what is marked on it."""
        if not kind_of(attempt_object).ends_with_pods:
            await self._delete_object(attempt_object, "Foreground")
        elif not all_made:
            await self._delete_object(attempt_object, "Background")

    async def clear(self, job: TrainingJob, attempt: int, attempt_object: Document) -> None:
        """All of an attempt that has its verdict, at once; its pods are to follow."""
        await self._delete_object(attempt_object, "Background")
        await leave(self._connection, attempt_object)
        await self.clear_beside(job, attempt)

    async def clear_beside(self, job: TrainingJob, attempt: int) -> None:
        """What was made before the attempt object, in whatever kind that was."""
        gone = [(CONFIG_MAPS, attempt_name(job, attempt)), (CONFIG_MAPS, ledger_name(job, attempt))]
        for kind in KINDS.values():
            if not self._pieces.lacks(kind):
                gone += [(resource, attempt_name(job, attempt, kind)) for resource in kind.beside]
        # At once: the next attempt waits for this.
        await asyncio.gather(*(self._delete(resource, job, attempt, one) for resource, one in gone))

    async def _delete_object(
        self, attempt_object: Document, policy: Literal["Foreground", "Background"]
    ) -> None:
        options = {"propagationPolicy": policy, "preconditions": {"uid": uid_of(attempt_object)}}
        with suppress(NotFound):
            await self._connection.delete(object_path(attempt_object), options)

    async def _delete(self, resource: Resource, job: TrainingJob, attempt: int, name: str) -> None:
        """Unless it is somebody else's, who had the name before the attempt could be made."""
        path = f"{resource.within(job.metadata.namespace)}/{name}"
        with suppress(NotFound):
            found = await self._connection.get(path)
            if attempt_of(found) == (job.metadata.uid, attempt):
                await self._connection.delete(path, {"preconditions": {"uid": uid_of(found)}})


def _in_the_way(found: Document) -> str:
    """What has the name of something of an attempt, and what becomes of that."""
    if "deletionTimestamp" in found["metadata"]:
        return "of before is still going; the attempt starts when it is gone"
    if attempt_of(found) is not None:
        return "of an earlier job is still there; the attempt starts when it is gone"
    return (
        "is somebody else's, not Holdfast's, and the attempt needs its name: give the job another name, or "
        "delete that, and the attempt starts"
    )


def _with_digest(body: Document) -> Document:
    said = json.dumps([body.get("data"), body.get("spec")], sort_keys=True)
    meta = body["metadata"]
    marks = {**meta.get("annotations", {}), CONTENT: hashlib.sha256(said.encode()).hexdigest()}
    return {**body, "metadata": {**meta, "annotations": marks}}


def _digest_of(document: Document) -> str | None:
    found: str | None = (document["metadata"].get("annotations") or {}).get(CONTENT)
    return found


def _is_late(kind: AttemptKind, error: BaseException) -> bool:
    """Whether its operator refuses for what it does not see beside the attempt object."""
    return isinstance(error, HoldfastError) and kind.late != "" and kind.late in str(error)
