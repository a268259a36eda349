"""The machine's clock is set while a controller has jobs, or the machine sleeps: figures stay true, and
nothing is ended or deleted before its time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fakes import MemoryEngine
from scene import Scene, make, play
from waiting import wait_until_async

from holdfast_controller.clock import ClockWatch, since_boot
from holdfast_controller.cluster import AttemptObservation, GpuUse, Place, RankExit
from holdfast_controller.jobs import AttemptRecord, JobProgress, Phase, Status, TrainingJob
from holdfast_controller.metrics import Metrics
from holdfast_controller.policy.clock_steps import ClockStep, moved
from holdfast_controller.policy.idle import follow
from holdfast_controller.policy.lost_work import Work
from holdfast_controller.policy.recovery import breakdown
from holdfast_controller.policy.writes import seconds_to_write
from holdfast_controller.reconciler import Reconciler
from holdfast_trainer.contract import Progress, Termination

BOOTED = 7200.0
"""Seconds that the machine has run as each story begins."""
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class PricedEngine(MemoryEngine):
    """On a node of 3.60 an hour; its trainer has spent all its time on steps."""

    def __init__(self, machine: Machine):
        super().__init__(clock=machine.scene.seconds)
        self._machine = machine

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        seen = await super().observe(job, attempt)
        seconds = self._machine.up - BOOTED
        told = Progress(
            attempt, int(seconds) + 1, 10_000, 0, "training", updated=self._machine.scene.seconds(),
            resumed_step=0, useful_seconds=seconds / 2, durable_seconds=0.0, resumed_seconds=0.0,
        )  # fmt: skip
        return replace(seen, progress=told, places=(Place("n", None, "", 1.8, "USD"),) * 2)


class Machine:
    """That of a scene: its clock, which can be set, and the seconds since it booted."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.up = BOOTED
        self.restart()

    def restart(self, **options: Any) -> None:
        """Another controller, which knows nothing of what was."""
        watch = ClockWatch(lambda: self.scene.now, lambda: self.up)
        self.scene.reconciler = Reconciler(
            self.scene.store, self.scene.engine, clock=lambda: self.scene.now, watch=watch, **options
        )

    def sleep(self, seconds: float) -> None:
        """Time goes by, whether the machine is awake or suspended."""
        self.up += seconds
        self.scene.now += timedelta(seconds=seconds)

    def set(self, seconds: float) -> None:
        self.scene.now += timedelta(seconds=seconds)


def on_a_machine(story: Callable[[Scene, Machine], Awaitable[None]]) -> None:
    async def played(scene: Scene) -> None:
        await story(scene, Machine(scene))

    play(played)


async def there(scene: Scene) -> bool:
    return bool(await scene.store.list_jobs())


@pytest.mark.parametrize("by", [3600, -3600])
def test_a_finished_job_is_deleted_at_its_time_and_not_when_the_clock_is_set(by: int) -> None:
    """Its checkpoints would be gone."""

    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=1800))
        assert (await scene.end(0, 0)).status.phase is Phase.SUCCEEDED
        machine.sleep(10)
        machine.set(by)
        await scene.look()
        assert scene.after == 1790
        machine.sleep(1789)
        await scene.look()
        machine.sleep(2)
        await scene.reconciler.reconcile("default/a")
        assert not await there(scene)

    on_a_machine(story)


def test_a_job_that_waits_for_its_first_look_is_moved_with_the_clock_too() -> None:
    """Of thousands of jobs the last ones wait for seconds after a controller's start. Such a one was deleted
    before its time."""

    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=1800))
        await scene.end(0, 0)
        machine.sleep(10)
        heard = Metrics()
        machine.restart(workers=0, metrics=heard)
        leads = asyncio.create_task(scene.reconciler.run())
        await wait_until_async(lambda: bool(heard.jobs), "the job to be heard of")
        machine.set(3600)
        await scene.look()
        assert scene.after == 1790
        leads.cancel()
        await asyncio.wait([leads])

    on_a_machine(story)


