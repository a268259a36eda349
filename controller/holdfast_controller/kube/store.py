"""Jobs as TrainingJob resources: a JobStore (cluster.py).

The apiserver does the optimistic concurrency: every write carries the resourceVersion that it was
decided on. Deleting leaves the job with a deletionTimestamp as long as our finalizer is on it; the
reconciler takes that off when nothing of the job runs any more. A job that kubectl made has no finalizer
yet and gets it before its first status, that is before its first attempt.

Two views of one cluster: `cached` reads from the reflector's copy, where our own writes show at once (the
reconciler's way: no request a pass); the other asks the server, so that what one replica of the API wrote,
another reads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress

import structlog

from holdfast_controller.cluster import (
    AlreadyExists,
    Change,
    Conflict,
    Event,
    HoldfastError,
    Idempotency,
    Invalid,
    NotFound,
)
from holdfast_controller.jobs import Status, TrainingJob

from .connection import JSON_PATCH, MERGE_PATCH, Connection, Document
from .errors import answer_to_who_asks
from .events import EventLog, reference
from .idempotency import KEY_DIGEST, KeyRecords, digest_of
from .reflector import Notice, Reflector, key_of, pages, uid_of, version_of
from .resource import (
    FINALIZER,
    JOBS,
    changes_to,
    decode,
    held,
    job_path,
    jobs_path,
    new_document,
    path_of,
    status_document,
)

log = structlog.get_logger(__name__)

REMOVE_TRIES = 10
IN_A_ROW = 100
"""Jobs that are decoded before others have their turn: ten thousand take half a second, and the lease is to
be renewed meanwhile."""


class KubeStore:
    """TrainingJobs of all namespaces. The reflector must be running for `watch` and cached reads."""

    def __init__(self, connection: Connection, reflector: Reflector, *, cached: bool):
        self._connection = connection
        self._reflector = reflector
        self._cached = cached
        self._events = EventLog(connection)
        self._keys = KeyRecords(connection)
        self._held: set[str] = set()

    @property
    def fault(self) -> str | None:
        """Who reads asks the apiserver, which tells by itself."""
        return None

    # ---------------------------------------------------------------- jobs

    async def create(self, job: TrainingJob, *, idempotency: Idempotency | None = None) -> TrainingJob:
        document = new_document(job)
        if idempotency is not None:
            notes = {**job.metadata.annotations, KEY_DIGEST: digest_of(idempotency.key)}
            document["metadata"]["annotations"] = notes

        async def create() -> Document:
            try:
                with answer_to_who_asks():
                    return await self._connection.post(jobs_path(job.metadata.namespace), document)
            except AlreadyExists:
                raise AlreadyExists.of(job) from None

        try:
            if idempotency is None:
                return self._wrote(await create())
            with answer_to_who_asks():  # the key's record too, as in a namespace that is going
                return self._wrote(await self._keys.create_once(job, idempotency, create))
        except NotFound as error:
            raise _no_such_place(job, error) from error

    async def get(self, namespace: str, name: str) -> TrainingJob:
        return self._decode(await self._get(namespace, name))

    async def list_jobs(self, namespace: str | None = None) -> list[TrainingJob]:
        jobs = []
        for number, document in enumerate(await self._list(namespace), start=1):
            if number % IN_A_ROW == 0:
                await asyncio.sleep(0)
            try:
                jobs.append(self._decode(document))
            except Invalid as error:
                log.warning("left out of the list", error=str(error))
        # Kubernetes keeps whole seconds: jobs of one second are in the order of their names.
        return sorted(jobs, key=lambda job: (job.metadata.creation_timestamp, job.key))

    async def replace_spec(self, job: TrainingJob) -> TrainingJob:
        meta = job.metadata
        document = await self._get(meta.namespace, meta.name)
        changes: list[Document] = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta.resource_version},
            *changes_to(document, job),
        ]
        with answer_to_who_asks():
            return await self._replace(job, path_of(job), changes)

    async def replace_status(self, job: TrainingJob, status: Status, *events: Event) -> TrainingJob:
        version = job.metadata.resource_version
        if job.metadata.uid not in self._held and job.metadata.deletion_timestamp is None:
            version = await self._hold(job)
        changes: list[Document] = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/status", "value": status_document(status)},
        ]
        written = await self._replace(job, f"{path_of(job)}/status", changes)
        for event in events:  # an apiserver has no act for both
            try:
                await self.record_event(job, event)
            except HoldfastError as error:
                log.warning("an event is not told", job=job.key, reason=event.reason, error=str(error))
        return written

    async def mark_deleted(
        self, namespace: str, name: str, *, known: TrainingJob | None = None
    ) -> TrainingJob:
        with answer_to_who_asks():
            document = await self._delete(namespace, name, known)
        if document.get("kind") != "Status":
            return self._wrote(document)
        with suppress(NotFound):  # where nothing held it, it is gone: the last we knew of it is the answer
            return await self.get(namespace, name)
        raise _no_job(namespace, name)

    async def remove(self, job: TrainingJob) -> None:
        uid, path = job.metadata.uid, path_of(job)
        if job.metadata.deletion_timestamp is None:
            with suppress(NotFound):
                await self._delete(job.metadata.namespace, job.metadata.name, job)
        for _ in range(REMOVE_TRIES):
            try:
                document = await self._connection.get(path)
                if uid_of(document) != uid:
                    break
                meta = document["metadata"]
                left = [name for name in meta.get("finalizers") or [] if name != FINALIZER]
                version = meta["resourceVersion"]
                change = {"metadata": {"resourceVersion": version, "finalizers": left}}
                await self._connection.patch(path, change, MERGE_PATCH)
                break
            except NotFound:
                break
            except Conflict:
                continue
        else:
            raise Conflict(f"job {job.key} changed {REMOVE_TRIES} times while it was being removed")
        self._held.discard(uid)

    async def watch(self, namespace: str | None = None) -> AsyncIterator[Change]:
        await self._reflector.synced()
        inbox: dict[str, Notice] = {}
        arrived = asyncio.Event()

        def put(notice: Notice) -> None:
            if namespace not in (None, notice.object["metadata"]["namespace"]):
                return
            uid = uid_of(notice.object)
            inbox.pop(uid, None)
            inbox[uid] = notice
            arrived.set()

        stop = self._reflector.listen(put)
        told: dict[str, int] = {}
        try:
            for document in self._reflector.all():
                put(Notice("ADDED", document))
            for number in itertools.count(1):
                if number % IN_A_ROW == 0:
                    await asyncio.sleep(0)
                while not inbox:
                    arrived.clear()
                    await arrived.wait()
                notice = self._newest(inbox.pop(next(iter(inbox))))
                uid, version = uid_of(notice.object), version_of(notice.object)
                if notice.type == "DELETED":
                    told.pop(uid, None)
                elif told.get(uid) == version:
                    continue
                else:
                    notice = Notice("MODIFIED" if uid in told else "ADDED", notice.object)
                    told[uid] = version
                if (change := await self._change(notice)) is not None:
                    yield change
        finally:
            stop()

    # -------------------------------------------------------------- events

    async def record_event(self, job: TrainingJob, event: Event) -> None:
        await self._events.record(reference(job), event)

    async def events(self, namespace: str, name: str) -> list[Event]:
        try:
            document = await self._connection.get(job_path(namespace, name))
        except NotFound:
            raise _no_job(namespace, name) from None
        return await self._events.of(namespace, uid_of(document))

    # ------------------------------------------------------------ internal

    async def _get(self, namespace: str, name: str) -> Document:
        if self._cached:
            await self._reflector.synced()
            document = self._reflector.get(f"{namespace}/{name}")
            if document is not None:
                return document
            raise _no_job(namespace, name)
        try:
            return await self._connection.get(job_path(namespace, name))
        except NotFound:
            raise _no_job(namespace, name) from None

    async def _list(self, namespace: str | None) -> list[Document]:
        if self._cached:
            await self._reflector.synced()
            return [
                document
                for document in self._reflector.all()
                if namespace in (None, document["metadata"]["namespace"])
            ]
        path = JOBS if namespace is None else jobs_path(namespace)
        return [document async for page in pages(self._connection, path) for document in page["items"]]

    async def _replace(self, job: TrainingJob, path: str, changes: list[Document]) -> TrainingJob:
        try:
            return self._wrote(await self._connection.patch(path, changes, JSON_PATCH))
        except NotFound:
            raise _no_job(job.metadata.namespace, job.metadata.name) from None
        except Conflict:
            raise await self._why(job) from None

    async def _delete(self, namespace: str, name: str, known: TrainingJob | None) -> Document:
        """Where it is as `known`: meanwhile its user may have given it a longer life. Raises NotFound, and
        Conflict where it is not so."""
        options: Document | None = None
        if known is not None:
            meta = known.metadata
            options = {"preconditions": {"uid": meta.uid, "resourceVersion": meta.resource_version}}
        try:
            return await self._connection.delete(job_path(namespace, name), options)
        except NotFound:
            raise _no_job(namespace, name) from None
        except Conflict:
            if known is None:
                raise
            raise await self._why(known) from None

    async def _why(self, job: TrainingJob) -> HoldfastError:
        """Why a write that named a version was refused."""
        meta = job.metadata
        try:
            document = await self._connection.get(path_of(job))
        except NotFound:
            return _no_job(meta.namespace, meta.name)
        if uid_of(document) != meta.uid:
            return NotFound(f"job {job.key} (uid {meta.uid}) was deleted; another has its name now")
        self._reflector.wrote(document)
        return Conflict(
            f"job {job.key} changed: it is at version {version_of(document)}, not "
            f"{meta.resource_version or 'unset'}; read it again and repeat the change"
        )

    async def _hold(self, job: TrainingJob) -> str:
        """Put our finalizer on a job that has none; returns its new version.

        A copy that is behind does no harm: the write is refused then, for it names the version.
        """
        document = await self._get(job.metadata.namespace, job.metadata.name)
        if held(document):
            self._held.add(uid_of(document))
            return job.metadata.resource_version
        if uid_of(document) != job.metadata.uid:
            raise NotFound(f"job {job.key} (uid {job.metadata.uid}) was deleted; another has its name now")
        names = [*(document["metadata"].get("finalizers") or []), FINALIZER]
        change = {"metadata": {"resourceVersion": job.metadata.resource_version, "finalizers": names}}
        try:
            made = self._wrote(await self._connection.patch(path_of(job), change, MERGE_PATCH))
        except Conflict:
            raise await self._why(job) from None
        return made.metadata.resource_version

    def _wrote(self, document: Document) -> TrainingJob:
        self._reflector.wrote(document)
        return self._decode(document)

    def _decode(self, document: Document) -> TrainingJob:
        if held(document):
            self._held.add(uid_of(document))
        else:  # others may take our finalizer off: `kubectl replace` does, with a file that lacks it
            self._held.discard(uid_of(document))
        return decode(document)

    def _newest(self, notice: Notice) -> Notice:
        """With what we wrote since in place of what the watch told."""
        if notice.type == "DELETED":
            return notice
        known = self._reflector.get(key_of(notice.object))
        if known is None or uid_of(known) != uid_of(notice.object):
            return notice
        return Notice(notice.type, known)

    async def _change(self, notice: Notice) -> Change | None:
        try:
            job = self._decode(notice.object)
        except Invalid as error:
            log.warning("a job that cannot be read", error=str(error))
            return None
        if notice.type == "DELETED":
            self._held.discard(job.metadata.uid)
        return Change(notice.type, job)


def _no_job(namespace: str, name: str) -> NotFound:
    return NotFound(f"no job {namespace}/{name}; `holdfast get -n {namespace}` lists those there are")


def _no_such_place(job: TrainingJob, error: NotFound) -> NotFound:
    return NotFound(
        f"namespace {job.metadata.namespace!r} is not there, or the TrainingJob CRD is not installed; "
        f"make it with `kubectl create namespace`, or install the chart: {error}"
    )
