"""What is written down of attempts, by what their trainer tells."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from scene import Scene, TellingEngine, make, play, telling

from holdfast_controller.api.ledger import account
from holdfast_controller.cli.description import _speed_words
from holdfast_controller.cluster import AttemptObservation, Unavailable
from holdfast_controller.job_series import JobFigures
from holdfast_controller.jobs import (
    ATTEMPTS_KEPT,
    SILENT_SECONDS,
    AttemptRecord,
    JobProgress,
    Phase,
    Status,
    TrainingJob,
    Verdict,
)
from holdfast_controller.policy.books import Books
from holdfast_controller.policy.explain import FAULT_CHARACTERS, to_do_again
from holdfast_controller.policy.lost_work import TEXT_CHARACTERS, TEXTS, work_of
from holdfast_trainer.contract import Progress


async def trains_on(scene: Scene, engine: TellingEngine, attempt: int) -> None:
    """Its status is written again and again, each time with what is told."""
    for step in (201, 202):
        scene.now += timedelta(seconds=5)
        engine.progress = Progress(attempt, step, None, 200, "training", updated=scene.seconds())
        await scene.look(passes=1)


def test_lost_work_is_booked_and_corrected_when_the_next_attempt_resumes() -> None:
    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        started = scene.now.timestamp()
        await scene.look()
        scene.now += timedelta(seconds=9.2)
        engine.lines += [
            {"attempt": 1, "event": "attempt_start", "resumed_step": 0, "useful_seconds": 0, "world_size": 4},
            {"attempt": 1, "event": "first_step", "time": started + 2, "step": 1},
            {"attempt": 1, "event": "checkpoint", "step": 30, "useful_seconds": 3.0, "digest": "3f"},
        ]
        engine.stepped += [{"attempt": 1, "step": n, "seconds": 0.5} for n in range(1, 48)]
        engine.progress = Progress(
            1, 46, 100, 30, "training", useful_seconds=4.6, verdict="the disk is slow", updated=started + 9.2
        )
        job = await scene.look()
        assert job.status.phase is Phase.RUNNING
        assert job.status.message == "step 46 of 100; step 30 is durable"
        assert job.status.progress is not None
        assert (job.status.progress.step, job.status.progress.training_phase) == (46, "training")
        assert job.status.progress.verdict == "the disk is slow"
        assert job.status.goodput == pytest.approx(0.5)
        assert job.status.attempts[0].first_step_at == datetime.fromtimestamp(started + 2, UTC)

        scene.now += timedelta(seconds=90.8)
        engine.vanish(job, 1, 0)
        engine.progress = None
        job = await scene.look()
        first = job.status.attempts[0]
        assert (first.last_step, first.durable_step, first.lost_steps) == (47, 30, 17)
        assert (first.first_step, first.checkpoints, first.digest, first.world_size) == (1, 1, "3f", 4)
        assert job.status.lost_steps == 17
        assert job.status.goodput == pytest.approx(3.0 / 100), "17 steps that have to be done again"
        engine.lines += [{"attempt": 2, "event": "attempt_start", "resumed_step": 40}]
        job = await scene.look()
        assert job.status.attempts[1].resumed_step == 40
        assert (job.status.attempts[0].lost_steps, job.status.lost_steps) == (7, 7)
        assert "17 steps are to be done again" in (await scene.store.events("default", "a"))[1].message

    play(story)


@pytest.mark.parametrize("asked", [False, True], ids=["not asked yet", "asked before it had loaded"])
def test_of_an_attempt_that_trains_the_speed_of_the_one_before_is_not_told(asked: bool) -> None:
    """Its ledger may tell of its first step up to a second before it is asked how fast it is."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        fast = Progress(1, 46, 100, 40, "training", resumed_step=0, updated=scene.seconds())
        engine.progress = replace(fast, tokens_per_second=1000.0, eta_seconds=54.0, memory_bytes=10**9)
        job = await scene.look()
        assert job.status.progress is not None
        assert job.status.progress.tokens_per_second == 1000.0
        engine.vanish(job, 1, 0)
        engine.progress = Progress(2, 0, 100, 0, "starting", updated=scene.seconds()) if asked else None
        job = await scene.look()
        assert job.status.attempt == 2
        scene.now += timedelta(seconds=60)
        engine.lines += [
            {"attempt": 2, "event": "attempt_start", "resumed_step": 40},
            {"attempt": 2, "event": "first_step", "time": scene.seconds(), "step": 41},
        ]
        job = await scene.look()
        assert job.status.phase is Phase.RUNNING
        assert job.status.progress is not None
        told = job.status.progress
        assert (told.tokens_per_second, told.eta_seconds, told.memory_bytes) == (None, None, None)
        assert (told.step, told.durable_step) == (46, 40), "that is where the job stands"

    play(story)


