"""Jobs in one SQLite file (WAL), written with optimistic concurrency.

A write names the `resourceVersion` it was decided on and is refused as a Conflict when the job has
another one by now. Versions come from one counter for the whole file, so a newer write always has the
higher one. Every write is durable before it returns (synchronous=FULL), because an attempt is started
on the strength of it. One process at a time owns the file: a lock beside it says so.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import aiosqlite
from pydantic import ValidationError

from holdfast_controller.cluster import (
    AlreadyExists,
    Change,
    Conflict,
    Event,
    Idempotency,
    NotFound,
    Unavailable,
)
from holdfast_controller.jobs import Status, TrainingJob
from holdfast_controller.spec import not_given

from .reserve import Reserve
from .watch import Watchers

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE counter (value INTEGER NOT NULL);
INSERT INTO counter VALUES (0);
CREATE TABLE jobs (
    uid TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    created REAL NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (namespace, name)
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    uid TEXT NOT NULL REFERENCES jobs (uid) ON DELETE CASCADE,
    time REAL NOT NULL,
    type TEXT NOT NULL,
    reason TEXT NOT NULL,
    message TEXT NOT NULL,
    count INTEGER NOT NULL
);
CREATE INDEX events_of_job ON events (uid, id);
CREATE TABLE idempotency (
    namespace TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    uid TEXT NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (namespace, key)
);
"""
EVENTS_KEPT = 200
KEYS_KEPT_SECONDS = 24 * 3600.0
JOBS_AT_ONCE = 20
"""Of a list: they take some milliseconds to decode, after which others have a turn."""


class _NoRoom(Unavailable):
    """The disk is full."""


