"""Jobs carried from submit to their end, with everything that may come between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fakes import MemoryEngine, MemoryStore
from scene import Scene, make, play, telling
from waiting import wait_until_async

from holdfast_controller.cli.description import _fact_rows
from holdfast_controller.cluster import AttemptObservation, NotFound, NotReady, Plan, Unavailable
from holdfast_controller.job_series import JobFigures
from holdfast_controller.jobs import SILENT_SECONDS, Phase, TrainingJob, Verdict
from holdfast_controller.metrics import Metrics
from holdfast_controller.reconciler import Reconciler
from holdfast_controller.spec import Checkpoint
from holdfast_trainer.contract import EXIT_CONFIG_ERROR, Progress


def conditions(job: TrainingJob) -> dict[str, str]:
    return {condition.type: condition.status for condition in job.status.conditions}


def test_a_job_that_just_works() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make())
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 1)
        assert conditions(job) == {"Admitted": "True"}
        job = await scene.end(0, 0)
        assert job.status.phase is Phase.SUCCEEDED
        assert conditions(job) == {"Admitted": "False", "Complete": "True"}
        assert job.status.attempts[0].verdict is Verdict.FINISHED
        assert job.status.attempts[0].lost_steps == 0
        assert (job.status.failures, job.status.disruptions) == (0, 0)
        assert await scene.reasons() == ["AttemptOpened", "Finished"]

    play(story)


def test_a_setting_that_another_wins_over_is_told_of_once() -> None:
    """A config that kept ten checkpoints by hand kept three as a job's, and nothing said so."""

    async def story(scene: Scene) -> None:
        command = ["python", "-m", "holdfast_trainer", "train"]
        await scene.submit(make(command=command, config={"checkpoint": {"keep": 10}}))
        await scene.end(1)
        scene.now += timedelta(minutes=10)
        await scene.look(passes=2)
        events = await scene.store.events("default", "a")
        (told,) = [one for one in events if one.reason == "SettingOverruled"]
        assert (told.type, told.count) == ("Warning", 1)
        assert told.message == (
            "spec.config.checkpoint.keep is 10, and has no effect: spec.checkpoint.keep, which is 3, wins; "
            "say there what is meant"
        )

    play(story)


def test_a_command_that_starts_ranks_itself_is_told_of_once() -> None:
    async def story(scene: Scene) -> None:
        await scene.submit(make(command=["torchrun", "train.py"], processes=2, replicas=2))
        await scene.end(1, 1)
        scene.now += timedelta(minutes=10)
        await scene.look(passes=2)
        assert await scene.reasons() == ["AttemptOpened", "NestedLauncher", "Failed", "AttemptOpened"]
        (told,) = [one for one in await scene.store.events("default", "a") if one.reason == "NestedLauncher"]
        assert (told.type, told.count) == ("Warning", 1)
        assert told.message.startswith("spec.command names torchrun, which starts ranks of its own, while")
        assert "once for each of the job's ranks (4): name the program alone" in told.message

    play(story)


def test_a_disruption_is_answered_at_once_and_peers_are_ended_soon() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(retries={"failures": 0}))
        scene.engine.vanish(job, 1, 1)
        job = await scene.look()
        assert job.status.phase is Phase.RECOVERING
        assert job.status.message == "replica 1 is gone (Vanished); the others are being ended"
        assert scene.after == 1.0
        scene.now += timedelta(seconds=1)
        job = await scene.look(passes=3)  # kill, close and open, observe
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)
        assert (job.status.failures, job.status.disruptions) == (0, 1)
        assert job.status.attempts[0].reason == "replica 1: Vanished"
        assert job.status.attempts[0].log_tail == {"0": "rank 0", "1": "rank 1"}

    play(story)