def test_a_controller_that_leads_again_moves_times_with_the_clock_as_before() -> None:
    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=1800))
        await scene.end(0, 0)
        for left in (1790, 1780):
            machine.sleep(10)
            machine.set(3600)
            await scene.look()
            assert scene.after == left
            leads = asyncio.create_task(scene.reconciler.run())
            await asyncio.sleep(0)
            leads.cancel()
            await asyncio.wait([leads])
            await scene.look()

    on_a_machine(story)


def test_what_finished_before_the_clock_was_set_wrong_is_kept_for_its_time_when_it_is_put_right() -> None:
    """No controller ran meanwhile: the job's end was told by a clock that was right."""

    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=3600))
        await scene.end(0, 0)
        machine.set(5 * 3600)
        machine.restart()
        await scene.look()
        machine.sleep(40)
        machine.set(-5 * 3600)
        await scene.look()
        assert scene.after == 3560

    on_a_machine(story)


def test_a_machine_that_boots_hours_ahead_deletes_nothing_before_ntp_has_set_its_clock() -> None:
    """As one whose hardware keeps local time, for another system's sake."""

    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=3600))
        await scene.end(0, 0)
        machine.sleep(60)
        machine.up = 20
        machine.set(5 * 3600)
        machine.restart()
        await scene.look()
        assert scene.after == 300
        machine.sleep(40)
        machine.set(-5 * 3600)
        await scene.look()
        assert scene.after == 3500
        machine.sleep(3501)
        await scene.reconciler.reconcile("default/a")
        assert not await there(scene)

    on_a_machine(story)


def test_the_hours_in_which_a_machine_sleeps_count() -> None:
    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=1800))
        await scene.end(0, 0)
        machine.sleep(8 * 3600)
        await scene.reconciler.reconcile("default/a")
        assert not await there(scene)

    on_a_machine(story)


@pytest.mark.parametrize("by", [3600, -3600, 6 * 365 * 86400])
def test_goodput_and_cost_know_of_no_hour_that_never_was(by: int) -> None:
    """A clock that was set forward made goodput a hundredth of itself, and cost an hour more; after one that
    was set back the status stood still until the clock had caught up."""

    async def story(scene: Scene, machine: Machine) -> None:
        scene.engine = PricedEngine(machine)
        machine.restart()
        await scene.submit(make())
        machine.sleep(100)
        await scene.look()
        machine.set(by)
        machine.sleep(100)
        status = (await scene.look()).status
        assert status.progress is not None
        assert (status.progress.step, status.progress.updated_at) == (201, scene.now)
        assert status.goodput == pytest.approx(0.5, abs=0.01)
        assert status.attempts[0].goodput == pytest.approx(0.5, abs=0.01)
        assert status.cost == pytest.approx(0.2, abs=0.005)
        told = [event for event in await scene.store.events("default", "a") if event.reason == "ClockSet"]
        assert [(event.type, event.count) for event in told] == [("Warning", 1)]
        way = "forward" if by > 0 else "back"
        assert told[0].message.startswith(f"the controller's clock was set {way} by ")

    on_a_machine(story)


def test_ranks_that_save_on_notice_keep_their_grace_when_the_clock_is_set() -> None:
    async def story(scene: Scene, machine: Machine) -> None:
        job = await scene.submit(make(graceSeconds=30))
        attempt = scene.engine.attempts[job.metadata.uid, 1]
        attempt.replicas[1] = replace(
            attempt.replicas[1],
            termination=Termination("interrupted", 5, 5),
            ranks=(RankExit(1, 0, None, scene.seconds()),),
        )
        await scene.look()
        machine.sleep(1)
        machine.set(3600)
        await scene.look()
        assert attempt.alive
        assert scene.after == 29
        machine.set(-7200)
        machine.sleep(30)
        await scene.look(passes=1)
        assert not attempt.alive, "it is over at its time, and not two hours later"

    on_a_machine(story)