def test_an_attempt_that_goes_on_further_than_the_one_before_told_shows_that_nothing_was_lost() -> None:
    """Its last steps and its last save were told to nobody."""
    before = AttemptRecord(number=1, verdict=Verdict.DISRUPTED, resumed_step=0, last_step=40, lost_steps=10)
    status = Status(attempt=2, attempts=[before, AttemptRecord(number=2)], lost_steps=10)
    told = Progress(2, 45, 100, 45, "training", resumed_step=45)
    seen = AttemptObservation(2, exists=True, gone=False, progress=told)
    Books(status, datetime(2026, 1, 1, tzinfo=UTC)).take_progress(status.attempts[1], seen, ())
    assert (before.lost_steps, status.lost_steps) == (0, 0)


def test_that_a_program_of_no_steps_has_trained_is_known_however_many_attempts_began_nothing_since() -> None:
    """Its volume was away for a night, and then the job was over: a script that is not there is a mistake in
    the job where nothing has trained."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=1))
        assert job.status.saved_before(2) is None
        scene.now += timedelta(seconds=SILENT_SECONDS)
        for _ in range(2 * ATTEMPTS_KEPT):
            scene.engine.vanish(job, job.status.attempt, 0)
            job = await scene.look()
            scene.now = job.status.next_start_at or scene.now
            job = await scene.look()
        newest = job.status.attempt
        assert newest > 2 * ATTEMPTS_KEPT
        assert job.status.saved_before(newest) == 0
        numbers = [record.number for record in job.status.attempts]
        assert numbers == [1, *range(newest - ATTEMPTS_KEPT + 2, newest + 1)]

    play(story)


def test_what_was_lost_is_corrected_however_many_attempts_began_nothing_since() -> None:
    """Its places were taken again and again before it had loaded: the status keeps 20 attempts, and that
    which had lost steps was none of them any more."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        engine.progress = Progress(1, 40, 100, 30, "training", resumed_step=0, updated=scene.seconds())
        job = await scene.look()
        taken = scene.now
        for _ in range(ATTEMPTS_KEPT + 5):
            engine.vanish(job, job.status.attempt, 0)
            engine.progress = None
            await scene.look()
            scene.now += timedelta(minutes=6)
            job = await scene.look()
        newest = job.status.attempt
        numbers = [record.number for record in job.status.attempts]
        assert numbers == [1, *range(newest - ATTEMPTS_KEPT + 2, newest + 1)]
        assert job.status.lost_steps == 10

        now = scene.seconds()
        engine.progress = Progress(
            newest, 41, 100, 40, "training", resumed_step=40, first_step=41, first_step_time=now, updated=now
        )
        job = await scene.look()
        assert (job.status.attempts[0].lost_steps, job.status.lost_steps) == (0, 0), "its last save counted"
        waited = (scene.now - taken).total_seconds()
        assert job.status.attempts[-1].recovery_seconds == pytest.approx(waited)

        engine.vanish(job, newest, 0)
        engine.progress = None
        job = await scene.look()
        assert [record.number for record in job.status.attempts] == [*numbers[1:], newest + 1]

    play(story)