def test_an_attempt_that_ran_and_of_which_nothing_is_left_was_lost() -> None:
    """As where somebody has deleted all of it: the next one has a number of its own."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(retries={"failures": 0}))
        del scene.engine.attempts[job.metadata.uid, 1]
        job = await scene.look()
        first, _ = job.status.attempts
        assert (first.verdict, first.reason) == (Verdict.DISRUPTED, "all that was known of it is gone")
        assert first.detected_at == first.ended_at == scene.now
        assert (job.status.failures, job.status.disruptions) == (0, 1)
        assert scene.engine.launched == [(job.metadata.uid, 1), (job.metadata.uid, 2)]

    play(story)


def test_an_attempt_whose_steps_are_out_of_reach_is_judged_all_the_same() -> None:
    """As on a cluster, where rank 0 is gone and its run directory is on a claim."""

    class OutOfReach(MemoryEngine):
        async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
            raise NotReady("they are on the claim")

    async def story(scene: Scene) -> None:
        scene.run_on(OutOfReach(clock=scene.seconds))
        await scene.submit(make())
        assert (await scene.end(0, 0)).status.phase is Phase.SUCCEEDED

    play(story)


def test_the_end_of_an_attempt_is_judged_by_the_ends_of_its_steps() -> None:
    """There may be millions of them, of which it needs the last."""

    class Long(MemoryEngine):
        async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
            raise AssertionError("they do not fit into memory")

        async def ends_of_steps(self, job: TrainingJob) -> list[dict[str, Any]]:
            return [{"attempt": 1, "step": step, "time": 1.0, "loss": 0.5} for step in (1, 10**7)]

    async def story(scene: Scene) -> None:
        scene.run_on(Long(clock=scene.seconds))
        await scene.submit(make())
        job = await scene.end(0, 0)
        assert job.status.attempts[0].last_step == 10**7

    play(story)


def test_a_reason_to_wait_that_is_told_too_soon_after_another_is_told_when_its_time_has_come() -> None:
    async def story(scene: Scene) -> None:
        scene.engine.slots = 2
        scene.reconciler = Reconciler(scene.store, scene.engine, clock=lambda: scene.now, waiting_seconds=3.0)
        await scene.store.create(make("before"))
        await scene.reconciler.reconcile("default/before")
        job = await scene.submit(make())
        assert (job.status.phase, scene.after) == (Phase.STARTING, 3.0)
        scene.now += timedelta(seconds=3)
        assert (await scene.look()).status.phase is Phase.QUEUED

    play(story)


class BehindEngine(MemoryEngine):
    """Its operator has the pods of many others to make first."""

    SAYS = "waits for the operator to make its pods"

    def plan(self, job: TrainingJob) -> Plan:
        return replace(super().plan(job), waits=self.SAYS)

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        seen = await super().observe(job, attempt)
        return replace(seen, waiting=self.SAYS) if seen.exists else seen


def test_what_a_job_will_wait_for_is_told_as_it_starts_and_needs_no_other_write() -> None:
    """Of a thousand that started together each was first said to start, and a moment later to wait."""

    async def story(scene: Scene) -> None:
        scene.run_on(BehindEngine(clock=scene.seconds))
        await scene.store.create(make())
        job = await scene.look(passes=1)
        assert (job.status.phase, job.status.message) == (Phase.QUEUED, BehindEngine.SAYS)
        assert conditions(job) == {"Admitted": "False"}
        assert scene.engine.running(job.metadata.uid)
        scene.now += timedelta(seconds=10)
        assert (await scene.look()).metadata.resource_version == job.metadata.resource_version
        assert await scene.reasons() == ["AttemptOpened"]

    play(story)


def test_a_program_that_tells_nothing_of_its_steps_runs_all_the_same() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make())
        assert job.status.phase is Phase.STARTING
        assert scene.after == 120.0
        scene.now += timedelta(seconds=120)
        job = await scene.look()
        assert (job.status.phase, job.status.progress) == (Phase.RUNNING, None)
        assert job.status.message.startswith(
            "runs, and tells nothing of its steps: steps, loss and lost work"
        )
        job = await scene.end(0, 0)
        assert job.status.phase is Phase.SUCCEEDED
        assert job.status.goodput is None

    play(story)


@pytest.mark.parametrize("resumed", [0, 40])
def test_a_program_that_has_told_of_itself_is_starting_until_its_first_step(resumed: int) -> None:
    """It may compile for longer than anybody waits for a word."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make())
        now = scene.seconds()
        engine.progress = Progress(1, resumed, 90, resumed, "starting", resumed_step=resumed, updated=now)
        scene.now += timedelta(seconds=SILENT_SECONDS)
        job = await scene.look()
        assert (job.status.phase, job.status.attempts[0].first_step_at) == (Phase.STARTING, None)

    play(story)