class LocalStore:
    """A JobStore (cluster.py) in one file. Make it with `open`, end it with `close`."""

    def __init__(self, path: Path, connection: aiosqlite.Connection, lock: int):
        self._path = path
        self._db = connection
        self._lock = lock
        self._turn = asyncio.Lock()
        self._watchers = Watchers()
        self._reserve = Reserve(path.with_name(f"{path.name}.reserve"))
        self._reserve.keep()
        self.fault: str | None = None
        """Of the newest write, as a full disk."""

    @classmethod
    async def open(cls, path: Path) -> LocalStore:
        """Open or create the file. Raises Unavailable: not writable, not a database, in use, too new."""
        lock = _own(path)
        connection = None
        try:
            _close_to_others(path)
            connection = await aiosqlite.connect(path, isolation_level=None)
            await _prepare(connection, path)
        except BaseException as error:
            if connection is not None:
                await connection.close()
            os.close(lock)
            if isinstance(error, sqlite3.Error):
                raise _unavailable(path, error) from error
            raise
        return cls(path, connection, lock)

    async def close(self) -> None:
        await self._db.close()
        os.close(self._lock)

    # ---------------------------------------------------------------- jobs

    async def create(self, job: TrainingJob, *, idempotency: Idempotency | None = None) -> TrainingJob:
        meta = job.metadata
        async with self._write() as db:
            if idempotency is not None and (made := await self._made_before(db, job, idempotency)):
                return made
            row = await _one(
                db, "SELECT uid FROM jobs WHERE namespace = ? AND name = ?", meta.namespace, meta.name
            )
            if row is not None:
                raise AlreadyExists.of(job)
            created = await self._put(db, job)
            if idempotency is not None:
                await db.execute(
                    "INSERT INTO idempotency VALUES (?, ?, ?, ?, ?)",
                    (
                        meta.namespace,
                        idempotency.key,
                        idempotency.fingerprint,
                        meta.uid,
                        datetime.now(UTC).timestamp(),
                    ),
                )
        self._watchers.publish(Change("ADDED", created))
        return created.model_copy(deep=True)

    async def get(self, namespace: str, name: str) -> TrainingJob:
        async with self._read() as db:
            return _decode(await self._row(db, namespace, name))

    async def list_jobs(self, namespace: str | None = None) -> list[TrainingJob]:
        async with self._read() as db:
            rows = await _rows_of(db, namespace)
        with self._legible():
            return await _decode_all(rows)

    async def replace_spec(self, job: TrainingJob) -> TrainingJob:
        async with self._write() as db:
            new = await self._current(db, job)
            old_spec = new.spec
            new.spec = job.spec.model_copy(deep=True)
            new.metadata.labels = dict(job.metadata.labels)
            new.metadata.annotations = dict(job.metadata.annotations)
            if new.spec != old_spec:
                new.metadata.generation += 1
            stored = await self._put(db, new)
        self._watchers.publish(Change("MODIFIED", stored))
        return stored.model_copy(deep=True)

    async def replace_status(self, job: TrainingJob, status: Status, *events: Event) -> TrainingJob:
        async with self._write() as db:
            new = await self._current(db, job)
            new.status = status.model_copy(deep=True)
            stored = await self._put(db, new)
            for event in events:
                await _keep(db, stored.metadata.uid, event)
        self._watchers.publish(Change("MODIFIED", stored))
        return stored.model_copy(deep=True)

    async def mark_deleted(
        self, namespace: str, name: str, *, known: TrainingJob | None = None
    ) -> TrainingJob:
        try:
            return await self._mark_deleted(namespace, name, known)
        except _NoRoom:
            if not self._reserve.give():
                raise
            return await self._mark_deleted(namespace, name, known)

    async def _mark_deleted(self, namespace: str, name: str, known: TrainingJob | None) -> TrainingJob:
        async with self._write() as db:
            if known is None:
                job = _decode(await self._row(db, namespace, name))
            else:
                job = await self._current(db, known)
            if job.metadata.deletion_timestamp is not None:
                return job
            job.metadata.deletion_timestamp = datetime.now(UTC)
            stored = await self._put(db, job)
        self._watchers.publish(Change("MODIFIED", stored))
        return stored.model_copy(deep=True)

    async def remove(self, job: TrainingJob) -> None:
        async with self._write() as db:
            cursor = await db.execute("DELETE FROM jobs WHERE uid = ?", (job.metadata.uid,))
            gone = cursor.rowcount > 0
            await cursor.close()
        if gone:
            self._watchers.publish(Change("DELETED", job.model_copy(deep=True)))
            self._reserve.keep()  # its files have made room

    async def watch(self, namespace: str | None = None) -> AsyncIterator[Change]:
        async with self._read() as db:  # until all are decoded, so that no job changes meanwhile
            jobs = await _decode_all(await _rows_of(db, namespace))
        # No await from here until the subscription: no change falls between the two.
        async with aclosing(self._watchers.follow(jobs)) as changes:
            async for change in changes:
                if namespace in (None, change.job.metadata.namespace):
                    yield Change(change.type, change.job.model_copy(deep=True))

    # -------------------------------------------------------------- events

    async def record_event(self, job: TrainingJob, event: Event) -> None:
        uid = job.metadata.uid
        async with self._write() as db:
            if await _one(db, "SELECT 1 FROM jobs WHERE uid = ?", uid) is not None:
                await _keep(db, uid, event)

    async def events(self, namespace: str, name: str) -> list[Event]:
        async with self._read() as db:
            uid = _decode(await self._row(db, namespace, name)).metadata.uid
            rows = await db.execute_fetchall(
                "SELECT time, type, reason, message, count FROM events WHERE uid = ? ORDER BY id", (uid,)
            )
        return [
            Event(datetime.fromtimestamp(time, UTC), kind, reason, message, count)
            for time, kind, reason, message, count in rows
        ]

    # ------------------------------------------------------------ internal

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._turn:
            with self._legible():
                yield self._db

    @contextmanager
    def _legible(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            raise _unavailable(self._path, error) from error

    @asynccontextmanager
    async def _write(self) -> AsyncIterator[aiosqlite.Connection]:
        """One transaction: all of it, or nothing where an error leaves the block."""
        try:
            async with self._read() as db:
                try:
                    await db.execute("BEGIN IMMEDIATE")
                    yield db
                    await db.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):  # where a cancelled COMMIT went through there is none
                        await db.execute("ROLLBACK")
                    raise
        except Unavailable as error:
            self.fault = str(error)
            raise
        self.fault = None

    async def _row(self, db: aiosqlite.Connection, namespace: str, name: str) -> sqlite3.Row:
        row = await _one(
            db, "SELECT version, body FROM jobs WHERE namespace = ? AND name = ?", namespace, name
        )
        if row is None:
            raise NotFound(f"no job {namespace}/{name}; `holdfast get -n {namespace}` lists those there are")
        return row

    async def _current(self, db: aiosqlite.Connection, job: TrainingJob) -> TrainingJob:
        """The stored job, if it is the very version that `job` was read at."""
        row = await self._row(db, job.metadata.namespace, job.metadata.name)
        stored = _decode(row)
        if stored.metadata.uid != job.metadata.uid:
            raise NotFound(f"job {job.key} (uid {job.metadata.uid}) was deleted; another has its name now")
        if stored.metadata.resource_version != job.metadata.resource_version:
            raise Conflict(
                f"job {job.key} changed: it is at version {stored.metadata.resource_version}, not "
                f"{job.metadata.resource_version or 'unset'}; read it again and repeat the change"
            )
        return stored

    async def _put(self, db: aiosqlite.Connection, job: TrainingJob) -> TrainingJob:
        row = await _one(db, "UPDATE counter SET value = value + 1 RETURNING value")
        assert row is not None
        stored = job.model_copy(deep=True)
        meta = stored.metadata
        meta.resource_version = str(row[0])
        await db.execute(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (uid) DO UPDATE SET version = excluded.version, body = excluded.body",
            (
                meta.uid,
                meta.namespace,
                meta.name,
                row[0],
                meta.creation_timestamp.timestamp(),
                stored.model_dump_json(by_alias=True, exclude=not_given(stored)),
            ),
        )
        return stored

    async def _made_before(
        self, db: aiosqlite.Connection, job: TrainingJob, idempotency: Idempotency
    ) -> TrainingJob | None:
        expired = datetime.now(UTC).timestamp() - KEYS_KEPT_SECONDS
        await db.execute("DELETE FROM idempotency WHERE created < ?", (expired,))
        known = await _one(
            db,
            "SELECT fingerprint, uid FROM idempotency WHERE namespace = ? AND key = ?",
            job.metadata.namespace,
            idempotency.key,
        )
        if known is None:
            return None
        if known[0] != idempotency.fingerprint:
            raise Conflict(
                f"idempotency key {idempotency.key!r} was used for another request; take a new key"
            )
        row = await _one(db, "SELECT version, body FROM jobs WHERE uid = ?", known[1])
        if row is None:
            raise Conflict(
                f"idempotency key {idempotency.key!r} made a job that was deleted since; take a new key"
            )
        return _decode(row)