def test_an_attempt_that_has_no_step_to_do_leaves_the_job_the_loss_that_it_had() -> None:
    """The notice came after the last step, while the model was exported, say: "loss -" was all that was told
    of a training that had succeeded. Where steps were lost the loss is not that of where it stands."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        resumed, told = 0, []
        for step, loss, lost in ((40, 2.5, 10), (100, 1.25, 0), (100, None, 0)):
            number = (await scene.store.get("default", "a")).status.attempt
            began = Progress(number, resumed, 100, resumed, "training", resumed_step=resumed)
            engine.progress = replace(began, updated=scene.now.timestamp())
            job = await scene.look()
            assert job.status.progress is not None
            told.append((job.status.progress.step, job.status.progress.loss, job.status.progress.epoch))
            if step > resumed:
                done = {"first_step": resumed + 1, "loss": loss, "epoch": step / 50}
                engine.progress = replace(engine.progress, step=step, durable_step=step - lost, **done)
                await scene.look()
                engine.vanish(job, number, 0)
                engine.progress = None
                await scene.look()
            resumed = step - lost
        job = await scene.end(0)
        assert told == [(0, None, None), (30, None, None), (100, 1.25, 2.0)]
        assert job.status.phase is Phase.SUCCEEDED
        assert job.status.progress is not None
        assert (job.status.progress.step, job.status.progress.loss) == (100, 1.25)

    play(story)


def test_each_attempt_has_a_goodput_of_its_own_and_together_they_are_the_jobs() -> None:
    """Which of three attempts was worth its machines: one was taken early, the save of another was damaged,
    and what the last one goes on from decides what counts of both."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        job = await scene.look()
        assert job.status.attempts[0].goodput is None, "it has not told what it goes on from"

        async def goes_on(seconds: float, progress: Progress) -> list[float | None]:
            scene.now += timedelta(seconds=seconds)
            engine.progress = replace(progress, updated=scene.now.timestamp())
            job = await scene.look()
            return [record.goodput for record in job.status.attempts]

        async def is_taken() -> list[float | None]:
            job = await scene.store.get("default", "a")
            engine.progress = None
            engine.vanish(job, job.status.attempt, 0)
            job = await scene.look()
            assert job.status.attempts[-1].verdict is None, "the next one is there"
            return [record.goodput for record in job.status.attempts]

        first = Progress(
            1, 46, 100, 30, "training",
            resumed_step=0, resumed_seconds=0.0, useful_seconds=5.0, durable_seconds=3.0,
        )  # fmt: skip
        assert await goes_on(10, first) == [0.5]
        assert await is_taken() == [0.3, None], "16 steps have to be done again"
        second = Progress(
            2, 60, 100, 50, "training",
            resumed_step=40, resumed_seconds=4.0, useful_seconds=7.0, durable_seconds=6.0,
        )  # fmt: skip
        assert await goes_on(10, second) == [0.4, 0.3], "its last save had become durable unheard"
        assert await is_taken() == [0.4, 0.2, None]
        third = Progress(
            3, 20, 100, 20, "training",
            resumed_step=20, resumed_seconds=2.0, useful_seconds=2.0, durable_seconds=2.0,
        )  # fmt: skip
        assert await goes_on(1, third) == [0.2, 0.0, 0.0], "all newer checkpoints were damaged"
        last = replace(third, step=100, durable_step=100, useful_seconds=10.0, durable_seconds=10.0)
        assert await goes_on(15, last) == [0.2, 0.0, 0.5]
        job = await scene.end(0)
        assert job.status.phase is Phase.SUCCEEDED
        assert [record.goodput for record in job.status.attempts] == [0.2, 0.0, 0.5]
        assert sum(record.useful_seconds or 0 for record in job.status.attempts) == job.status.useful_seconds
        assert job.status.goodput == pytest.approx(10.0 / 36)

    play(story)


