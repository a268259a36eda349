"""A job whose rank 0 answers no more: since when is told, and of its speed nothing, until it answers."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from rich.console import Console
from scene import Scene, make, play, telling

from holdfast_controller.cli.description import describe_job
from holdfast_controller.heartbeat import Silence
from holdfast_controller.jobs import JobProgress, Phase, TrainingJob
from holdfast_controller.policy.lost_work import idle_from
from holdfast_controller.reconciler import Reconciler
from holdfast_trainer.contract import Progress

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FAST = replace(
    Progress(1, 46, 100, 40, "training", resumed_step=0, updated=NOON.timestamp()),
    tokens_per_second=1000.0,
    eta_seconds=54.0,
    memory_bytes=3 * 10**9,
    verdict="all is well",
)
ANSWERS = Silence(0.0, 300.0)


def unanswered(seconds: float) -> Silence:
    return Silence(seconds, 300.0, False, 0, unheard=seconds)


def told(job: TrainingJob) -> JobProgress:
    assert job.status.progress is not None
    return job.status.progress


def words(job: TrainingJob) -> str:
    text = io.StringIO()
    Console(file=text, width=160).print(describe_job(job, {"attempts": []}, [], 160))
    return text.getvalue()


def test_what_is_told_of_a_job_whose_rank_0_answers_no_more() -> None:
    """Its node was cut off from the controller: for hours `top` and `kubectl` had its speed and the time left
    as of the second before."""

    async def story(scene: Scene) -> None:
        scene.now = NOON
        engine = telling(scene)

        async def look(silence: Silence, progress: Progress = FAST) -> TrainingJob:
            job = await scene.store.get("default", "a")
            engine.progress, engine.attempts[job.metadata.uid, 1].silence = progress, silence
            return await scene.look()

        await scene.submit(make(replicas=1))
        assert told(await look(ANSWERS)).tokens_per_second == 1000.0
        scene.now += timedelta(seconds=20)
        assert told(await look(unanswered(20.0))).tokens_per_second == 1000.0, "a long step may be under way"

        scene.now += timedelta(seconds=20)
        job = await look(unanswered(40.0))
        assert told(job).unheard_since == NOON
        assert (told(job).tokens_per_second, told(job).eta_seconds, told(job).verdict) == (None, None, None)
        assert (told(job).step, told(job).durable_step, told(job).memory_bytes) == (46, 40, 3 * 10**9)
        assert job.status.message == (
            "step 46 of 100; step 40 is durable; rank 0 has not answered since 2026-01-01 12:00:00 UTC"
        )
        assert idle_from(job.status) is None, "it may well train"
        assert "not known: rank 0 has not answered for" in words(job)
        scene.now += timedelta(seconds=7)
        version = job.metadata.resource_version
        later = await look(unanswered(46.0))
        assert told(later).unheard_since == NOON
        assert later.metadata.resource_version == version, "nothing new is to be written of it"

        job = await look(ANSWERS)
        assert (told(job).tokens_per_second, told(job).unheard_since) == (1000.0, None)
        assert job.status.message == "step 46 of 100; step 40 is durable"

        scene.now += timedelta(seconds=100)
        assert told(await look(unanswered(100.0))).unheard_since == NOON + timedelta(seconds=47)
        job = await scene.end(1)
        assert job.status.phase is not Phase.RUNNING
        assert told(job).unheard_since is None, "that it does not answer has its reason now"

    play(story)


def test_what_is_told_of_a_job_whose_rank_0_answers_a_controller_that_comes_after_not_at_all() -> None:
    """As where the chart's upgrade came with the network policy that keeps it out: for hours the job had its
    speed and the time left as of before, and `training` for all that was said of it."""

    async def story(scene: Scene) -> None:
        scene.now = NOON
        engine = telling(scene)
        job = await scene.submit(make(replicas=1))
        attempt = engine.attempts[job.metadata.uid, 1]
        engine.progress, attempt.silence = FAST, ANSWERS
        await scene.look()

        scene.now += timedelta(hours=1)
        scene.reconciler = Reconciler(scene.store, engine, clock=lambda: scene.now)
        engine.progress, attempt.silence = None, None
        job = await scene.look()
        assert job.status.message == "step 46 of 100; step 40 is durable"
        assert (told(job).tokens_per_second, told(job).unheard_since) == (1000.0, None), "nobody asked yet"

        scene.now += timedelta(seconds=40)
        attempt.silence = Silence(40.0, math.inf, False, 0, unheard=40.0)
        job = await scene.look()
        assert told(job).unheard_since == NOON + timedelta(hours=1)
        assert (told(job).tokens_per_second, told(job).eta_seconds) == (None, None)
        assert (told(job).step, told(job).memory_bytes) == (46, 3 * 10**9)
        assert job.status.message == (
            "step 46 of 100; step 40 is durable; rank 0 has not answered since 2026-01-01 13:00:00 UTC"
        )

    play(story)
