"""Anything may happen, in any order, and the controller may die between any two of its acts.

Hypothesis submits, suspends, resumes and deletes jobs, lets replicas finish, fail and vanish, lets time
pass, and cuts passes short. Whatever it does:

- at most one attempt of a job runs, it is the one its status names, and none is started twice
- attempt numbers only grow, budgets never go back
- a job that is over stays as it was
- a pass changes nothing of the job that it was given: what it decides is a status of its own
- when things calm down every job ends, is suspended, or waits with a reason
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from fakes import Crash, Fuse, MemoryEngine, MemoryStore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast_controller.cluster import AlreadyExists, Conflict
from holdfast_controller.jobs import Metadata, Phase, Spec, Status, TrainingJob, Verdict
from holdfast_controller.policy.budget import DISRUPTIONS, FAILURES
from holdfast_controller.reconciler import Reconciler

T = TypeVar("T")
NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)


class GivingStore(MemoryStore):
    """Keeps what it has given, and how that was then."""

    def __init__(self, fuse: Fuse):
        super().__init__(fuse)
        self.given: list[tuple[TrainingJob, TrainingJob]] = []

    async def get(self, namespace: str, name: str) -> TrainingJob:
        job = await super().get(namespace, name)
        self.given.append((job, copy.deepcopy(job)))
        return job


class Life(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.fuse = Fuse()
        self.store = GivingStore(self.fuse)
        self.engine = MemoryEngine(slots=4, fuse=self.fuse, clock=self.seconds)
        self.seen: dict[str, Status] = {}
        self.new_controller()

    def seconds(self) -> float:
        return self.now.timestamp()

    def new_controller(self) -> None:
        self.engine.restart()
        self.reconciler = Reconciler(self.store, self.engine, clock=lambda: self.now, settle_seconds=1.0)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def job(self, name: str) -> TrainingJob | None:
        return next((j for j in self.do(self.store.list_jobs()) if j.metadata.name == name), None)

    # ------------------------------------------------------------ the user

    @rule(
        name=names,
        replicas=st.integers(1, 5),
        fewest=st.sampled_from([None, 1]),
        failures=st.integers(0, 2),
        ttl=st.sampled_from([None, 60]),
    )
    def submit(self, name: str, replicas: int, fewest: int | None, failures: int, ttl: int | None) -> None:
        spec = {
            "command": ["x"],
            "replicas": replicas,
            "minReplicas": fewest,
            "retries": {"failures": failures, "disruptions": 3},
            "ttlSecondsAfterFinished": ttl,
        }
        try:
            metadata = Metadata(name=name, creation_timestamp=self.now)
            self.do(self.store.create(TrainingJob(metadata=metadata, spec=Spec.model_validate(spec))))
        except AlreadyExists:
            pass

    @rule(name=names, suspend=st.booleans())
    def suspend_or_resume(self, name: str, suspend: bool) -> None:
        job = self.job(name)
        if job is not None:
            job.spec.suspend = suspend
            self.do(self.store.replace_spec(job))

    @rule(name=names)
    def delete(self, name: str) -> None:
        if self.job(name) is not None:
            self.do(self.store.mark_deleted("default", name))

    # -------------------------------------------------------- the platform

    @rule(
        name=names,
        replica=st.integers(0, 4),
        what=st.sampled_from(["vanish", "hang", "left out", 0, 0, 1, 78]),
    )
    def something_ends(self, name: str, replica: int, what: str | int) -> None:
        job = self.job(name)
        for attempt in self.engine.running(job.metadata.uid) if job is not None else ():
            assert job is not None
            if replica >= len(attempt.replicas):
                continue
            if what == "vanish":
                self.engine.vanish(job, attempt.number, replica)
            elif what == "hang":
                self.engine.fall_silent(job, attempt.number)
            elif what == "left out":
                self.engine.leave_out(job, attempt.number, replica)
            else:
                self.engine.end(job, attempt.number, replica, int(what))

    @rule(seconds=st.sampled_from([0.1, 1.5, 30, 400]))
    def time_passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # ------------------------------------------------------ the controller

    @rule(name=names, dies_after=st.sampled_from([None, None, 0, 1, 2, 3, 4, 5]))
    def look(self, name: str, dies_after: int | None) -> None:
        self.fuse.left = dies_after
        try:
            self.do(self.reconciler.reconcile(f"default/{name}"))
        except Crash:
            self.new_controller()
        except Conflict:
            pass
        self.fuse.left = None
        assert all(job == before for job, before in self.store.given)
        self.store.given.clear()

    @precondition(lambda self: len(self.engine.launched) > 0)
    @rule()
    def controller_dies(self) -> None:
        self.new_controller()

    # ---------------------------------------------------- what always holds

    @invariant()
    def one_attempt_at_a_time(self) -> None:
        launched = self.engine.launched
        assert len(set(launched)) == len(launched)
        for uid in {uid for uid, _ in launched}:
            assert len(self.engine.running(uid)) <= 1
            numbers = [number for of, number in launched if of == uid]
            assert numbers == sorted(numbers)

    @invariant()
    def nothing_goes_back(self) -> None:
        for job in self.do(self.store.list_jobs()):
            new, old = job.status, self.seen.get(job.metadata.uid)
            if old is not None:
                assert new.attempt >= old.attempt
                assert new.failures >= old.failures
                assert new.disruptions >= old.disruptions
                self.what_was_judged_stays(old, new)
                if old.phase.final:
                    assert (new.phase, new.finished_at, new.attempt) == (
                        old.phase,
                        old.finished_at,
                        old.attempt,
                    )
            assert all(a.number == new.attempt for a in self.engine.running(job.metadata.uid))
            assert [r.number for r in new.attempts] == sorted({r.number for r in new.attempts})
            assert all(r.verdict is not None for r in new.attempts[:-1])
            if new.phase.final:
                assert not self.engine.running(job.metadata.uid)
                assert new.finished_at is not None
            self.seen[job.metadata.uid] = new

    @invariant()
    def every_attempt_is_told_once(self) -> None:
        """Wherever a controller died: in between, before the next pass, it stands there too."""
        for job in self.do(self.store.list_jobs()):
            events = self.do(self.store.events("default", job.metadata.name))
            opened = [event.message for event in events if event.reason == "AttemptOpened"]
            newest = range(1, job.status.attempt + 1)[-20:]  # of more events than are kept the oldest go
            assert opened[-20:] == [f"attempt {number} opened" for number in newest]

    def what_was_judged_stays(self, old: Status, new: Status) -> None:
        """A verdict, and what an attempt is ended for, are told once; each counts where it belongs."""
        before = {record.number: record for record in old.attempts}
        for record in new.attempts:
            known = before.get(record.number)
            if known is not None and known.verdict is not None:
                assert record.verdict is known.verdict
            if known is not None and known.ending is not None:
                assert record.ending is known.ending
            if record.verdict in (Verdict.HUNG, Verdict.UNSCHEDULABLE):
                assert record.ending is record.verdict
        if new.attempt <= 20:  # all are remembered
            verdicts = [record.verdict for record in new.attempts]
            counted = [*FAILURES, Verdict.CONFIG_ERROR]
            assert new.failures == sum(verdict in counted for verdict in verdicts)
            assert new.disruptions == sum(verdict in DISRUPTIONS for verdict in verdicts)

    # ------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(60):  # calm: nothing new happens, what runs finishes
            for job in self.do(self.store.list_jobs()):
                for attempt in self.engine.running(job.metadata.uid):
                    for replica in range(len(attempt.replicas)):
                        self.engine.end(job, attempt.number, replica, 0)
                self.do(self.reconciler.reconcile(job.key))
            self.now += timedelta(seconds=5)
        for job in self.do(self.store.list_jobs()):
            assert job.metadata.deletion_timestamp is None
            status = job.status
            if job.spec.suspend:
                assert status.phase in (Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED)
            elif job.spec.replicas > self.engine.slots:
                assert status.phase is Phase.QUEUED
                assert status.message.startswith("cannot run as it is: asks for 5 slots;")
            else:
                assert status.phase.final, (status.phase, status.message)
            assert status.message
            self.nothing_goes_back()
        self.loop.close()


Life.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestLife = Life.TestCase