def test_the_status_has_the_trainers_figures_and_those_that_go_with_a_step_follow_its_last() -> None:
    """Memory, gradients, the smoothed loss and the epoch were in /progress alone, out of REST's reach. A rank
    that is killed between two looks has told of its last steps in its lines: with them the epoch moves."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        engine.progress = Progress(1, 0, 100, 0, "training", resumed_step=0)
        job = await scene.look()

        def figures(job: TrainingJob) -> list[float | None]:
            now = job.status.progress
            assert now is not None
            return [now.step, now.epoch, now.loss_ema, now.grad_norm, now.memory_bytes]

        assert figures(job) == [0, None, None, None, None], "not known yet, which is no 0"
        scene.now += timedelta(seconds=2)
        engine.progress = Progress(
            1, 40, 100, 30, "training",
            resumed_step=0, epoch=0.5, loss_ema=2.5, grad_norm=0.75, memory_bytes=3_000_000_000,
        )  # fmt: skip
        assert figures(await scene.look()) == [40, 0.5, 2.5, 0.75, 3_000_000_000]
        engine.stepped += [{"attempt": 1, "step": n, "seconds": 0.5, "loss": 96.0 - n} for n in range(1, 49)]
        engine.stepped += [{"attempt": 1, "step": 40, "val_loss": 3.5}, {"attempt": 7, "step": 9, "loss": 1}]
        engine.progress = None
        engine.vanish(job, 1, 0)
        job = await scene.look()
        assert figures(job) == [48, 0.6, 2.5, 0.75, 3_000_000_000]
        assert job.status.progress is not None
        assert (job.status.progress.loss, job.status.progress.val_loss) == (48.0, 3.5)
        assert job.status.progress.eta_seconds is None, "there are steps left"

    play(story)


def test_what_a_trainer_tells_is_in_the_status_under_the_same_name() -> None:
    figures = {
        "loss": 2.5, "loss_ema": 2.75, "val_loss": 3.0, "grad_norm": 0.5, "epoch": 0.25,
        "tokens_per_second": 1e6, "samples_per_second": 90.0, "data_wait_fraction": 0.125, "mfu": 0.375,
        "gpu_utilization": 0.875, "cpu_utilization": 0.625, "memory_bytes": 9, "eta_seconds": 60.0,
        "verdict": "computes", "checkpoints": 4, "durable_seconds": 7.5,
    }  # fmt: skip

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        engine.progress = Progress(1, 46, 100, 40, "training", first_step=41, **figures)
        progress = (await scene.look()).status.progress
        assert progress is not None
        told = progress.model_dump(exclude_none=True)
        assert {name: told.pop(name, None) for name in figures} == figures
        others = {"attempt", "step", "total_steps", "durable_step", "training_phase", "updated_at"}
        assert told.keys() == others

    play(story)


def test_a_job_that_ended_while_no_controller_ran_has_the_goodput_of_its_own_time() -> None:
    """It trained for 8 of 10 seconds and was done; the controller came back an hour later and said 0.2 %."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        started = scene.now
        await scene.look()
        told = {"resumed_step": 0, "resumed_seconds": 0.0, "useful_seconds": 8.0, "durable_seconds": 8.0}
        engine.progress = Progress(1, 100, 100, 100, "finished", **told, updated=started.timestamp() + 9)
        job = await scene.store.get("default", "a")
        scene.now = started + timedelta(seconds=10)
        engine.end(job, 1, 0, 0)
        scene.now = started + timedelta(seconds=3600)
        job = await scene.look()
        assert job.status.phase is Phase.SUCCEEDED
        assert job.status.progress is not None
        assert job.status.progress.eta_seconds == 0.0
        assert job.status.attempts[0].ended_at == started + timedelta(seconds=10)
        assert job.status.goodput == job.status.attempts[0].goodput == pytest.approx(0.8)
        totals = account(job, [], [], scene.now + timedelta(days=1)).totals
        assert (totals.goodput, totals.wall_seconds) == (pytest.approx(0.8), 10.0)

    play(story)


def test_a_program_that_tells_nothing_is_not_as_fast_as_the_one_before_it() -> None:
    """The command was edited while the job was suspended: what the trainer had told stood there as the speed
    of the script that runs now, with the time that was left."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        job = await scene.submit(make(replicas=1))
        now = scene.now.timestamp()
        fast = {"tokens_per_second": 1000.0, "eta_seconds": 60.0, "verdict": "computes", "memory_bytes": 9}
        engine.progress = Progress(1, 46, 100, 46, "training", loss=2.5, resumed_step=0, updated=now, **fast)
        assert JobFigures.of(await scene.look()).tokens_per_second == 1000.0
        await scene.change(suspend=True)
        engine.end(job, 1, 0, 0)
        engine.progress = None
        await scene.look()
        await scene.change(suspend=False, command=["python", "mine.py"])
        scene.now += timedelta(seconds=SILENT_SECONDS + 10)
        job = await scene.look()
        assert (job.status.phase, job.status.attempt) == (Phase.RUNNING, 2)
        assert JobFigures.of(job).tokens_per_second is None
        assert job.status.progress is not None
        told = job.status.progress
        assert (told.attempt, told.step, told.loss) == (1, 46, 2.5), "the job stands where it stood"
        assert (told.memory_bytes, told.eta_seconds, told.verdict) == (None, None, None)
        assert next(iter(_speed_words(job))) == "not measured yet"

    play(story)


def test_an_attempt_whose_predecessor_is_not_known_lends_its_time_to_no_other() -> None:
    """One attempt has no figure, as of an older trainer; what it did is not put to the one before."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        told = [(0, 0.0, 3.0), (30, None, None), (60, 6.0, None)]
        for number, (resumed, before, durable) in enumerate(told, 1):
            engine.progress = Progress(
                number, resumed + 40, 100, resumed + 30, "training",
                resumed_step=resumed, resumed_seconds=before, useful_seconds=durable, durable_seconds=durable,
            )  # fmt: skip
            job = await scene.look()
            scene.now += timedelta(seconds=10)
            engine.progress = None
            engine.vanish(job, number, 0)
            job = await scene.look()
        assert [record.goodput for record in job.status.attempts] == [0.3, None, None, None]

    play(story)