def test_what_is_left_of_an_attempt_is_ended_soon_though_it_told_its_end_by_a_clock_that_was_ahead() -> None:
    async def story(scene: Scene, machine: Machine) -> None:
        job = await scene.submit(make(graceSeconds=30))
        scene.engine.vanish(job, 1, 1)
        machine.set(-3600)
        await scene.look()
        assert scene.after == 30
        machine.sleep(30)
        await scene.look(passes=1)
        assert not scene.engine.attempts[job.metadata.uid, 1].alive

    on_a_machine(story)


@pytest.mark.parametrize("restarted", [False, True], ids=["seen", "while no controller ran"])
def test_a_back_off_does_not_last_until_a_clock_that_was_set_back_has_caught_up(restarted: bool) -> None:
    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make())
        job = await scene.end(1, 1)
        assert job.status.next_start_at is not None
        machine.set(-3600)
        if restarted:
            machine.restart()
        else:
            await scene.look()
            assert scene.after is not None
            assert scene.after <= 1.0
            machine.sleep(1)
        assert (await scene.look()).status.attempt == 2

    on_a_machine(story)


def test_a_controller_that_has_just_started_moves_no_times() -> None:
    """Nobody knows by how much they are wrong."""

    async def story(scene: Scene, machine: Machine) -> None:
        await scene.submit(make())
        before = (await scene.look()).status
        machine.set(3600)
        machine.restart()
        assert (await scene.look()).status.attempts[0].opened_at == before.attempts[0].opened_at
        assert "ClockSet" not in await scene.reasons()

    on_a_machine(story)


def test_times_of_before_the_machine_booted_and_of_after_the_clock_was_set_are_left() -> None:
    """A machine that boots with a clock of long ago finds those of yesterday ahead of it."""
    step = ClockStep(booted=NOW, was=NOW + timedelta(hours=1), by=timedelta(days=30), began=NOW)
    times = [NOW - timedelta(seconds=1), NOW, NOW + timedelta(hours=1), NOW + timedelta(hours=2)]
    job = make()
    job.status = Status(attempts=[AttemptRecord(number=n, opened_at=at) for n, at in enumerate(times, 1)])
    after = [record.opened_at for record in moved(job, [step]).attempts]
    assert after == [times[0], times[1] + step.by, times[2] + step.by, times[3]]
    assert moved(job, ()) == job.status


def test_a_job_that_is_over_and_stays_is_left_as_it_is() -> None:
    job = make()
    job.status = Status(phase=Phase.FAILED, finished_at=NOW)
    step = ClockStep(NOW - timedelta(hours=1), NOW, timedelta(hours=1), NOW - timedelta(minutes=1))
    assert moved(job, [step]) is job.status


def test_figures_are_written_though_those_before_them_are_of_a_time_to_come() -> None:
    """As where the clock was set back while no controller ran."""
    old = Status(phase=Phase.RUNNING, progress=JobProgress(step=10, updated_at=NOW + timedelta(hours=1)))
    new = old.model_copy(update={"progress": JobProgress(step=11, updated_at=NOW + timedelta(hours=1))})
    assert seconds_to_write(old, new, NOW) == 0


def test_no_stage_of_a_recovery_is_negative_where_its_times_are_of_two_clocks() -> None:
    def at(seconds: float) -> datetime:
        return NOW + timedelta(seconds=seconds)

    lost = AttemptRecord(number=1, last_sign_at=at(3600), detected_at=at(1), ended_at=at(2))
    back = AttemptRecord(number=2, opened_at=at(3), started_at=at(4), first_step_at=at(60))
    stages: Any = breakdown(lost, back, Work(0, 1, 0))
    assert stages is not None
    assert min(stages.stages().values()) >= 0


def test_what_is_known_of_a_gpu_is_forgotten_when_the_clock_is_set_back() -> None:
    use = GpuUse("default/a", 1, 0, "GPU-0", 0.0)
    gap = timedelta(seconds=30)
    first = follow(None, use, NOW, gap)
    again = follow(first, use, NOW - timedelta(hours=1), gap)
    assert again is not None
    assert again.since == NOW - timedelta(hours=1)


def test_this_machine_s_own_clock_is_not_set_between_two_looks() -> None:
    watch = ClockWatch()
    assert since_boot() > 0
    assert not watch.look()
    assert watch.steps == []
