"""From looks at a job's GPUs to a verdict, a condition, and an end: what is idle, and what nobody can say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from fakes import MemoryEngine, MemoryStore
from waiting import wait_until_async

from holdfast_controller.cluster import (
    AttemptObservation,
    Conflict,
    GpuUse,
    ReplicaObservation,
    ReplicaState,
    Unavailable,
)
from holdfast_controller.gpu_watch import GpuWatch
from holdfast_controller.jobs import (
    SILENT_SECONDS,
    AttemptRecord,
    Condition,
    Metadata,
    Phase,
    Spec,
    Status,
    TrainingJob,
)
from holdfast_controller.policy import idle
from holdfast_controller.policy.decide import Evidence, decide
from holdfast_controller.policy.decision import Decision
from holdfast_controller.policy.idle import GpuVerdict, Standing
from holdfast_controller.reconciler import Reconciler
from holdfast_controller.spec import Idle

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVERY = 10.0
Figures = Sequence[float | None]


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def a_job(**spec: object) -> TrainingJob:
    body = {"command": ["x"], "gpus": "1", "idle": "Stop", "idleSeconds": 60, **spec}
    return TrainingJob(metadata=Metadata(name="j"), spec=Spec.model_validate(body))


def uses(figures: Figures) -> list[GpuUse]:
    """One GPU after the other, each of a replica of its own."""
    return [
        GpuUse("default/j", 1, str(number), f"GPU-{number}", busy, str(number))
        for number, busy in enumerate(figures)
    ]


class Looks:
    """What one look after another finds; an error where nobody can tell."""

    def __init__(self, clock: Clock, *found: Figures | None):
        self.clock, self._found = clock, list(found)
        self.watch = GpuWatch(self._look, EVERY, clock)
        self.told: list[set[str]] = []

    async def _look(self) -> list[GpuUse]:
        figures = self._found.pop(0)
        if figures is None:
            raise Unavailable("no exporter answers")
        return uses(figures)

    def verdict(self, job: TrainingJob) -> GpuVerdict | None:
        """After all looks, EVERY seconds apart."""

        async def all_of_them() -> None:
            while self._found:
                self.told.append(await self.watch.look())
                self.clock.now += timedelta(seconds=EVERY)

        asyncio.run(all_of_them())
        return self.watch.verdict(job, 1)


REST, WORK = [0.01], [0.6]
CASES = [
    # what each look finds, what the job asks for -> standing, all of them
    ("at rest for long enough", [REST] * 7, {}, Standing.IDLE, True),
    ("not yet", [REST] * 6, {"idleSeconds": 100}, Standing.UNDECIDED, False),
    ("one look at work starts it anew", [*[REST] * 5, WORK, *[REST] * 5], {}, Standing.UNDECIDED, False),
    ("at work now", [*[REST] * 9, WORK], {}, Standing.USED, False),
    ("on the border is at work", [[idle.IDLE_BELOW]] * 9, {}, Standing.USED, False),
    ("never a figure", [[None]] * 9, {}, Standing.UNKNOWN, False),
    ("nobody answers", [None] * 9, {}, Standing.UNKNOWN, False),
    ("no GPU is seen to be the job's", [[]] * 9, {}, Standing.UNKNOWN, False),
    ("figures end", [*[REST] * 9, *[[None]] * 4], {}, Standing.UNKNOWN, False),
    ("a look that failed", [*[REST] * 3, None, *[REST] * 3], {}, Standing.IDLE, True),
    ("too long a gap", [*[REST] * 5, *[None] * 4, *[REST] * 2], {}, Standing.UNDECIDED, False),
    ("one of two", [[0.0, 0.9]] * 7, {"replicas": 2}, Standing.IDLE, False),
    ("one of two is not seen", [[0.0, None]] * 7, {"replicas": 2}, Standing.IDLE, False),
    ("one of two was never seen", [[0.0]] * 7, {"gpus": "2"}, Standing.IDLE, False),
    ("at work on a GPU that it did not ask for", [[0.0, 0.9]] * 7, {}, Standing.IDLE, False),
    ("both", [[0.0, 0.04]] * 7, {"gpus": "2"}, Standing.IDLE, True),
    ("a share is a GPU too", [REST] * 7, {"gpus": "0.25"}, Standing.IDLE, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("looks", "asks", "standing", "all_idle"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_verdict_needs_figures(
    looks: list[Figures | None], asks: dict[str, object], standing: Standing, all_idle: bool
) -> None:
    verdict = Looks(Clock(), *looks).verdict(a_job(**asks))
    assert verdict is not None
    assert (verdict.standing, verdict.all_idle) == (standing, all_idle)


def test_who_asks_for_no_gpu_or_before_anybody_can_know_gets_none() -> None:
    assert Looks(Clock(), *[REST] * 9).verdict(a_job(gpus="0")) is None
    assert Looks(Clock()).verdict(a_job()) is None
    assert Looks(Clock(), [], []).verdict(a_job()) is None


def test_what_runs_on_gpus_has_a_verdict_though_its_job_asks_for_none_by_now() -> None:
    """The job was edited for its next attempt: until then an idle GPU was idle without a word."""
    job = a_job(gpus="0")
    job.status.attempts = [AttemptRecord(number=1, replicas=1, processes=1, gpus="1")]
    verdict = Looks(Clock(), *[REST] * 7).verdict(job)
    assert verdict is not None
    assert (verdict.standing, verdict.all_idle) == (Standing.IDLE, True)


def test_a_verdict_names_what_it_is_about_and_comes_in_time() -> None:
    clock = Clock()
    looks = Looks(clock, *[[0.02, 0.9]] * 3, *[[0.03, 0.0]] * 5)
    verdict = looks.verdict(a_job(replicas=2))
    assert verdict is not None
    assert verdict.message == (
        "1 of 2 GPUs not used: GPU-0 of replica 0 rank 0, at most 3% busy since 2026-01-01 12:00 UTC"
    )
    assert verdict.decided_in == 10, "the other has rested for 50 s of 60"
    changed = [number for number, told in enumerate(looks.told) if told]
    assert changed == [0, 3], "a job is looked at when its GPUs come to rest, not at every look"
    many = Looks(Clock(), *[[0.0] * 6] * 7).verdict(a_job(replicas=6))
    assert many is not None
    assert many.message.startswith("6 of 6 GPUs not used: GPU-0 of")
    assert many.message.endswith("UTC; and 2 more")


def test_the_condition_moves_when_what_it_says_does() -> None:
    status, spec = Status(), a_job(idle="Report").spec

    def after(verdict: GpuVerdict | None, minutes: int) -> tuple[str, Condition | None]:
        told = idle.judged(status, verdict, spec, START + timedelta(minutes=minutes))
        return told, next(iter(status.conditions), None)

    def idle_now(message: str) -> GpuVerdict:
        return GpuVerdict(Standing.IDLE, message, all_idle=True)

    for nothing in (
        None,
        GpuVerdict(Standing.USED),
        GpuVerdict(Standing.UNKNOWN),
        GpuVerdict(Standing.UNDECIDED),
    ):
        assert after(nothing, 0) == ("", None)
    told, first = after(idle_now("GPU-0 rests"), 1)
    assert told == "GPU-0 rests"
    assert first is not None
    assert (first.type, first.status, first.reason, first.message) == ("GPUsIdle", "True", "Idle", told)
    assert after(idle_now("GPU-0 rests on"), 2) == ("", first)
    assert after(GpuVerdict(Standing.UNDECIDED), 3) == ("", first), "a controller that began anew"
    _, blind = after(GpuVerdict(Standing.UNKNOWN), 4)
    assert blind is not None
    assert (blind.status, blind.message) == ("Unknown", "no figures now; before: GPU-0 rests")
    assert after(idle_now("again"), 5)[0] == "again"
    _, used = after(GpuVerdict(Standing.USED), 6)
    assert used is not None
    assert (used.status, used.reason, used.message) == ("False", "InUse", "")
    assert used.last_transition_time == START + timedelta(minutes=6)
    after(idle_now("once more"), 7)
    idle.at_rest(status, spec, START)
    assert (status.conditions[0].status, status.conditions[0].reason) == ("False", "NotRunning")
    assert not idle.to_be_stopped(status, Idle.STOP)


class _Overtaken(MemoryStore):
    """A user writes first, who does not want his job to be stopped any more."""

    overtaken = False

    async def replace_spec(self, job: TrainingJob) -> TrainingJob:
        if job.spec.suspend and not self.overtaken:
            self.overtaken = True
            edited = await self.get("default", "j")
            edited.spec = edited.spec.model_copy(update={"idle": Idle.REPORT})
            await super().replace_spec(edited)
        return await super().replace_spec(job)


def test_a_job_that_is_not_to_be_stopped_any_more_as_it_is_found_idle_goes_on() -> None:
    async def story() -> None:
        clock, store, engine = Clock(), _Overtaken(), MemoryEngine()

        async def look() -> list[GpuUse]:
            return [GpuUse("default/j", 1, "0", "GPU-0", 0.0, "0")]

        watch = GpuWatch(look, EVERY, clock)
        reconciler = Reconciler(store, engine, clock=clock, gpus=watch)
        await store.create(a_job())
        for _ in range(10):
            await watch.look()
            for _ in range(3):
                with suppress(Conflict):
                    await reconciler.reconcile("default/j")
            clock.now += timedelta(seconds=EVERY)
        job = await store.get("default", "j")
        assert store.overtaken
        assert (job.spec.suspend, job.status.phase) == (False, Phase.STARTING)

    asyncio.run(story())


def test_what_nobody_has_foreseen_of_a_gpu_ends_no_controller() -> None:
    """Its looks go on, and what they find counts again."""

    async def story() -> None:
        clock, store, looks = Clock(), MemoryStore(), 0

        async def look() -> list[GpuUse]:
            nonlocal looks
            looks += 1
            if looks < 3:
                raise TypeError("a figure of a kind that no version has had")
            return uses([0.0])

        watch = GpuWatch(look, 0.01, clock)
        running = asyncio.ensure_future(Reconciler(store, MemoryEngine(), clock=clock, gpus=watch).run())
        try:
            await wait_until_async(lambda: looks > 3 or running.done(), "it to look on")
            assert not running.done()
            assert watch.verdict(a_job(), 1) is not None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


def test_an_idle_job_is_suspended_and_resumed() -> None:
    """Through the reconciler: told once, stopped as a user would, and given another chance."""

    async def story() -> None:
        clock, store, engine = Clock(), MemoryStore(), MemoryEngine()
        at_rest = [0.0]
        attempt = 1

        async def look() -> list[GpuUse]:
            return [GpuUse("default/j", attempt, "0", "GPU-0", at_rest[0], "0")]

        watch = GpuWatch(look, EVERY, clock)
        reconciler = Reconciler(store, engine, clock=clock, gpus=watch)
        await store.create(a_job())

        async def seconds(number: int) -> TrainingJob:
            for _ in range(number // int(EVERY)):
                await watch.look()
                for _ in range(3):
                    await reconciler.reconcile("default/j")
                clock.now += timedelta(seconds=EVERY)
            return await store.get("default", "j")

        job = await seconds(60)
        assert (job.spec.suspend, job.status.phase) == (False, Phase.STARTING)
        job = await seconds(20)
        assert (job.spec.suspend, job.status.phase) == (True, Phase.SUSPENDED)
        why = "1 of 1 GPUs not used: GPU-0 of replica 0 rank 0, at most 0% busy since 2026-01-01 12:00 UTC"
        assert job.status.message == f"suspended, for {why}; resume to go on"
        conditions = {one.type: (one.status, one.reason) for one in job.status.conditions}
        assert conditions["GPUsIdle"] == ("False", "Stopped")
        events = [(e.reason, e.message, e.count) for e in await store.events("default", "j")]
        stops = "it is suspended after a checkpoint, for idle is Stop"
        assert ("GPUsIdle", f"{why}; {stops}", 1) in events

        attempt, at_rest[0] = 2, 0.5
        await store.replace_spec(
            job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": False})})
        )
        job = await seconds(100)
        assert (job.spec.suspend, job.status.attempt) == (False, 2)
        conditions = {one.type: (one.status, one.reason) for one in job.status.conditions}
        assert conditions["GPUsIdle"] == ("False", "InUse")

    asyncio.run(story())


def test_a_job_that_takes_the_name_of_an_idle_one_is_judged_by_its_own_looks() -> None:
    async def story() -> None:
        clock, store, engine = Clock(), MemoryStore(), MemoryEngine()
        looks = Looks(clock, *[REST] * 9)
        reconciler = Reconciler(store, engine, clock=clock, gpus=looks.watch)

        async def seconds(number: int) -> TrainingJob:
            for _ in range(number // int(EVERY)):
                await looks.watch.look()
                clock.now += timedelta(seconds=EVERY)
            for _ in range(3):
                await reconciler.reconcile("default/j")
            return await store.get("default", "j")

        old = await store.create(a_job(idle="Report"))
        await seconds(0)
        job = await seconds(70)
        assert {one.type: one.status for one in job.status.conditions}["GPUsIdle"] == "True"
        await engine.delete(old)
        await store.remove(old)

        await store.create(a_job())
        await seconds(0)
        job = await seconds(20)
        assert job.status.phase is Phase.STARTING, "of its 60 s it has rested 20"
        verdict = looks.watch.verdict(job, 1)
        assert verdict is not None
        assert (verdict.standing, verdict.decided_in) == (Standing.UNDECIDED, 40)

    asyncio.run(story())


def test_what_was_seen_before_nobody_looked_for_long_says_nothing_of_now() -> None:
    """The machine slept, or another controller led: the job may have worked all the while."""
    looks = Looks(Clock(), *[REST] * 7)
    idle_then = looks.verdict(a_job())
    assert idle_then is not None
    assert idle_then.all_idle
    looks.clock.now += timedelta(minutes=40)
    now = looks.watch.verdict(a_job(), 1)
    assert now is not None
    assert now.standing is Standing.UNKNOWN
    looks.watch.forget()
    assert looks.watch.verdict(a_job(), 1) is None


def test_a_controller_that_leads_no_more_forgets_what_it_saw_of_gpus() -> None:
    async def story() -> None:
        looks = Looks(Clock(), *[REST] * 2)
        reconciler = Reconciler(MemoryStore(), MemoryEngine(), clock=looks.clock, gpus=looks.watch)
        leading = asyncio.create_task(reconciler.run())
        await wait_until_async(lambda: looks.watch.verdict(a_job(), 1) is not None, "a look")
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        assert looks.watch.verdict(a_job(), 1) is None

    asyncio.run(story())


def test_a_job_that_cannot_be_read_whole_is_not_rewritten() -> None:
    """To suspend it would write a spec that lacks what could not be read."""

    async def story() -> None:
        clock, store, engine = Clock(), MemoryStore(), MemoryEngine()
        looks = Looks(clock, *[REST] * 8)
        reconciler = Reconciler(store, engine, clock=clock, gpus=looks.watch)
        await store.create(a_job())
        await reconciler.reconcile("default/j")
        job = await store.get("default", "j")
        for _ in range(8):
            await looks.watch.look()
            clock.now += timedelta(seconds=EVERY)
        verdict = looks.watch.verdict(job, 1)
        assert verdict is not None
        assert verdict.all_idle
        seen = await engine.observe(job, 1)
        assert decide(job, seen, Evidence(gpus=verdict), clock.now).suspend
        broken = job.with_faults(("spec.gpus: 'many' is no number",))
        assert not decide(broken, seen, Evidence(gpus=verdict), clock.now).suspend

    asyncio.run(story())


def test_only_an_attempt_that_is_to_go_on_is_stopped_for_idle_gpus() -> None:
    """One that has lost a member is ended soon and followed by another; and who has resumed his job while it
    still saved does not find it suspended again."""
    job = a_job(replicas=2)
    job.status.attempt = 1
    job.status.attempts = [AttemptRecord(number=1, opened_at=START, started_at=START, first_step_at=START)]
    all_idle = Evidence(gpus=GpuVerdict(Standing.IDLE, "2 of 2 GPUs not used", all_idle=True, decided_in=5.0))
    up = ReplicaObservation(0, ReplicaState.RUNNING)
    taken = ReplicaObservation(1, ReplicaState.FAILED, disrupted=True, ended_at=START.timestamp())

    def decided(*replicas: ReplicaObservation, stopping: bool = False) -> Decision:
        seen = AttemptObservation(1, exists=True, gone=False, replicas=replicas, stopping=stopping)
        return decide(job, seen, all_idle, START + timedelta(minutes=5))

    runs = decided(up, replace(up, index=1))
    assert (runs.suspend, runs.requeue_after) == (True, 5.0)
    for rests in (decided(up, taken), decided(up, replace(up, index=1), stopping=True)):
        assert not rests.suspend
        assert not idle.to_be_stopped(rests.status, Idle.STOP)

    told = job.model_copy(update={"status": runs.status})  # and then the controller died
    seen, later = AttemptObservation(1, True, False, (up, replace(up, index=1))), START + timedelta(minutes=6)
    assert decide(told, seen, Evidence(), later).suspend
    asked = told.model_copy(update={"spec": a_job(replicas=2, idle="Report").spec})
    assert not decide(asked, seen, Evidence(), later).suspend


def test_a_look_for_idle_gpus_puts_off_no_other() -> None:
    job = a_job()
    job.status.attempt = 1
    job.status.attempts = [AttemptRecord(number=1, opened_at=START, started_at=START)]
    seen = AttemptObservation(1, True, False, (ReplicaObservation(0, ReplicaState.RUNNING),))
    rests = Evidence(gpus=GpuVerdict(Standing.UNDECIDED, decided_in=900.0))
    decision = decide(job, seen, rests, START + timedelta(seconds=20))
    assert decision.requeue_after == SILENT_SECONDS - 20, "then it is taken to run"