def test_what_a_suspended_job_could_not_save_is_told_with_the_reason() -> None:
    """Its disk was full: that steps were lost stood among what is in order, and nothing said why."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        job = await scene.submit(make(replicas=1))
        full = "step 133 could not be saved: No space left on device"
        engine.progress = Progress(1, 133, 600, 20, "training", save_fault=full)
        await scene.look()
        job = await scene.change(suspend=True)
        engine.end(job, 1, 0, 1)
        job = await scene.look()
        assert (job.status.phase, job.status.lost_steps) == (Phase.SUSPENDED, 113)
        told = [event for event in await scene.store.events("default", "a") if "attempt 1:" in event.message]
        assert [(event.type, event.message) for event in told] == [
            ("Warning", f"attempt 1: stopped on request; 113 steps are to be done again: {full}")
        ]

    play(story)


def test_what_the_end_of_an_attempt_says_already_is_not_said_again() -> None:
    record = AttemptRecord(
        number=1, reason="replica 0: trained to step 60, but it is not durable: full", lost_steps=3
    )
    progress = JobProgress(attempt=1, step=60, save_fault="full")
    assert to_do_again(record, progress) == "; 3 steps are to be done again"
    other = record.model_copy(update={"reason": "stopped on request"})
    assert to_do_again(other, progress) == "; 3 steps are to be done again: full"


def test_an_attempt_that_is_ended_before_it_has_loaded_takes_no_step_back() -> None:
    """The second attempt compiles for minutes, serves step 0 meanwhile, and its node goes: the job has done
    and kept what it had. What the third then goes on from is held against the attempt that did the steps."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        engine.lines += [
            {"attempt": 1, "event": "attempt_start", "resumed_step": 0},
            {"attempt": 1, "event": "checkpoint", "step": 30},
        ]
        engine.progress = Progress(1, 46, 100, 30, "training", resumed_step=0)
        job = await scene.look()
        engine.vanish(job, 1, 0)
        engine.progress = None
        await scene.look()

        def stands(job: TrainingJob) -> tuple[int, int, int | None, int | None]:
            progress = job.status.progress
            assert progress is not None
            return progress.step, progress.durable_step, progress.total_steps, progress.attempt

        engine.progress = Progress(2, 0, None, 0, "starting")
        job = await scene.look(passes=3)
        assert job.status.attempt == 2
        assert stands(job) == (46, 30, 100, 1)
        engine.vanish(job, 2, 0)
        job = await scene.look()
        engine.progress = None
        assert stands(job) == (46, 30, 100, 1)
        assert job.status.attempts[0].lost_steps == job.status.lost_steps == 16
        engine.lines += [{"attempt": 3, "event": "attempt_start", "resumed_step": 20}]
        engine.progress = Progress(3, 20, 100, 20, "training", resumed_step=20)
        job = await scene.look(passes=3)
        assert stands(job) == (20, 20, 100, 3)
        assert [record.lost_steps for record in job.status.attempts] == [26, 0, None]
        assert job.status.lost_steps == 26

    play(story)


