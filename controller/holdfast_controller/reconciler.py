"""Observe, decide, act, for every job that may have changed.

Level-triggered: a pass looks at the job and its attempt as they are now, whatever woke it up, and
policy/decide.py says what to do. Each act is idempotent and the status is written before an attempt
starts, so a controller may die at any line and the next one goes on from there. Progress alone is written
at most once a second; the end of the controller stops no attempt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, cast

import structlog

from .cluster import AttemptObservation, Conflict, Engine, Event, HoldfastError, JobStore, NotFound
from .jobs import Status, TrainingJob, Verdict
from .metrics import Metrics
from .policy.classify import classify
from .policy.decide import Decision, Evidence, decide, open_record, over
from .policy.peers import SETTLE_SECONDS
from .queueing import WorkQueue

RESYNC_SECONDS = 30.0
PROGRESS_SECONDS = 1.0
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 30.0
TAIL_LINES = 20
TAIL_CHARACTERS = 4000
TAIL_RANKS = 8

log = structlog.get_logger(__name__)


def utcnow() -> datetime:
    return datetime.now(UTC)


class Reconciler:
    """Carries every job of a store through its attempts on one engine."""

    def __init__(
        self,
        store: JobStore,
        engine: Engine,
        *,
        clock: Callable[[], datetime] = utcnow,
        metrics: Metrics | None = None,
        settle_seconds: float = SETTLE_SECONDS,
        workers: int = 4,
        progress_seconds: float = PROGRESS_SECONDS,
    ):
        self._store = store
        self._engine = engine
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._settle_seconds = settle_seconds
        self._workers = workers
        self._progress_seconds = progress_seconds
        self._queue = WorkQueue()
        self._retries: dict[str, int] = {}

    # ------------------------------------------------------------ the loops

    async def run(self) -> None:
        """For ever. Cancel it to end it: it ends between two acts."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._again("watch", self._follow_jobs))
                tasks.create_task(self._again("changes", self._follow_attempts))
                tasks.create_task(self._again("resync", self._resync))
                for _ in range(self._workers):
                    tasks.create_task(self._work())
        finally:
            self._queue.close()

    async def _again(self, what: str, follow: Callable[[], Any]) -> None:
        """A stream that breaks is opened again: it tells all there is, so nothing is missed."""
        failures = 0
        while True:
            try:
                await follow()
                failures = 0
            except HoldfastError as error:
                failures += 1
                log.warning("a stream broke and is opened again", stream=what, error=str(error))
                await asyncio.sleep(_retry_seconds(failures))

    async def _follow_jobs(self) -> None:
        async with aclosing(cast("Any", self._store.watch())) as changes:
            async for change in changes:
                key = change.job.key
                if change.type == "DELETED":
                    self._metrics.jobs.pop(key, None)
                else:
                    self._metrics.jobs[key] = change.job
                self._wake(key)

    async def _follow_attempts(self) -> None:
        async with aclosing(cast("Any", self._engine.changes())) as keys:
            async for key in keys:
                self._wake(key)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for job in await self._store.list_jobs():
                self._wake(job.key)

    def _wake(self, key: str) -> None:
        self._queue.add(key)
        self._metrics.queue_depth.set(len(self._queue))

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            self._metrics.queue_depth.set(len(self._queue))
            started = time.perf_counter()
            try:
                after = await self.reconcile(key)
                self._retries.pop(key, None)
            except Conflict:
                after = 0.02  # somebody wrote first: look again
            except Exception as error:  # one job's trouble must not end the others'
                after = self._failed(key, error)
            finally:
                self._queue.done(key)
                self._metrics.reconcile_seconds.observe(time.perf_counter() - started)
            if after is not None:
                self._queue.add_after(key, after)

    def _failed(self, key: str, error: Exception) -> float:
        self._retries[key] = self._retries.get(key, 0) + 1
        self._metrics.reconcile_errors.inc()
        after = _retry_seconds(self._retries[key])
        expected = isinstance(error, HoldfastError)
        log.error(
            "a pass failed and is tried again", job=key, error=str(error), after=after, exc_info=not expected
        )
        return after

    # ------------------------------------------------------------- one pass

    async def reconcile(self, key: str) -> float | None:
        """One pass over one job. Returns the seconds until it should be looked at again, if ever.

        Raises Conflict where the job changed meanwhile, and whatever store and engine raise.
        """
        namespace, _, name = key.partition("/")
        try:
            job = await self._store.get(namespace, name)
        except NotFound:
            return None
        observation = await self._engine.observe(job, job.status.attempt) if job.status.attempt else None
        evidence = await self._gather(job, observation)
        decision = decide(job, observation, evidence, self._clock(), self._settle_seconds)
        return await self._carry_out(job, decision)

    async def _carry_out(self, job: TrainingJob, decision: Decision) -> float | None:
        """Stop and kill, write, start, tell: in this order a crash between any two loses nothing."""
        if decision.stop is not None:
            await self._engine.stop(job, decision.stop)
        if decision.kill is not None:
            await self._engine.kill(job, decision.kill)
        if decision.remove:
            await self._engine.delete(job)
            await self._store.remove(job)
            return None
        after = decision.requeue_after
        wait = seconds_to_write(job.status, decision.status, self._clock(), self._progress_seconds)
        if wait == 0:
            job = await self._store.replace_status(job, decision.status)
        elif wait is not None:
            after = wait if after is None else min(after, wait)
        if decision.start is not None:
            await self._engine.start(job, decision.start)
        for event in decision.events:
            await self._tell(job, event)
        return after

    async def _tell(self, job: TrainingJob, event: Event) -> None:
        log.info(event.message, job=job.key, reason=event.reason)
        await self._store.record_event(job, event)

    async def _gather(self, job: TrainingJob, observation: AttemptObservation | None) -> Evidence:
        """Read what the decision needs, and no more: steps and logs only of an attempt that is over."""
        record = open_record(job.status)
        if record is None or observation is None or job.metadata.deletion_timestamp is not None:
            return Evidence()
        if over(record, observation):
            return Evidence(
                await self._engine.ledger(job),
                await self._engine.steps(job),
                await self._tails(job, observation),
            )
        if observation.exists and not observation.waiting and record.first_step_at is None:
            return Evidence(await self._engine.ledger(job))
        return Evidence()

    async def _tails(self, job: TrainingJob, observation: AttemptObservation) -> dict[str, str]:
        """The last lines of the ranks that tell most: of the first cause's replica, then of the others."""
        incident = classify(observation)
        if incident.verdict is Verdict.FINISHED:
            return {}
        per_replica = job.spec.processes_per_replica
        ranks = sorted(range(job.spec.world_size), key=lambda rank: rank // per_replica != incident.replica)
        tails = {}
        for rank in ranks[:TAIL_RANKS]:
            try:
                lines = [line async for line in self._logs(job, observation.attempt, rank)]
            except NotFound:
                continue
            if lines:
                tails[str(rank)] = "\n".join(lines)[-TAIL_CHARACTERS:]
        return tails

    def _logs(self, job: TrainingJob, attempt: int, rank: int) -> AsyncIterator[str]:
        return self._engine.logs(job, attempt, rank, tail=TAIL_LINES)


def seconds_to_write(
    old: Status, new: Status, now: datetime, every: float = PROGRESS_SECONDS
) -> float | None:
    """0: write it now; more: so many seconds are left; None: there is nothing to write.

    The trainer's figures move all the time: where nothing else changed, they are written once in `every`
    seconds.
    """
    if new == old:
        return None
    figures = {"progress", "message"}
    if old.phase is not new.phase or old.model_dump(exclude=figures) != new.model_dump(exclude=figures):
        return 0
    if old.progress is None or old.progress.updated_at is None or new.progress == old.progress:
        return 0
    left = every - (now - old.progress.updated_at).total_seconds()
    return max(0.0, left)


def _retry_seconds(failures: int) -> float:
    """Exponential, with jitter so that what failed together does not come back together."""
    longest = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures, 20))
    return longest * random.uniform(0.5, 1.0)
