"""Observe, decide, act, for every job that may have changed.

Level-triggered: a pass looks at the job and its attempt as they are now, whatever woke it up, and
policy/decide.py says what to do. Each act is idempotent and the status is written before an attempt
starts, so a controller may die at any line and the next one goes on from there. What changes all the time,
progress and the reason of a wait, is written at most so often (policy/writes.py); the end of the controller
stops no attempt.

Nothing is done for all jobs at once: who was not heard of for `resync_seconds` is looked at all the same,
one after the other; one that is over, of which there may be thousands, for `OVER_TURNS` times as long.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import structlog

from .clock import ClockWatch
from .cluster import AttemptObservation, Conflict, Engine, Event, HoldfastError, JobStore, NotFound, NotReady
from .failed_passes import FailedPasses
from .gpu_watch import GpuWatch
from .job_series import JobFigures
from .jobs import TAIL_RANKS, Status, TrainingJob, Verdict, utcnow
from .metrics import Metrics
from .policy import clock_steps
from .policy.classify import classify
from .policy.decide import Evidence, decide, open_record, over
from .policy.decision import Decision
from .policy.explain import is_edited
from .policy.half_placed import PLACE_SECONDS
from .policy.peers import SETTLE_SECONDS
from .policy.refused import could_not_delete, could_not_end, could_not_start, waits_to_start
from .policy.tails import C_STACK_LINES, last_told
from .policy.writes import PROGRESS_SECONDS, seconds_to_write
from .queueing import WorkQueue

RESYNC_SECONDS = 30.0
CLOCK_SECONDS = 1.0
"""Between two looks at whether the machine's clock was set; each pass looks too."""
SLICE_SECONDS = 0.5
"""Between two groups of jobs of one resync."""
OVER_TURNS = 10
"""Resyncs in which each job that is over is looked at once."""
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 30.0
TAIL_LINES = 20
TAIL_CHARACTERS = 4000
TAIL_TRIES = 3
"""Passes that fail because a log cannot be read, before the attempt is judged without it."""
TAILS_SECONDS = 5.0
"""For a log to be read."""