def test_attempts_that_are_taken_before_they_have_loaded_hide_nothing_of_what_was_durable() -> None:
    """Each compiles for minutes on a spot node, serves step 0 meanwhile, and is gone. The job was told that
    no step after 0 was durable, where 30 was; and nobody was told once an attempt went on from step 10."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        engine.progress = Progress(1, 46, 100, 30, "training", resumed_step=0)
        job = await scene.look()
        engine.vanish(job, 1, 0)
        engine.progress = None
        await scene.look()
        for number in (2, 3, 4):
            engine.progress = Progress(number, 0, None, 0, "starting")
            job = await scene.look(passes=3)
            scene.now += timedelta(seconds=90)
            engine.vanish(job, number, 0)
            job = await scene.look()
        records = job.status.attempts
        assert [one.durable_step for one in records] == [30, 30, 30, 30, None], "it was there for all of them"
        assert [one.lost_steps for one in records] == [16, 0, 0, 0, None]
        engine.progress = Progress(5, 10, 100, 10, "training", resumed_step=10)
        await scene.look(passes=3)
        told = {event.reason: event.message for event in await scene.store.events("default", "a")}
        assert told["NoProgress"].startswith(
            "disrupted 4 times in a row with no step after 30 made durable: save more often"
        )
        assert told["ResumedEarlier"].startswith("attempt 5 goes on from step 10, though step 30 was durable")

    play(story)


def test_an_attempt_that_began_anew_and_was_taken_before_anybody_looked_had_nothing_durable() -> None:
    """Its checkpoints were removed. That it resumed from step 0 is heard at its end alone: its record said
    that step 30 was durable in it, and of the next one that it went on from less than it had."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        engine.progress = Progress(1, 46, 100, 30, "training", resumed_step=0)
        job = await scene.look()
        engine.vanish(job, 1, 0)
        engine.progress = None
        job = await scene.look(passes=3)
        engine.lines = [{"event": "attempt_start", "attempt": 2, "resumed_step": 0, "time": scene.seconds()}]
        engine.vanish(job, 2, 0)
        job = await scene.look(passes=3)
        assert [one.durable_step for one in job.status.attempts] == [30, 0, None]
        engine.progress = Progress(3, 10, 100, 0, "training", resumed_step=0)
        await scene.look(passes=3)
        told = [
            one.message for one in await scene.store.events("default", "a") if one.reason == "ResumedEarlier"
        ]
        assert len(told) == 1
        assert told[0].startswith("attempt 2 goes on from step 0, though step 30 was durable in attempt 1")

    play(story)


def test_a_resume_on_something_else_is_told_once_and_stays_on_record() -> None:
    """Nobody has to read logs to know that the losses are not those of an untouched run."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        engine.lines += [{"attempt": 1, "event": "attempt_start", "resumed_step": 0, "differences": []}]
        await scene.look()
        engine.vanish(await scene.store.get("default", "a"), 1, 0)
        await scene.look()
        engine.lines += [
            {
                "attempt": 2,
                "event": "attempt_start",
                "resumed_step": 40,
                "differences": ["device: cpu, AVX512, X -> cpu, AVX2, Y", "precision: bf16 -> fp32"],
            }
        ]
        job = await scene.look(passes=5)
        await trains_on(scene, engine, 2)
        first, second = job.status.attempts
        assert first.resume_differences == []
        assert second.resume_differences == [
            "device: cpu, AVX512, X -> cpu, AVX2, Y",
            "precision: bf16 -> fp32",
        ]
        told = [e for e in await scene.store.events("default", "a") if e.reason == "ResumeDiffers"]
        assert [(event.type, event.count) for event in told] == [("Warning", 1)]
        assert told[0].message == (
            "attempt 2 goes on from step 40, and from there bits may differ: "
            "device: cpu, AVX512, X -> cpu, AVX2, Y; precision: bf16 -> fp32"
        )

    play(story)


def test_a_step_that_comes_out_otherwise_when_it_is_done_again_is_told_as_other_differences_are() -> None:
    """It is known only once the step is done, long after the attempt began."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        engine.lines += [{"attempt": 1, "event": "attempt_start", "resumed_step": 4, "differences": []}]
        await scene.look(passes=2)
        difference = "loss of step 5, done again: 2.5 -> 2.75"
        engine.lines += [{"attempt": 1, "event": "differs", "step": 5, "difference": difference}]
        job = await scene.look(passes=3)
        assert job.status.attempts[0].resume_differences == [difference]
        told = [e for e in await scene.store.events("default", "a") if e.reason == "ResumeDiffers"]
        assert [event.message for event in told] == [
            f"attempt 1 goes on from step 4, and from there bits may differ: {difference}"
        ]

    play(story)