def test_a_job_that_told_of_its_steps_before_does_not_run_as_long_as_it_tells_of_none() -> None:
    """DNS was down while its ranks looked for each other, for up to two hours: it was Running, and the user
    told to put `Run` into a loop that has it. Another program that is put in its place may well say nothing.
    """

    async def silent(scene: Scene) -> TrainingJob:
        """The next attempt is up, and tells nothing for a long time."""
        await scene.look()
        scene.now += timedelta(seconds=5)
        await scene.look(passes=3)
        scene.now += timedelta(seconds=1000)
        return await scene.look()

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        job = await scene.submit(make())
        engine.progress = Progress(attempt=1, step=7, total_steps=9, durable_step=5, phase="training")
        assert (await scene.look()).status.phase is Phase.RUNNING
        engine.vanish(job, 1, 1)
        engine.progress = None
        job = await silent(scene)
        assert (job.status.attempt, job.status.phase) == (2, Phase.STARTING)
        assert (
            job.status.message
            == "replicas are up; rank 0 has not reported yet (a script without Run never does: see its log)"
        )
        await scene.change(command=["plain"])
        engine.vanish(job, 2, 1)
        job = await silent(scene)
        assert (job.status.attempt, job.status.phase) == (3, Phase.RUNNING)

    play(story)


def test_an_older_job_that_is_killed_at_each_start_lets_those_behind_it_in() -> None:
    async def story(scene: Scene) -> None:
        scene.engine.slots = 1
        job = await scene.submit(make(replicas=1))
        for attempt in (1, 2, 3):
            assert (job.status.attempt, job.status.next_start_at) == (attempt, None)
            scene.engine.vanish(job, attempt, 0)
            scene.now += timedelta(seconds=2)
            job = await scene.look(passes=3)
        assert (job.status.phase, job.status.attempt, job.status.disruptions) == (Phase.RECOVERING, 3, 3)
        assert job.status.message == "starts again after a back-off: replica 0: Vanished"
        await scene.store.create(make("b", replicas=1))
        for _ in range(2):
            await scene.reconciler.reconcile("default/b")
        younger = await scene.store.get("default", "b")
        assert scene.engine.launched[-1] == (younger.metadata.uid, 1)
        scene.now += timedelta(seconds=1)
        assert (await scene.look()).status.attempt == 4

    play(story)


def test_what_waited_before_its_controller_was_restarted_is_not_said_to_start() -> None:
    """An engine's line is in its memory: the next one is told of each job, one after the other, and of
    hundreds on one machine all were called Starting for minutes, with a write for each."""

    async def story(scene: Scene) -> None:
        scene.engine.slots = 1
        before = await scene.store.create(make("b", replicas=1))
        await scene.engine.start(before, 1)
        job = await scene.submit(make(replicas=1))
        assert (job.status.phase, job.status.message) == (Phase.QUEUED, "waits for 1 slots")
        del scene.engine.attempts[job.metadata.uid, 1]
        assert await scene.look(passes=1) == job, "nothing is to be written"
        assert await scene.look(passes=1) == job
        del scene.engine.attempts[job.metadata.uid, 1]
        scene.engine.end(before, 1, 0, 0)
        assert (await scene.look()).status.phase is Phase.STARTING

    play(story)