log = structlog.get_logger(__name__)


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
        place_seconds: float = PLACE_SECONDS,
        workers: int = 4,
        progress_seconds: float = PROGRESS_SECONDS,
        waiting_seconds: float = 0.0,
        resync_seconds: float = RESYNC_SECONDS,
        gpus: GpuWatch | None = None,
        watch: ClockWatch | None = None,
    ):
        """`progress_seconds` and `waiting_seconds` lie between two writes, see policy/writes.py; `watch` is
        of `clock`, None where nobody sets that."""
        self._store = store
        self._engine = engine
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._settle_seconds = settle_seconds
        self._place_seconds = place_seconds
        self._workers = workers
        self._progress_seconds = progress_seconds
        self._waiting_seconds = waiting_seconds
        self._resync_seconds = resync_seconds
        self._gpus = gpus
        self._watch = watch
        self._queue = WorkQueue()
        self._metrics.queue_depth.set_function(lambda: len(self._queue))
        self._failed_passes = FailedPasses()
        self._wrote: dict[str, datetime] = {}
        """When we last wrote a job's status, by key."""
        self._moved: dict[str, int] = {}
        """With how many steps of the clock a job's times were moved, by key."""

    # ------------------------------------------------------------ the loops

    async def run(self) -> None:
        """For ever. Cancel it to end it: it ends between two acts. It may be called again after that."""
        if self._watch is not None:
            self._watch.begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._again("watch", self._follow_jobs))
                tasks.create_task(self._again("changes", self._follow_attempts))
                tasks.create_task(self._again("resync", self._resync))
                if self._gpus is not None:
                    tasks.create_task(self._follow_gpus(self._gpus))
                if self._watch is not None:
                    tasks.create_task(self._follow_clock())
                for _ in range(self._workers):
                    tasks.create_task(self._work())
        finally:
            self._forget()

    def _forget(self) -> None:
        """All that was seen: whoever acts next tells of the jobs from now on, and some may go meanwhile."""
        self._queue.close()
        self._failed_passes.clear()
        self._wrote.clear()
        self._moved.clear()
        self._metrics.jobs.clear()
        if self._gpus is not None:
            self._gpus.forget()

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
                    self._wrote.pop(key, None)
                    self._moved.pop(key, None)
                else:
                    self._note_figures(change.job)
                    self._moved_until(key)
                self._wake(key)

    def _note_figures(self, job: TrainingJob) -> None:
        try:
            self._metrics.jobs[job.key] = JobFigures.of(job)
        except Exception as error:  # one job's trouble must not end the others'
            self._metrics.jobs.pop(job.key, None)
            log.error("a job has no figures", job=job.key, error=repr(error)[:200], exc_info=True)

    async def _follow_attempts(self) -> None:
        async with aclosing(cast("Any", self._engine.changes())) as keys:
            async for key in keys:
                self._wake(key)

    async def _follow_gpus(self, gpus: GpuWatch) -> None:
        while True:
            for key in await gpus.look():
                self._wake(key)
            await asyncio.sleep(gpus.every_seconds)

    async def _follow_clock(self) -> None:
        assert self._watch is not None
        known = 0
        while True:
            self._watch.look()
            if len(self._watch.steps) != known:
                known = len(self._watch.steps)
                for key in list(self._metrics.jobs):
                    self._wake(key)
            await asyncio.sleep(CLOCK_SECONDS)

    async def _resync(self) -> None:
        """Level-triggered in earnest: what nobody told of is seen in the end."""
        for turn in itertools.count():
            waiting = deque(_in_turn(self._metrics.jobs, turn))
            size = math.ceil(len(waiting) * SLICE_SECONDS / self._resync_seconds)
            ends = asyncio.get_running_loop().time() + self._resync_seconds
            while waiting:
                await asyncio.sleep(SLICE_SECONDS)
                for _ in range(min(size, len(waiting))):
                    self._wake(waiting.popleft())
            await asyncio.sleep(max(SLICE_SECONDS, ends - asyncio.get_running_loop().time()))

    def _wake(self, key: str) -> None:
        self._queue.add(key)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            started = time.perf_counter()
            try:
                after = await self.reconcile(key)
                self._failed_passes.end(key)
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
        self._metrics.reconcile_errors.inc()
        tell = self._failed_passes.add(key, repr(error))
        passes = self._failed_passes.count(key)
        after = _retry_seconds(passes)
        if tell:
            log.error(
                "a pass failed and is tried again",
                job=key,
                error=str(error),
                passes=passes,
                within=after,
                exc_info=not isinstance(error, HoldfastError),
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
        job = await self._by_the_clock(job)
        observation = await self._engine.observe(job, job.status.attempt) if job.status.attempt else None
        self._metrics.looked_at(key, observation)
        evidence = await self._gather(job, observation)
        if self._gpus is not None:
            evidence = replace(evidence, gpus=self._gpus.verdict(job, job.status.attempt))
        if self._watch is not None:
            evidence = replace(evidence, watched_from=self._watch.began)
        decision = decide(
            job, observation, evidence, self._clock(), self._settle_seconds, self._place_seconds
        )
        return await self._carry_out(job, decision)

    async def _by_the_clock(self, job: TrainingJob) -> TrainingJob:
        """The job as it stands, written anew where the clock was set: nothing is to be decided by times that
        are not of the same clock as now."""
        if self._watch is None:
            return job
        self._watch.look()
        steps = self._watch.steps
        unknown = steps[self._moved_until(job.key) :]
        if not unknown:
            return job
        status = clock_steps.moved(job, unknown)
        if status != job.status:
            event = Event(self._clock(), "Warning", "ClockSet", clock_steps.said(unknown))
            job = await self._store.replace_status(job, status, event)
            _log(job, event)
            self._wrote.pop(job.key, None)
        self._moved[job.key] = len(steps)
        return job

    def _moved_until(self, key: str) -> int:
        """How many steps of the clock the job's times have seen: at first those of before it was heard of."""
        return 0 if self._watch is None else self._moved.setdefault(key, len(self._watch.steps))

    async def _carry_out(self, job: TrainingJob, decision: Decision) -> float | None:
        """Stop and kill, write what it is and tell it, suspend or start: so a crash between any two loses
        nothing."""
        await self._end(job, decision)
        if decision.remove:
            await self._remove(job, decision)
            return None
        job, left = await self._write(job, decision.status, decision.events)
        after = decision.requeue_after
        if left is not None:
            after = left if after is None else min(after, left)
        try:
            if decision.suspend:
                # Decided anew where somebody writes first: he may have written that it is to go on.
                spec = job.spec.model_copy(update={"suspend": True})
                await self._store.replace_spec(job.model_copy(update={"spec": spec}))
            if decision.start is not None:
                await self._engine.start(job, decision.start)
        except HoldfastError as error:
            if decision.start is not None and not isinstance(error, Conflict):
                await self._say_why(job, could_not_start(decision.start, error))
            raise
        return after

    async def _remove(self, job: TrainingJob, decision: Decision) -> None:
        try:
            if job.metadata.deletion_timestamp is None:
                # First: one whose user has given it a longer life meanwhile keeps all that it has.
                meta = job.metadata
                with suppress(NotFound):
                    job = await self._store.mark_deleted(meta.namespace, meta.name, known=job)
            await self._engine.delete(job)
        except Conflict:
            raise
        except HoldfastError as error:
            await self._stays(job, could_not_delete(error))
            raise
        if job.kept_by:
            job, _ = await self._write(job, decision.status, decision.events)
        await self._store.remove(job)

    async def _end(self, job: TrainingJob, decision: Decision) -> None:
        attempt = decision.stop if decision.kill is None else decision.kill
        try:
            if decision.stop is not None:
                await self._engine.stop(job, decision.stop)
            if decision.kill is not None:
                await self._engine.kill(job, decision.kill, stacks=decision.stacks)
        except HoldfastError as error:
            if attempt is not None and not isinstance(error, Conflict) and not job.status.phase.final:
                await self._goes_on(job, decision, could_not_end(attempt, error))
            raise

    async def _goes_on(self, job: TrainingJob, decision: Decision, message: str) -> None:
        """An attempt that cannot be ended yet, which may take hours, has figures all the same."""
        events = decision.events
        if message != job.status.message:
            events = (*events, Event(self._clock(), "Warning", "StopFailed", message))
        told = decision.status.model_copy(update={"message": message})
        await self._write(job, told, events)

    async def _write(
        self, job: TrainingJob, status: Status, events: Sequence[Event]
    ) -> tuple[TrainingJob, float | None]:
        """The job with this status, and nothing; or as it was, and the seconds until a write is due, if ever.

        What is told, in `events`, must stand in the status: no later decision has them."""
        now = self._clock()
        wait = seconds_to_write(
            job.status,
            status,
            now,
            self._progress_seconds,
            self._waiting_seconds,
            self._wrote.get(job.key),
        )
        if wait is None or (wait > 0 and not events):
            return job, wait
        job = await self._store.replace_status(job, status, *events)
        _log(job, *events)
        self._wrote[job.key] = now
        return job, None

    async def _stays(self, job: TrainingJob, message: str) -> None:
        """Put into the job's status why it is not gone, where the store is not what is in the way."""
        if message != job.status.message:
            told = job.status.model_copy(update={"message": message})
            event = Event(self._clock(), "Warning", "DeleteFailed", message)
            with suppress(HoldfastError):
                _log(await self._store.replace_status(job, told, event), event)

    async def _say_why(self, job: TrainingJob, message: str) -> None:
        """Put into the job's status what was in the way of an attempt's start: it waits for that."""
        if message != job.status.message:
            now = self._clock()
            told = waits_to_start(job.status, message, now)
            event = Event(now, "Warning", "StartFailed", message)
            job = await self._store.replace_status(job, told, event)
            _log(job, event)

    async def _gather(self, job: TrainingJob, observation: AttemptObservation | None) -> Evidence:
        """Read what the decision needs, and no more: steps and logs only of an attempt that is over."""
        record = open_record(job.status)
        if job.metadata.deletion_timestamp is not None or job.status.phase.final:
            return Evidence()
        if record is None or observation is None:
            if job.faults:
                return Evidence(refusals=job.faults)
            plan = self._engine.plan(job)
            return Evidence(refusals=plan.reasons, waits=plan.waits)
        if over(record, observation):
            # All at once: the next attempt waits for this.
            ledger, steps, tails = await asyncio.gather(
                self._engine.ledger(job), self._steps(job), self._tails(job, observation)
            )
            return Evidence(ledger, steps, tails, self._refusals(job))
        if not observation.exists:
            return Evidence(refusals=self._refusals(job))
        refusals = self._refusals(job) if is_edited(record, job.spec) else ()
        if not observation.waiting and record.first_step_at is None:
            return Evidence(await self._engine.ledger(job), refusals=refusals)
        return Evidence(refusals=refusals)

    def _refusals(self, job: TrainingJob) -> tuple[str, ...]:
        """Why its next attempt could not start, whatever else is in the way."""
        return job.faults or self._engine.plan(job).reasons

    async def _steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        """None where only the run directory has them: the last word of rank 0 has their sums."""
        try:
            return await self._engine.ends_of_steps(job)
        except NotReady:
            return []

    async def _tails(self, job: TrainingJob, observation: AttemptObservation) -> dict[str, str]:
        """The last lines of the ranks that tell most: of the first cause's replica, then of the others.

        All are asked at once: the next attempt waits for this, and who does not answer takes nobody's time.
        """
        incident = classify(observation)
        if incident.verdict is Verdict.FINISHED:
            return {}
        spec = job.as_of(observation.attempt).spec
        if spec.world_size > TAIL_RANKS:
            await self._engine.keep_logs(job, observation.attempt)
        per_replica = spec.processes_per_replica
        ranks = sorted(range(spec.world_size), key=lambda rank: rank // per_replica != incident.replica)
        asked = ranks[:TAIL_RANKS]
        answers = await asyncio.gather(*(self._tail(job, observation.attempt, rank) for rank in asked))
        tails = {}
        for rank, lines in zip(asked, answers, strict=True):
            if isinstance(lines, HoldfastError) and self._failed_passes.count(job.key) < TAIL_TRIES:
                raise lines
            # A lost node never answers: there must be a verdict all the same.
            if isinstance(lines, Exception):
                lines = [f"(its log could not be read: {str(lines) or 'no answer in time'})"]
            if lines:
                tails[str(rank)] = "\n".join(lines)[-TAIL_CHARACTERS:]
        return tails

    async def _tail(
        self, job: TrainingJob, attempt: int, rank: int
    ) -> list[str] | HoldfastError | TimeoutError:
        """Its last lines, none where there is no log; or why they cannot be had."""
        try:
            async with asyncio.timeout(TAILS_SECONDS):
                asked = TAIL_LINES + C_STACK_LINES
                lines = [line async for line in self._engine.logs(job, attempt, rank, tail=asked)]
                return last_told(lines, TAIL_LINES)
        except NotFound:
            return []
        except (HoldfastError, TimeoutError) as error:
            return error


def _in_turn(jobs: Mapping[str, JobFigures], turn: int) -> list[str]:
    """Whom a resync looks at: all that are not over, and a part of the others, after some turns each."""
    going_on = [key for key, figures in jobs.items() if not figures.phase.final]
    are_over = [key for key, figures in jobs.items() if figures.phase.final]
    return going_on + are_over[turn % OVER_TURNS :: OVER_TURNS]


def _log(job: TrainingJob, *events: Event) -> None:
    for event in events:
        log.info(event.message, job=job.key, reason=event.reason)


def _retry_seconds(failures: int) -> float:
    """Exponential, with jitter so that what failed together does not come back together."""
    longest = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures, 20))
    return longest * random.uniform(0.5, 1.0)