def test_an_attempt_that_does_not_go_on_from_what_was_durable_says_so_once() -> None:
    """A user names another claim for a job that runs: its checkpoints stay on the one before. The steps that
    are done again were counted, and nobody told why."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        for attempt, resumed, durable in ((1, 0, 30), (2, 30, 60), (3, 0, 0)):
            engine.lines += [
                {"attempt": attempt, "event": "attempt_start", "resumed_step": resumed},
                {"attempt": attempt, "event": "checkpoint", "step": durable},
            ]
            engine.progress = Progress(attempt, durable + 5, None, durable, "training")
            job = await scene.look(passes=4)
            if attempt < 3:
                engine.vanish(job, attempt, 0)
                engine.progress = None
                await scene.look()
        await trains_on(scene, engine, 3)
        assert [record.lost_steps for record in job.status.attempts] == [5, 65, None]
        told = [e for e in await scene.store.events("default", "a") if e.reason == "ResumedEarlier"]
        assert [(event.type, event.count) for event in told] == [("Warning", 1)]
        assert told[0].message.startswith(
            "attempt 3 goes on from step 0, though step 60 was durable in attempt 2: that is not in its run "
            "directory, or cannot be read. Was storage.claim changed, "
        )

    play(story)


def test_an_attempt_that_was_lost_without_a_trace_hides_nothing_of_what_was_durable_before_it() -> None:
    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        engine.lines += [
            {"attempt": 1, "event": "attempt_start", "resumed_step": 0},
            {"attempt": 1, "event": "checkpoint", "step": 60},
        ]
        engine.progress = Progress(1, 65, None, 60, "training")
        for attempt in (1, 2):
            job = await scene.look()
            engine.vanish(job, attempt, 0)
            engine.progress = None
        job = await scene.look()
        assert [record.durable_step for record in job.status.attempts] == [60, None, None]
        engine.lines += [{"attempt": 3, "event": "attempt_start", "resumed_step": 0}]
        await scene.look()
        (told,) = [e for e in await scene.store.events("default", "a") if e.reason == "ResumedEarlier"]
        assert "goes on from step 0, though step 60 was durable in attempt 1: " in told.message

    play(story)


def test_saves_that_fail_are_told_once_and_that_they_work_again() -> None:
    """Else the work at risk grows, and nobody knows until a log is read or an interval is over twice."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        for step, durable, fault in (
            (30, 20, None),
            (42, 20, "step 40 could not be saved: No space left on device"),
            (48, 20, "step 46 could not be saved: No space left on device"),
            (52, 50, None),
        ):
            scene.now += timedelta(seconds=5)
            seconds = scene.now.timestamp()
            engine.progress = Progress(1, step, 100, durable, "training", save_fault=fault, updated=seconds)
            job = await scene.look()
            message = f"step {step} of 100; step {durable} is durable"
            assert job.status.message == (f"{message}; {fault}" if fault else message)
            assert job.status.progress is not None
            assert job.status.progress.save_fault == fault
        told = [e for e in await scene.store.events("default", "a") if e.reason.startswith("Save")]
        assert [(event.type, event.reason, event.message, event.count) for event in told] == [
            (
                "Warning",
                "SaveFailed",
                "step 40 could not be saved: No space left on device; training goes on and another save is "
                "tried, but only step 20 is durable",
                1,
            ),
            ("Normal", "SavedAgain", "step 50 is durable", 1),
        ]

    play(story)