async def _keep(db: aiosqlite.Connection, uid: str, event: Event) -> None:
    """The event of a job that is there, or one more of the newest; in the transaction that is open."""
    last = await _one(
        db, "SELECT id, reason, message FROM events WHERE uid = ? ORDER BY id DESC LIMIT 1", uid
    )
    if last is not None and (last[1], last[2]) == (event.reason, event.message):
        await db.execute(
            "UPDATE events SET count = count + ?, time = ? WHERE id = ?",
            (event.count, event.time.timestamp(), last[0]),
        )
        return
    await db.execute(
        "INSERT INTO events (uid, time, type, reason, message, count) VALUES (?, ?, ?, ?, ?, ?)",
        (uid, event.time.timestamp(), event.type, event.reason, event.message, event.count),
    )
    await db.execute(
        "DELETE FROM events WHERE uid = ?1 AND id <= "
        "(SELECT id FROM events WHERE uid = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
        (uid, EVENTS_KEPT),
    )


async def _one(db: aiosqlite.Connection, query: str, *values: object) -> sqlite3.Row | None:
    async with db.execute(query, values) as cursor:
        rows = list(await cursor.fetchall())
    return rows[0] if rows else None


async def _rows_of(db: aiosqlite.Connection, namespace: str | None) -> Iterable[sqlite3.Row]:
    """All jobs of a namespace, oldest first; None: of all."""
    query = "SELECT version, body FROM jobs WHERE ?1 IS NULL OR namespace = ?1 ORDER BY created, uid"
    return await db.execute_fetchall(query, (namespace,))