def test_a_poisonous_step_is_not_tried_a_third_time() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=1, retries={"failures": 9}))
        for attempt in (1, 2):
            scene.engine.fail(job, attempt, 0, 40, "ValueError: loss is nan")
            job = await scene.look()
            scene.now += timedelta(seconds=2)
            if attempt == 1:
                assert (await scene.look()).status.attempt == 2
        assert (job.status.phase, job.status.failures) == (Phase.FAILED, 2)
        assert job.status.message == (
            "attempt 2: replica 0: ValueError: loss is nan; attempt 1 ended after step 40 in the same way: "
            "no retry gets past it; look at what step 41 computes, and at its batch"
        )

    play(story)


def test_disruptions_without_a_new_durable_step_are_said_and_go_on() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=1))
        for attempt in range(1, 5):
            progress = Progress(
                attempt=attempt, step=44, total_steps=90, durable_step=40, phase="training", updated=1.0
            )
            scene.engine.attempts[job.metadata.uid, attempt].progress = progress
            scene.engine.vanish(job, attempt, 0)
            scene.now += timedelta(seconds=2)
            job = await scene.look(passes=3)
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 5)
        events = [e for e in await scene.store.events("default", "a") if e.reason == "NoProgress"]
        assert [event.type for event in events] == ["Warning", "Warning"]
        assert events[-1].message.startswith(
            "disrupted 4 times in a row with no step after 40 made durable: save more often"
        )

    play(story)


def test_spot_nodes_that_let_nothing_through_are_left_until_something_did() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=1, capacity="SpotFirst"))
        for attempt, durable in enumerate((40, 40, 40, 60), start=1):
            progress = Progress(
                attempt=attempt, step=64, total_steps=90, durable_step=durable, phase="training", updated=1.0
            )
            scene.engine.attempts[job.metadata.uid, attempt].progress = progress
            scene.engine.vanish(job, attempt, 0)
            scene.now += timedelta(seconds=2)
            job = await scene.look(passes=3)
        others = [record.number for record in job.status.attempts if record.capacity]
        assert others == [4], "three went nowhere; the fourth saved a step, and the fifth is a spot one again"
        (event,) = [e for e in await scene.store.events("default", "a") if e.reason == "NoProgress"]
        assert event.message == (
            "disrupted 3 times in a row with no step after 40 made durable: the next attempt goes to other "
            "than spot nodes, where there are any with room; else save more often (checkpoint.every)"
        )

    play(story)


def test_failures_back_off_and_run_out() -> None:
    async def story(scene: Scene) -> None:
        await scene.submit(make(retries={"failures": 1}))
        job = await scene.end(1, 1)
        assert job.status.phase is Phase.RECOVERING
        assert job.status.next_start_at is not None
        assert conditions(job)["Admitted"] == "False"
        wait = (job.status.next_start_at - scene.now).total_seconds()
        assert 0.75 <= wait <= 1.0
        assert scene.after == wait
        assert job.status.attempt == 1
        scene.now += timedelta(seconds=1)
        job = await scene.look()
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)
        assert job.status.next_start_at is None
        job = await scene.end(3, 1)
        assert job.status.phase is Phase.FAILED
        assert job.status.failures == 2
        assert job.status.message == (
            "attempt 2: replica 0: rank 0 ended with exit code 3; no retry for failures is left "
            "(retries.failures: 1)"
        )
        assert await scene.reasons() == ["AttemptOpened", "Failed", "AttemptOpened", "Failed", "JobFailed"]

    play(story)


def test_who_resumes_a_job_waits_for_no_back_off() -> None:
    async def story(scene: Scene) -> None:
        await scene.submit(make())
        job = await scene.end(1, 1)
        assert job.status.next_start_at is not None
        job = await scene.change(suspend=True)
        assert (job.status.phase, job.status.next_start_at) == (Phase.SUSPENDED, None)
        job = await scene.change(suspend=False)
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)

    play(story)


