"""A job store and an engine in memory: what the ports promise, without files and processes.

They pass the same contract tests as the real ones, and a test can break them at any call: a `Fuse` that
burns down raises `Crash` before or after the effect, as a controller that dies there.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from holdfast_controller.cluster import (
    AlreadyExists,
    AttemptObservation,
    Change,
    Conflict,
    Event,
    Idempotency,
    NotFound,
    NotReady,
    Plan,
    RankExit,
    ReplicaObservation,
    ReplicaState,
)
from holdfast_controller.drills import DrillKind
from holdfast_controller.heartbeat import Silence
from holdfast_controller.jobs import Status, TrainingJob, Verdict
from holdfast_controller.local.watch import Watchers
from holdfast_controller.queueing import Keys
from holdfast_trainer.contract import Progress, Termination


class Crash(Exception):
    """The controller died here."""


class Fuse:
    """Raises Crash at the n-th point from now where a controller could die; None: never."""

    def __init__(self) -> None:
        self.left: int | None = None

    def burn(self) -> None:
        if self.left is None:
            return
        if self.left == 0:
            self.left = None
            raise Crash
        self.left -= 1


class MemoryStore:
    fault: str | None = None

    def __init__(self, fuse: Fuse | None = None) -> None:
        self._fuse = fuse or Fuse()
        self._jobs: dict[tuple[str, str], TrainingJob] = {}
        self._events: dict[str, list[Event]] = {}
        self._keys: dict[tuple[str, str], tuple[str, str]] = {}
        self._versions = itertools.count(1)
        self._watchers = Watchers()

    async def create(self, job: TrainingJob, *, idempotency: Idempotency | None = None) -> TrainingJob:
        where = (job.metadata.namespace, job.metadata.name)
        if idempotency is not None:
            known = self._keys.get((where[0], idempotency.key))
            if known is not None:
                made = next((j for j in self._jobs.values() if j.metadata.uid == known[1]), None)
                if known[0] != idempotency.fingerprint or made is None:
                    raise Conflict(f"idempotency key {idempotency.key!r} was used for another request")
                return copy.deepcopy(made)
        if where in self._jobs:
            raise AlreadyExists(f"job {job.key} exists already")
        if idempotency is not None:
            self._keys[where[0], idempotency.key] = (idempotency.fingerprint, job.metadata.uid)
        return self._put(copy.deepcopy(job), "ADDED")

    def _put(self, job: TrainingJob, change: str = "MODIFIED") -> TrainingJob:
        job.metadata.resource_version = str(next(self._versions))
        self._jobs[job.metadata.namespace, job.metadata.name] = job
        self._watchers.publish(Change(change, copy.deepcopy(job)))
        return copy.deepcopy(job)

    def _find(self, namespace: str, name: str) -> TrainingJob:
        try:
            return copy.deepcopy(self._jobs[namespace, name])
        except KeyError:
            raise NotFound(f"no job {namespace}/{name}") from None

    def _current(self, job: TrainingJob) -> TrainingJob:
        stored = self._find(job.metadata.namespace, job.metadata.name)
        if stored.metadata.uid != job.metadata.uid:
            raise NotFound(f"job {job.key} was deleted; another has its name now")
        if stored.metadata.resource_version != job.metadata.resource_version:
            raise Conflict(f"job {job.key} changed; read it again")
        return stored

    async def get(self, namespace: str, name: str) -> TrainingJob:
        return self._find(namespace, name)

    async def list_jobs(self, namespace: str | None = None) -> list[TrainingJob]:
        jobs = [j for j in self._jobs.values() if namespace in (None, j.metadata.namespace)]
        return sorted(copy.deepcopy(jobs), key=lambda j: (j.metadata.creation_timestamp, j.metadata.uid))

    async def replace_spec(self, job: TrainingJob) -> TrainingJob:
        stored = self._current(job)
        stored.metadata.generation += stored.spec != job.spec
        stored.spec = copy.deepcopy(job.spec)
        stored.metadata.labels = dict(job.metadata.labels)
        stored.metadata.annotations = dict(job.metadata.annotations)
        return self._put(stored)

    async def edited_past_our_checks(self, job: TrainingJob, faults: tuple[str, ...]) -> None:
        """As kubectl can: `faults` are what then cannot be read of its spec."""
        await self.replace_spec(job)
        self._put(self._find(job.metadata.namespace, job.metadata.name).with_faults(faults))

    async def keep_by(self, job: TrainingJob, *finalizers: str) -> None:
        """As others do, who see to something before it may go."""
        self._put(self._find(job.metadata.namespace, job.metadata.name).with_keepers(finalizers))

    async def replace_status(self, job: TrainingJob, status: Status, *events: Event) -> TrainingJob:
        self._fuse.burn()
        stored = self._current(job)
        stored.status = copy.deepcopy(status)
        written = self._put(stored)
        for event in events:
            self._keep(written, event)
        self._fuse.burn()
        return written

    async def mark_deleted(
        self, namespace: str, name: str, *, known: TrainingJob | None = None
    ) -> TrainingJob:
        stored = self._find(namespace, name) if known is None else self._current(known)
        if stored.metadata.deletion_timestamp is None:
            stored.metadata.deletion_timestamp = datetime.now(UTC)
            return self._put(stored)
        return stored

    async def remove(self, job: TrainingJob) -> None:
        self._fuse.burn()
        where = (job.metadata.namespace, job.metadata.name)
        stored = self._jobs.get(where)
        if stored is not None and stored.metadata.uid == job.metadata.uid:
            del self._jobs[where]
            self._watchers.publish(Change("DELETED", copy.deepcopy(job)))
        self._fuse.burn()

    async def watch(self, namespace: str | None = None) -> AsyncIterator[Change]:
        async with aclosing(self._watchers.follow(await self.list_jobs(namespace))) as changes:
            async for change in changes:
                if namespace in (None, change.job.metadata.namespace):
                    yield change

    async def record_event(self, job: TrainingJob, event: Event) -> None:
        self._fuse.burn()
        if any(stored.metadata.uid == job.metadata.uid for stored in self._jobs.values()):
            self._keep(job, event)

    def _keep(self, job: TrainingJob, event: Event) -> None:
        events = self._events.setdefault(job.metadata.uid, [])
        if events and (events[-1].reason, events[-1].message) == (event.reason, event.message):
            events[-1] = replace(events[-1], count=events[-1].count + event.count, time=event.time)
        else:
            events.append(event)
            del events[:-200]

    async def events(self, namespace: str, name: str) -> list[Event]:
        return list(self._events.get(self._find(namespace, name).metadata.uid, []))


@dataclass
class Attempt:
    """A simulated attempt: what a test did to it."""

    job: TrainingJob
    number: int
    started: float
    queued: bool = False
    stopping: bool = False
    progress: Progress | None = None
    silence: Silence | None = None
    replicas: list[ReplicaObservation] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return any(replica.state in (ReplicaState.RUNNING, ReplicaState.PENDING) for replica in self.replicas)

    @property
    def waiting(self) -> str:
        """Why nothing of it has started; empty where something has."""
        if any(replica.state is not ReplicaState.PENDING for replica in self.replicas):
            return ""
        return next((f"replica {one.index}: {one.reason}" for one in self.replicas), "")


class MemoryEngine:
    """Attempts are rows in a table; `slots` replicas run at a time, the rest waits."""

    name = "memory"

    def __init__(
        self, slots: int = 4, fuse: Fuse | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._fuse = fuse or Fuse()
        self._clock = clock
        self._keys = Keys()
        self.slots = slots
        self.kept_logs: set[tuple[str, int]] = set()
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.launched: list[tuple[str, int]] = []
        """Every attempt that ever really started, by uid and number."""

    # ------------------------------------------------------------ the port

    def plan(self, job: TrainingJob) -> Plan:
        reasons = () if job.spec.replicas <= self.slots else (f"asks for {job.spec.replicas} slots",)
        return Plan(self.name, ({"replicas": job.spec.replicas},), reasons)

    async def objections(self, job: TrainingJob) -> tuple[str, ...]:
        return ()

    async def start(self, job: TrainingJob, attempt: int) -> None:
        self._fuse.burn()
        self.attempts.setdefault(
            (job.metadata.uid, attempt),
            Attempt(copy.deepcopy(job.as_of(attempt)), attempt, self._clock(), queued=True),
        )
        self._admit()
        self._fuse.burn()

    def _admit(self) -> None:
        for key, attempt in self.attempts.items():
            used = sum(len(a.replicas) for a in self.attempts.values() if a.alive)
            if attempt.queued and used + attempt.job.spec.replicas <= self.slots:
                attempt.queued = False
                attempt.replicas = [
                    ReplicaObservation(i, ReplicaState.RUNNING) for i in range(attempt.job.spec.replicas)
                ]
                self.launched.append(key)
                self._keys.publish(attempt.job.key)

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        found = self.attempts.get((job.metadata.uid, attempt))
        if found is None:
            return AttemptObservation(attempt, exists=False, gone=True)
        if found.queued:
            waiting = f"waits for {job.spec.replicas} slots"
            replicas = tuple(
                ReplicaObservation(index, ReplicaState.PENDING, waiting) for index in range(job.spec.replicas)
            )
            return AttemptObservation(attempt, True, False, replicas, waiting)
        return AttemptObservation(
            attempt,
            exists=True,
            gone=not found.alive,
            replicas=tuple(found.replicas),
            waiting=found.waiting,
            stopping=found.stopping,
            progress=found.progress,
            silence=found.silence,
            started_at=datetime.fromtimestamp(found.started, UTC),
        )

    async def stop(self, job: TrainingJob, attempt: int) -> None:
        self._fuse.burn()
        found = self.attempts.get((job.metadata.uid, attempt))
        if found is not None and found.queued:
            del self.attempts[job.metadata.uid, attempt]
        elif found is not None and found.alive:
            found.stopping = True
            for index in range(len(found.replicas)):
                self._end(found, index, 1, Termination("interrupted", 0, 0))
        self._fuse.burn()

    async def kill(self, job: TrainingJob, attempt: int, *, stacks: bool = False) -> None:
        self._fuse.burn()
        found = self.attempts.get((job.metadata.uid, attempt))
        if found is not None and found.queued:
            del self.attempts[job.metadata.uid, attempt]
        for index in range(len(found.replicas) if found is not None else 0):
            assert found is not None
            self._end(found, index, None, None, reason="Killed: by Holdfast, with its peers")
        self._fuse.burn()

    async def drill(self, job: TrainingJob, attempt: int, replica: int, kind: DrillKind) -> None:
        found = self.attempts.get((job.metadata.uid, attempt))
        if found is None or not found.alive:
            raise NotReady(f"attempt {attempt} of {job.key} is not running")
        if not 0 <= replica < len(found.replicas):
            raise NotFound(f"job {job.key} has no replica {replica}")
        if found.replicas[replica].state is not ReplicaState.RUNNING:
            raise NotReady(f"replica {replica} of {job.key} is not running")
        self._end(found, replica, None, None, disrupted=True, reason="Drilled")

    async def delete(self, job: TrainingJob) -> None:
        self._fuse.burn()
        for key in [key for key in self.attempts if key[0] == job.metadata.uid]:
            del self.attempts[key]
        self._admit()
        self._fuse.burn()

    async def ledger(self, job: TrainingJob) -> list[dict[str, Any]]:
        return []

    def run_directory(self, job: TrainingJob) -> str:
        return f"/runs/{job.key}"

    async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        return []

    async def ends_of_steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        return await self.steps(job)

    async def keep_logs(self, job: TrainingJob, attempt: int) -> None:
        self.kept_logs.add((job.metadata.uid, attempt))

    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        found = self.attempts.get((job.metadata.uid, attempt))
        if found is None or not 0 <= rank < found.job.spec.world_size:
            raise NotFound(f"job {job.key} has no rank {rank} in attempt {attempt}")
        yield f"rank {rank}"

    async def changes(self) -> AsyncIterator[str]:
        async with aclosing(self._keys.follow()) as keys:
            async for key in keys:
                yield key

    # -------------------------------------------------- what a test does to it

    def restart(self) -> None:
        """A new controller: what runs goes on, the queue is forgotten."""
        for key in [key for key, attempt in self.attempts.items() if attempt.queued]:
            del self.attempts[key]

    def tell(self, key: str) -> None:
        """Something moved in the job's attempt."""
        self._keys.publish(key)

    def running(self, uid: str) -> list[Attempt]:
        return [a for (of, _), a in self.attempts.items() if of == uid and a.alive]

    def end(self, job: TrainingJob, attempt: int, replica: int, code: int) -> None:
        """A replica ends by itself with this exit code."""
        self._end(self.attempts[job.metadata.uid, attempt], replica, code, None)

    def fail(self, job: TrainingJob, attempt: int, replica: int, step: int, error: str) -> None:
        """The trainer of a replica says that it fails after this step, all before it being durable."""
        found = self.attempts[job.metadata.uid, attempt]
        self._end(found, replica, 1, Termination("failed", step, step, error))

    def find_no_storage(self, job: TrainingJob, attempt: int) -> None:
        """The run directory's disk is full: no rank can begin."""
        for replica in range(job.spec.replicas):
            message = Termination("failed", 0, 0, "there is no room to begin", storage_unavailable=True)
            self._end(self.attempts[job.metadata.uid, attempt], replica, 1, message)

    def fall_silent(self, job: TrainingJob, attempt: int) -> None:
        """All its ranks stand still: they take connections and answer none."""
        self.attempts[job.metadata.uid, attempt].silence = Silence(400.0, 300.0, False, 9)

    def leave_out(self, job: TrainingJob, attempt: int, replica: int) -> None:
        """There is no room for this one."""
        found = self.attempts[job.metadata.uid, attempt]
        if sum(one.state is ReplicaState.RUNNING for one in found.replicas) > 1:
            found.replicas[replica] = ReplicaObservation(
                replica, ReplicaState.PENDING, "Unschedulable: no room", stuck=Verdict.UNSCHEDULABLE
            )

    def find_no_image(self, job: TrainingJob, attempt: int) -> None:
        """All have their nodes, and no node can pull the image."""
        at = datetime.fromtimestamp(self._clock(), UTC)
        self.attempts[job.metadata.uid, attempt].replicas = [
            ReplicaObservation(
                index, ReplicaState.PENDING, "ErrImagePull: not found", stuck=Verdict.IMAGE_PULL, placed_at=at
            )
            for index in range(job.spec.replicas)
        ]

    def vanish(self, job: TrainingJob, attempt: int, replica: int) -> None:
        """The platform takes a replica."""
        found = self.attempts[job.metadata.uid, attempt]
        self._end(found, replica, None, None, disrupted=True, reason="Vanished")

    def _end(
        self,
        attempt: Attempt,
        index: int,
        code: int | None,
        termination: Termination | None,
        disrupted: bool = False,
        reason: str = "",
    ) -> None:
        replica = attempt.replicas[index]
        if replica.state in (ReplicaState.SUCCEEDED, ReplicaState.FAILED):
            return
        now = self._clock()
        attempt.replicas[index] = replace(
            replica,
            state=ReplicaState.SUCCEEDED if code == 0 else ReplicaState.FAILED,
            reason=reason,
            disrupted=disrupted,
            exit_code=code,
            exit_signal=9 if code is None else None,
            termination=termination,
            ranks=() if code is None else (RankExit(index, code, None, now),),
            ended_at=now,
        )
        self._admit()
        self._keys.publish(attempt.job.key)