def test_an_attempt_that_cannot_be_ended_for_hours_has_figures_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pods go on as long as the operator is down, and so does what would be lost, and what it costs."""

    async def refuse(job: TrainingJob, attempt: int) -> None:
        raise Unavailable("failed calling webhook: connection refused")

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        job = await scene.submit(make(replicas=1))
        await scene.look()
        with monkeypatch.context() as down:
            down.setattr(engine, "stop", refuse)
            job = await scene.store.get("default", "a")
            job.spec = job.spec.model_copy(update={"suspend": True})
            await scene.store.replace_spec(job)
            for step, fault in ((20, None), (3000, "step 2000 could not be saved: No space left on device")):
                scene.now += timedelta(hours=1)
                engine.progress = Progress(1, step, None, 15, "training", save_fault=fault)
                with pytest.raises(Unavailable):
                    await scene.look(1)
                job = await scene.store.get("default", "a")
                assert job.status.progress is not None
                assert (job.status.progress.step, job.status.progress.durable_step) == (step, 15)
                assert job.status.phase is Phase.SUSPENDING
                assert job.status.message.startswith("attempt 1 could not be ended and is tried again: ")
            assert (await scene.reasons())[-2:] == ["StopFailed", "SaveFailed"]
        assert (await scene.look(5)).status.phase is Phase.SUSPENDED

    play(story)


def test_the_next_attempt_begins_with_no_failed_save_and_a_status_stays_bounded() -> None:
    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        engine.progress = Progress(1, 3, None, 0, "training", save_fault="x" * 5000)
        job = await scene.look()
        assert job.status.message == f"step 3; nothing is durable yet; {'x' * FAULT_CHARACTERS}"
        (event,) = [e for e in await scene.store.events("default", "a") if e.reason == "SaveFailed"]
        assert event.message.endswith("tried, but nothing is durable yet")
        engine.vanish(job, 1, 0)
        await scene.look()
        engine.progress = Progress(2, 5, None, 0, "training")
        await scene.look(passes=5)
        assert not [e for e in await scene.store.events("default", "a") if e.reason == "SavedAgain"]

    play(story)


def test_a_damaged_checkpoint_that_was_passed_over_is_told_with_the_work_that_it_cost() -> None:
    """A job that had saved all it had done lost twenty steps: its status did not say by what."""

    async def story(scene: Scene) -> None:
        engine = telling(scene)
        await scene.submit(make(replicas=1))
        await scene.look()
        engine.lines += [
            {"attempt": 1, "event": "attempt_start", "resumed_step": 0, "skipped": []},
            {"attempt": 1, "event": "first_step", "time": scene.now.timestamp(), "step": 1},
            {"attempt": 1, "event": "checkpoint", "step": 180},
            {"attempt": 1, "event": "checkpoint", "step": 200},
        ]
        engine.stepped += [{"attempt": 1, "step": n, "seconds": 0.5} for n in range(1, 201)]
        await scene.look()
        engine.vanish(await scene.store.get("default", "a"), 1, 0)
        await scene.look()
        bad = {
            "checkpoint": "step-00000200",
            "reason": "rank 0: rank-0.safetensors: checksum 6d7d of block 3",
        }
        engine.lines += [{"attempt": 2, "event": "attempt_start", "resumed_step": 180, "skipped": [bad]}]
        job = await scene.look(passes=5)
        await trains_on(scene, engine, 2)
        first, second = job.status.attempts
        assert (first.lost_steps, first.passed_over) == (20, [])
        why = "step-00000200: rank 0: rank-0.safetensors: checksum 6d7d of block 3"
        assert second.passed_over == [why]
        told = [e for e in await scene.store.events("default", "a") if e.reason == "CheckpointPassedOver"]
        assert [(event.type, event.count) for event in told] == [("Warning", 1)]
        assert told[0].message == (f"attempt 2 goes on from step 180, as nothing newer can be used: {why}")

    play(story)


def test_why_a_loss_is_another_one_after_a_resume_stays_told_beside_that_it_is() -> None:
    """Where both were read at once, that the loss differs was all that was left."""
    start = {"attempt": 2, "event": "attempt_start", "resumed_step": 5, "differences": []}
    told = [
        "trained parameters of model are 2, and were 4: freeze by the step, not in one alone",
        "loss of step 7, done again: 6.9 -> 7.1",
    ]
    differs = [{"attempt": 2, "event": "differs", "step": 6, "difference": one} for one in told]
    assert work_of(2, [start, *differs], ()).resume_differences == tuple(told)


@pytest.mark.parametrize(
    "told", [None, "step-00000200", [1, None, "x"], [{}] * 100, [{"reason": "x" * 5000}]]
)
def test_whatever_a_trainer_tells_of_checkpoints_passed_over_the_status_stays_bounded(told: object) -> None:
    line = {"attempt": 1, "event": "attempt_start", "resumed_step": 0, "skipped": told}
    kept = work_of(1, [line], ()).passed_over
    assert len(kept) <= TEXTS
    assert all(len(text) <= TEXT_CHARACTERS for text in kept)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (["ranks: 4 -> 2"], ("ranks: 4 -> 2",)),
        ([], ()),
        (None, ()),
        ("ranks", ()),
        ([1, "a: 1 -> 2", None], ("a: 1 -> 2",)),
        (["x" * 5000] * 100, ("x" * TEXT_CHARACTERS,) * TEXTS),
    ],
)
def test_whatever_a_trainer_tells_of_differences_the_status_stays_bounded(
    told: object, kept: tuple[str, ...]
) -> None:
    line = {"attempt": 1, "event": "attempt_start", "resumed_step": 0, "differences": told}
    assert work_of(1, [line], ()).resume_differences == kept