def test_what_no_retry_can_mend_is_not_tried_again() -> None:
    async def story(scene: Scene) -> None:
        await scene.submit(make(retries={"failures": 9}))
        job = await scene.end(78, 1)
        assert (job.status.phase, job.status.attempt) == (Phase.FAILED, 1)
        assert "no retry can mend its configuration; correct it and submit again" in job.status.message

    play(story)


def test_suspend_and_resume() -> None:
    async def story(scene: Scene) -> None:
        await scene.submit(make())
        job = await scene.change(suspend=True)
        assert job.status.phase is Phase.SUSPENDED
        assert conditions(job)["Suspended"] == "True"
        assert job.status.observed_generation == 2
        assert job.status.attempts[0].verdict is Verdict.SUSPENDED
        assert (job.status.failures, job.status.disruptions) == (0, 0)
        await scene.look()
        told = [(one.reason, one.count) for one in await scene.store.events("default", "a")]
        assert told == [("AttemptOpened", 1), ("Suspended", 1), ("Suspended", 1)], "the attempt, and the job"
        await scene.change(grace_seconds=40.0)
        again = [(one.reason, one.count) for one in await scene.store.events("default", "a")]
        assert again == told, "it rests on"
        job = await scene.change(suspend=False)
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)
        assert (await scene.end(0, 0)).status.phase is Phase.SUCCEEDED

    play(story)


class SavingEngine(MemoryEngine):
    """What is told to stop saves first, for as long as a test lets it."""

    async def stop(self, job: TrainingJob, attempt: int) -> None:
        self.attempts[job.metadata.uid, attempt].stopping = True


def test_a_job_that_is_resumed_while_it_still_stops_is_not_said_to_train_until_it_does() -> None:
    """It was Running, for as long as its last save took."""

    async def story(scene: Scene) -> None:
        engine = scene.run_on(SavingEngine(clock=scene.seconds))
        await scene.submit(make())
        scene.now += timedelta(seconds=SILENT_SECONDS)
        assert (await scene.look()).status.phase is Phase.RUNNING
        assert (await scene.change(suspend=True)).status.phase is Phase.SUSPENDING
        job = await scene.change(suspend=False)
        assert (job.status.phase, job.status.attempt) == (Phase.RECOVERING, 1)
        assert job.status.message.startswith("the attempt still stops after a checkpoint")
        await MemoryEngine.stop(engine, job, 1)
        job = await scene.look()
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)
        assert job.status.attempts[0].verdict is Verdict.SUSPENDED

    play(story)


class NoticedEngine(SavingEngine):
    """Keeps how often an attempt was asked to stop, and to end."""

    def __init__(self, clock: Callable[[], float]):
        super().__init__(clock=clock)
        self.asked: list[str] = []

    async def stop(self, job: TrainingJob, attempt: int) -> None:
        self.asked.append("stop")
        await super().stop(job, attempt)

    async def kill(self, job: TrainingJob, attempt: int, *, stacks: bool = False) -> None:
        self.asked.append("kill")
        await super().kill(job, attempt, stacks=stacks)


@pytest.mark.parametrize("deleted", [False, True], ids=["suspended", "deleted"])
def test_an_attempt_that_saves_is_given_its_notice_once(deleted: bool) -> None:
    """However often it is looked at meanwhile: programs end at once on a second one."""

    async def story(scene: Scene) -> None:
        engine = scene.run_on(NoticedEngine(clock=scene.seconds))
        await scene.submit(make())
        if deleted:
            await scene.store.mark_deleted("default", "a")
        else:
            await scene.change(suspend=True)
        await scene.look(passes=3)
        assert engine.asked == ["stop"]

    play(story)


def test_a_job_that_is_suspended_as_its_attempt_is_to_be_ended_rests_and_has_lost_no_budget() -> None:
    async def story(scene: Scene) -> None:
        engine = scene.run_on(NoticedEngine(clock=scene.seconds))
        job = await scene.submit(make(retries={"disruptions": 0}))
        engine.vanish(job, 1, 1)
        await scene.look()
        scene.now += timedelta(seconds=1)
        job = await scene.change(suspend=True)
        assert engine.asked == ["stop", "kill"], "that it was asked to stop is known before it has ended"
        assert (job.status.phase, job.status.disruptions) == (Phase.SUSPENDED, 0)
        assert job.status.attempts[0].verdict is Verdict.SUSPENDED

    play(story)