async def _decode_all(rows: Iterable[sqlite3.Row]) -> list[TrainingJob]:
    jobs: list[TrainingJob] = []
    for row in rows:
        jobs.append(_decode(row))
        if len(jobs) % JOBS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return jobs


def _decode(row: sqlite3.Row) -> TrainingJob:
    """The job. Keys of its status that we do not know were written by a later Holdfast, before somebody went
    back to this one, and are left out, as kube/resource.py does; what it is asked to do is read whole."""
    try:
        job = TrainingJob.model_validate_json(row[1])
    except ValidationError:
        document = json.loads(row[1])
        status = Status.model_validate(document.pop("status"), extra="ignore")
        job = TrainingJob.model_validate(document).model_copy(update={"status": status})
    job.metadata.resource_version = str(row[0])
    return job


def _own(path: Path) -> int:
    """Take the lock beside the file; it falls with the process. Raises Unavailable."""
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot write {lock_path}: {error.strerror}; is {path.parent} yours?") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise Unavailable(
            f"another controller uses {path}; stop it, or give this one its own data directory"
        ) from None
    return lock


def _close_to_others(path: Path) -> None:
    """Jobs' `env` is in it, with keys and passwords, and the directory may be one that everybody reads. What
    SQLite makes beside the file gets its mode; what is there already is from before."""
    with suppress(OSError):  # that it cannot be made is SQLite's to say; and it may be another user's
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        for one in (path, *(path.with_name(f"{path.name}-{kind}") for kind in ("wal", "shm"))):
            with suppress(FileNotFoundError):
                one.chmod(0o600)


async def _prepare(db: aiosqlite.Connection, path: Path) -> None:
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "busy_timeout = 5000"):
        await db.execute(f"PRAGMA {pragma}")
    row = await _one(db, "PRAGMA user_version")
    assert row is not None
    if row[0] == 0:
        await db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif row[0] != SCHEMA_VERSION:
        raise Unavailable(
            f"{path} has schema version {row[0]}, this Holdfast reads {SCHEMA_VERSION}; "
            "run the Holdfast that wrote it, or give this one another data directory"
        )
    check = await _one(db, "PRAGMA quick_check(1)")
    if check is None or check[0] != "ok":
        raise sqlite3.DatabaseError(str(check[0] if check else "no answer"))


def _unavailable(path: Path, error: Exception) -> Unavailable:
    if isinstance(error, ValidationError):  # a later Holdfast of the same schema can be asked for more
        first = error.errors(include_url=False)[0]
        return Unavailable(
            f"{path} has a job that this Holdfast cannot read ({'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}); run the Holdfast that wrote it, or give this one another data directory"
        )
    text = str(error)
    if "not a database" in text or "malformed" in text or "***" in text:
        return Unavailable(
            f"{path} is damaged ({text}); move it away to start without it: runs keep their files, those "
            "under way go on (the log says how to end them), and a job submitted again starts afresh"
        )
    if "full" in text:
        return _NoRoom(f"cannot write {path}: the disk is full; free some space, nothing is lost so far")
    if "readonly" in text or "unable to open" in text:
        return Unavailable(f"cannot write {path}: {text}; check who owns it and the directory's permissions")
    return Unavailable(f"cannot use {path}: {text}")