class DeafEngine(MemoryEngine):
    """Of what it is asked to start it makes nothing, the first times, and says nothing of that."""

    deaf = 2

    async def start(self, job: TrainingJob, attempt: int) -> None:
        if self.deaf:
            self.deaf -= 1
        else:
            await super().start(job, attempt)


async def alone(scene: Scene, seconds: float) -> TrainingJob:
    """For so long the job is looked at when the last look asked for that."""
    until = scene.now + timedelta(seconds=seconds)
    while True:
        job = await scene.look(passes=1)
        after = None if scene.after is None else scene.now + timedelta(seconds=scene.after)
        if after is None or after > until:
            scene.now = until
            return job
        scene.now = after


def test_a_job_that_nobody_tells_of_is_carried_on_within_seconds() -> None:
    """A look that asked for no other waited for the next round of looks at all jobs, half a minute."""

    async def story(scene: Scene) -> None:
        engine = scene.run_on(DeafEngine(clock=scene.seconds))
        job = await scene.store.create(make(ttlSecondsAfterFinished=60))
        await alone(scene, 3)
        assert engine.launched == [(job.metadata.uid, 1)], "asked for until it is there"
        engine.fall_silent(job, 1)
        assert (await alone(scene, 3)).status.attempt == 2
        engine.vanish(job, 2, 1)
        assert (await alone(scene, 3)).status.attempt == 3
        hung, taken, _ = (await scene.store.get("default", "a")).status.attempts
        assert (hung.verdict, taken.verdict) == (Verdict.HUNG, Verdict.DISRUPTED)
        told = [e.count for e in await scene.store.events("default", "a") if e.reason == "Hung"]
        assert told == [1, 1], "as it is to be ended, and with its verdict"
        for replica in (0, 1):
            engine.end(job, 3, replica, 0)
        with pytest.raises(NotFound):
            await alone(scene, 61)

    play(story)


def test_a_job_that_waits_is_gone_as_soon_as_it_is_deleted() -> None:
    async def story(scene: Scene) -> None:
        await scene.engine.start(make("other", replicas=2), 1)
        assert (await scene.submit(make(replicas=4))).status.phase is Phase.QUEUED
        await scene.store.mark_deleted("default", "a")
        with pytest.raises(NotFound):
            await alone(scene, 1)

    play(story)


class LateEngine(MemoryEngine):
    """An apiserver that goes down as it makes an attempt: no answer, and until it is back no news either."""

    back = False

    async def start(self, job: TrainingJob, attempt: int) -> None:
        await super().start(job, attempt)
        if not self.back:
            raise Unavailable("POST pytorchjobs: the apiserver cannot be reached: no answer in time")

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        return await super().observe(job, attempt) if self.back else AttemptObservation(attempt, False, True)


def test_an_attempt_that_comes_to_light_after_its_job_was_suspended_is_ended() -> None:
    async def story(scene: Scene) -> None:
        engine = scene.run_on(LateEngine(clock=scene.seconds))
        job = make()
        await scene.store.create(job)
        with pytest.raises(Unavailable):
            await scene.look(passes=1)
        job = await scene.change(suspend=True)
        assert job.status.phase is Phase.SUSPENDED
        assert job.status.attempts[0].reason == "suspended before it started"
        assert len(engine.running(job.metadata.uid)) == 1
        engine.back = True
        job = await scene.look()
        assert engine.running(job.metadata.uid) == [], "nobody else would end it"
        assert job.status.phase is Phase.SUSPENDED
        job = await scene.change(suspend=False)
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)

    play(story)


def test_a_job_suspended_from_the_beginning_never_starts() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(suspend=True))
        assert (job.status.phase, job.status.attempt) == (Phase.SUSPENDED, 0)
        assert scene.engine.launched == []

    play(story)


def test_a_job_without_room_says_why_it_waits() -> None:
    async def story(scene: Scene) -> None:
        await scene.engine.start(make("other", replicas=2), 1)
        job = await scene.submit(make(replicas=4))
        assert (job.status.phase, job.status.message) == (Phase.QUEUED, "waits for 4 slots")
        assert conditions(job)["Admitted"] == "False"
        job = await scene.change(suspend=True)
        assert job.status.phase is Phase.SUSPENDED
        assert job.status.attempts[0].reason == "suspended before it started"

    play(story)


@pytest.mark.parametrize(
    ("change", "phase"), [({"suspend": True}, Phase.SUSPENDING), ({"env": {"A": "1"}}, Phase.RECOVERING)]
)
def test_a_job_that_waits_is_not_called_admitted_as_its_attempt_is_taken_back(
    change: dict[str, Any], phase: Phase
) -> None:
    """`kubectl wait --for=condition=Admitted` must not end with it."""

    async def story(scene: Scene) -> None:
        await scene.engine.start(make("other", replicas=2), 1)
        job = await scene.submit(make(replicas=4))
        (before,) = job.status.conditions
        scene.now += timedelta(minutes=1)
        job.spec = job.spec.model_copy(update=change)
        await scene.store.replace_spec(job)
        job = await scene.look(passes=1)
        assert job.status.phase is phase
        assert job.status.conditions == [before], "it has no more room than a minute ago"

    play(story)


def test_a_job_with_a_queue_is_not_called_admitted_before_its_queue_has() -> None:
    """Its attempts are made suspended: `kubectl wait --for=condition=Admitted` right after its submission."""

    async def story(scene: Scene) -> None:
        await scene.store.create(make(queue="team-a"))
        job = await scene.look(passes=1)
        assert (job.status.phase, conditions(job)) == (Phase.STARTING, {"Admitted": "False"})
        job = await scene.look(passes=1)
        assert conditions(job) == {"Admitted": "True"}
        scene.engine.vanish(job, 1, 0)
        scene.engine.end(job, 1, 1, 1)
        job = await scene.look(passes=1)
        assert (job.status.phase, job.status.attempt) == (Phase.RECOVERING, 2)
        assert conditions(job) == {"Admitted": "False"}
        assert conditions(await scene.look(passes=1)) == {"Admitted": "True"}

    play(story)


def test_an_attempt_that_runs_saves_as_often_as_it_was_started_with() -> None:
    """By that it is told when its newest checkpoint is late: once its job was edited to save more often from
    the next attempt on, one that saved as it should raised a critical alert."""

    async def story(scene: Scene) -> None:
        await scene.submit(make(checkpoint={"every": "500"}))
        job = await scene.change(checkpoint=Checkpoint(every="20"))
        assert (job.spec.checkpoint.every, JobFigures.of(job).every_steps) == ("20", 500)
        saves = dict(_fact_rows(job))["saves"]
        assert saves == "every 500 steps, the newest 3 kept"
        scene.engine.vanish(job, 1, 0)
        scene.engine.end(job, 1, 1, 1)
        job = await scene.look()
        assert (job.status.attempt, JobFigures.of(job).every_steps) == (2, 20)

    play(story)


def test_an_attempt_that_runs_holds_its_gpus_whatever_the_job_asks_for_meanwhile() -> None:
    """By how many it holds the dashboards count, and whether all of them are idle is judged."""

    async def story(scene: Scene) -> None:
        asked = (await scene.submit(make(gpus="4"))).spec
        job = await scene.change(gpus="1", mig="1g.10gb", processes=2, grace_seconds=999.0)
        made = job.as_of(1).spec
        assert (job.spec.gpus, made.gpus, made.mig) == ("1", "4", None)
        assert (made.processes_per_replica, made.grace_seconds) == (4, asked.grace_seconds)
        assert JobFigures.of(job).gpus == 8
        scene.engine.vanish(job, 1, 0)
        scene.engine.end(job, 1, 1, 1)
        job = await scene.look()
        assert (job.status.attempt, job.as_of(2).spec.gpus, job.as_of(2).spec.mig) == (2, "1", "1g.10gb")
        assert JobFigures.of(job).gpus is None, "a part of a GPU is not one"

    play(story)


def test_a_job_of_a_restored_cluster_goes_on_after_the_attempts_that_it_has_forgotten() -> None:
    """Each number up to the newest cost a failure, since the fence in its run directory shut it out; after
    four of them the job had Failed."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(retries={"failures": 0}))
        said = "attempt 1 was superseded by attempt 9: it may no longer write to /holdfast/run"
        for replica in (0, 1):
            scene.engine.fail(job, 1, replica, 0, said)
        job = await scene.look()
        assert [record.number for record in job.status.attempts] == [1, 10]
        assert (job.status.attempt, job.status.failures, job.status.disruptions) == (10, 0, 1)
        assert job.status.attempts[0].reason == (
            "replica 0: attempt 1 was superseded by attempt 9, of which nothing is on record: the cluster "
            "was restored from a backup, or somebody else trains in its run directory"
        )
        assert (await scene.end(0, 0)).status.phase is Phase.SUCCEEDED

    play(story)


def test_two_jobs_of_one_run_directory_do_not_overtake_each_other_for_ever() -> None:
    """As where a copy of a cluster is started beside the one that was backed up: who is shut out a second
    time has failed, and says so."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(retries={"failures": 0}))
        for attempt, newer in ((1, 9), (10, 11)):
            said = f"attempt {attempt} was superseded by attempt {newer}: it may no longer write to /run"
            for replica in (0, 1):
                scene.engine.fail(job, attempt, replica, 0, said)
            job = await scene.look()
        assert [record.verdict for record in job.status.attempts] == [Verdict.DISRUPTED, Verdict.FAILED]
        assert (job.status.phase, job.status.failures, job.status.disruptions) == (Phase.FAILED, 1, 1)
        assert "superseded by attempt 11" in job.status.message

    play(story)


def test_a_job_whose_figures_cannot_be_told_is_carried_on_and_so_are_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is odd about it: it ended the loop that all jobs have in common."""
    figures = JobFigures.of

    def of(job: TrainingJob) -> JobFigures:
        if job.metadata.name == "odd":
            raise OverflowError("int too large to convert to float")
        return figures(job)

    monkeypatch.setattr(JobFigures, "of", of)

    async def story() -> None:
        store, metrics = MemoryStore(), Metrics()
        reconciler = Reconciler(store, MemoryEngine(), metrics=metrics)
        working = asyncio.create_task(reconciler.run())
        for name in ("odd", "other"):
            await store.create(make(name))

        async def begun() -> bool:
            return all([(await store.get("default", name)).status.attempt == 1 for name in ("odd", "other")])

        await wait_until_async(begun, "both to be carried on")
        await wait_until_async(lambda: set(metrics.jobs) == {"default/other"}, "the figures of the other")
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(story())


def test_what_has_trained_as_it_is_is_no_mistake_for_good() -> None:
    """bfloat16 by name, and the next spot node's GPU has none: days of work were given up at once."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(retries={"failures": 2}))
        scene.engine.vanish(job, 1, 0)
        scene.engine.fail(job, 1, 1, 800, "Connection reset by peer")
        job = await scene.look(passes=4)
        for number in (2, 3, 4):
            assert (job.status.attempt, job.status.failures) == (number, number - 2)
            for replica in (0, 1):
                scene.engine.end(job, number, replica, EXIT_CONFIG_ERROR)
            job = await scene.look(passes=4)
            assert job.status.attempts[number - 1].verdict is Verdict.FAILED
            scene.now += timedelta(seconds=5)
            job = await scene.look(passes=4)
        assert job.status.phase is Phase.FAILED
        assert job.status.message.endswith("no retry for failures is left (retries.failures: 2)")

    play(story)
