"""Jobs that were stored though they cannot run: each says why, loses nothing, and goes on once corrected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import MemoryEngine, MemoryStore

from holdfast_controller.cluster import AttemptObservation, NotFound, NotReady, Unavailable
from holdfast_controller.jobs import Metadata, Phase, Spec, TrainingJob, Verdict
from holdfast_controller.reconciler import Reconciler
from holdfast_controller.spec import Idle, Retries
from holdfast_trainer.contract import EXIT_CONFIG_ERROR

FAULT = "spec.gpus: '0.3' GPUs: a share is 1/N of a GPU"


class Scene:
    """A store and an engine in memory, and passes one at a time over the job `a`."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.engine = MemoryEngine()
        self.reconciler = Reconciler(self.store, self.engine)

    async def submit(self, **spec: Any) -> TrainingJob:
        body = {"command": ["x"], "replicas": 2, **spec}
        await self.store.create(TrainingJob(metadata=Metadata(name="a"), spec=Spec.model_validate(body)))
        return await self.look()

    async def edit(self, faults: tuple[str, ...] = (), **spec: Any) -> TrainingJob:
        """As by kubectl, which no check of ours stops."""
        job = await self.store.get("default", "a")
        job.spec = job.spec.model_copy(update=spec)
        await self.store.edited_past_our_checks(job, faults)
        return await self.look()

    async def look(self, passes: int = 3) -> TrainingJob:
        for _ in range(passes):
            await self.reconciler.reconcile("default/a")
        return await self.store.get("default", "a")

    async def told(self) -> list[tuple[str, int]]:
        return [(event.reason, event.count) for event in await self.store.events("default", "a")]


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def played() -> None:
        await story(Scene())

    asyncio.run(played())


def test_what_the_cluster_does_not_allow_waits_and_says_so_until_it_is_corrected() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(replicas=9)
        said = "cannot run as it is: asks for 9 slots; correct the spec and it goes on"
        assert (job.status.phase, job.status.message, job.status.attempt) == (Phase.QUEUED, said, 0)
        (admitted,) = job.status.conditions
        assert (admitted.type, admitted.status, admitted.reason) == ("Admitted", "False", "Refused")
        assert admitted.message == said
        assert await scene.told() == [("Refused", 1)], "once, however often it is looked at"
        version = job.metadata.resource_version
        assert (await scene.look()).metadata.resource_version == version, "and nothing is written again"

        job = await scene.edit(replicas=8)
        assert "asks for 8 slots" in job.status.message
        assert await scene.told() == [("Refused", 1), ("Refused", 1)]
        await scene.edit(ttl_seconds_after_finished=9)
        assert await scene.told() == [("Refused", 1), ("Refused", 1)], "for the same reason"
        job = await scene.edit(replicas=2)
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 1)

    play(story)


def test_an_attempt_that_runs_goes_on_when_its_spec_becomes_unreadable_and_no_other_follows() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit()
        assert job.status.phase is Phase.STARTING
        job = await scene.edit(faults=(FAULT,))
        assert job.status.phase is Phase.STARTING
        assert scene.engine.running(job.metadata.uid)
        assert "no other attempt starts until it is corrected: spec.gpus: '0.3' GPUs" in job.status.message
        assert await scene.told() == [("AttemptOpened", 1), ("Refused", 1)]

        scene.engine.vanish(job, 1, 1)
        scene.engine.end(job, 1, 0, 1)
        job = await scene.look()
        assert (job.status.phase, job.status.attempt, job.status.disruptions) == (Phase.QUEUED, 1, 1)
        assert FAULT in job.status.message
        job = await scene.edit()
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)
        assert FAULT not in job.status.message

    play(story)


def test_an_attempt_that_runs_says_that_the_spec_was_changed_since_it_was_made() -> None:
    """`kubectl edit` of a job at work: what is shown beside the spec is not yet made from it."""

    async def story(scene: Scene) -> None:
        await scene.submit()
        job = await scene.edit(retries=Retries(failures=9))
        assert "changed" not in job.status.message, "that counts at once"
        job = await scene.edit(env={"A": "1"})
        said = "the spec was changed since attempt 1 was made: the next one is made from it"
        assert job.status.message.endswith(said)
        job = await scene.edit(replicas=9)
        refused = "since attempt 1 was made, and no other can be made from it: asks for 9 slots"
        assert job.status.message.endswith(refused), "it is told while there is time to correct it"
        job = await scene.edit(replicas=2)
        assert job.status.message.endswith(said)
        scene.engine.vanish(job, 1, 0)
        scene.engine.end(job, 1, 1, 1)
        job = await scene.look()
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)
        assert said not in job.status.message

    play(story)


def test_an_edit_that_keeps_a_job_from_going_on_waits_to_be_corrected_and_no_work_is_lost() -> None:
    """Its run directory is this job's alone: a job submitted anew would begin from nothing."""

    async def story(scene: Scene) -> None:
        job = await scene.submit()
        scene.engine.fail(job, 1, 0, 800, "ValueError: a bad batch")
        scene.engine.end(job, 1, 1, 1)
        job = await scene.edit(config={"optim": {"warmup_steps": 30}})
        job.status.next_start_at = None
        job = await scene.store.replace_status(job, job.status)
        job = await scene.look()
        assert (job.status.attempt, job.status.attempts[0].durable_step) == (2, 800)
        for replica in (0, 1):
            scene.engine.end(job, 2, replica, EXIT_CONFIG_ERROR)
        for _ in range(2):
            job = await scene.look()
            assert (job.status.phase, job.status.attempt) == (Phase.QUEUED, 2)
            assert job.status.message == (
                "cannot run as it is: attempt 2: replica 0: rank 0 ended with exit code 78 (the spec was "
                "changed since attempt 1, whose checkpoints are kept); correct the spec and it goes on"
            )
        assert dict(await scene.told())["Refused"] == 1
        job = await scene.edit(config={})
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 3)

    play(story)


@pytest.mark.parametrize("trained", [False, True])
def test_a_configuration_that_is_corrected_while_its_attempt_still_starts_is_tried(trained: bool) -> None:
    """Who sees the mistake first: the attempt that ends by it is not of the spec as it is by then."""
    wrong, right = {"optim": {"lr_rate": 1}}, {"optim": {"lr": 1}}

    async def story(scene: Scene) -> None:
        job = await scene.submit(config={} if trained else wrong)
        if trained:
            scene.engine.vanish(job, 1, 0)
            scene.engine.fail(job, 1, 1, 800, "Connection reset by peer")
            job = await scene.edit(config=wrong)
        last = job.status.attempt
        job = await scene.edit(config=right)
        assert job.status.attempt == last
        assert job.status.message.endswith("the next one is made from it")
        for replica in (0, 1):
            scene.engine.end(job, last, replica, EXIT_CONFIG_ERROR)
        job = await scene.look()
        assert job.status.attempts[-2].verdict is Verdict.CONFIG_ERROR
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, last + 1)
        for replica in (0, 1):
            scene.engine.end(job, last + 1, replica, 0)
        assert (await scene.look()).status.phase is Phase.SUCCEEDED

    play(story)


def test_a_step_that_fails_twice_alike_is_tried_with_the_spec_that_was_corrected_meanwhile() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit()
        for number in (1, 2):
            scene.engine.fail(job, number, 0, 800, "ValueError: a bad batch")
            scene.engine.end(job, number, 1, 1)
            if number == 2:
                await scene.edit(config={"data": {"skip": [801]}})
            job = await scene.look()
            job.status.next_start_at = None
            job = await scene.store.replace_status(job, job.status)
            job = await scene.look()
        assert (job.status.attempt, job.status.failures) == (3, 2)
        assert not job.status.phase.final

    play(story)


def test_a_spec_that_was_changed_meanwhile_is_no_retry_for_a_failure() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(retries={"failures": 0})
        job = await scene.edit(config={"optim": {"lr": 1}})
        for replica in (0, 1):
            scene.engine.end(job, 1, replica, 1)
        job = await scene.look()
        assert (job.status.phase, job.status.attempt) == (Phase.FAILED, 1)

    play(story)


def test_a_configuration_that_was_wrong_from_the_beginning_is_final() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit()
        for replica in (0, 1):
            scene.engine.end(job, 1, replica, EXIT_CONFIG_ERROR)
        job = await scene.look()
        assert job.status.phase is Phase.FAILED
        assert job.status.message.endswith("correct it and submit again")

    play(story)


@pytest.mark.parametrize("running", [False, True])
def test_an_unreadable_job_can_be_suspended_and_deleted(running: bool) -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(suspend=not running)
        await scene.edit(faults=(FAULT,), suspend=True)
        for replica in range(2 if running else 0):
            scene.engine.end(job, 1, replica, 0)
        assert (await scene.look()).status.phase is Phase.SUSPENDED
        await scene.store.mark_deleted("default", "a")
        with pytest.raises(NotFound):
            await scene.look()

    play(story)


def test_an_attempt_that_the_engine_does_not_take_says_why_and_is_tried_again() -> None:
    """A quota, an admission webhook: what only the engine can know, and nobody else would tell."""

    async def story(scene: Scene) -> None:
        real = scene.engine.start

        async def refuse(job: TrainingJob, attempt: int) -> None:
            raise NotReady("admission webhook denied the request: no budget")

        scene.engine.start = refuse  # type: ignore[method-assign]
        versions = []
        await scene.store.create(TrainingJob(metadata=Metadata(name="a"), spec=Spec(command=["x"])))
        for _ in range(4):
            with pytest.raises(NotReady):
                await scene.look(1)
            job = await scene.store.get("default", "a")
            versions.append(job.metadata.resource_version)
        assert job.status.message == (
            "attempt 1 could not be started and is tried again: "
            "admission webhook denied the request: no budget"
        )
        assert versions[1:] == versions[:1] * 3, "said once, not with every try"
        assert await scene.told() == [("AttemptOpened", 1), ("StartFailed", 1)]
        assert job.status.phase is Phase.QUEUED, "nothing of it is there that could start"
        admitted = next(one for one in job.status.conditions if one.type == "Admitted")
        assert (admitted.status, admitted.reason) == ("False", "StartFailed")
        assert admitted.message == job.status.message

        scene.engine.start = real  # type: ignore[method-assign]
        job = await scene.look()
        assert job.status.phase is Phase.STARTING
        assert "tried again" not in job.status.message

    play(story)


@pytest.mark.parametrize("wish", ["suspend", "delete"])
def test_an_attempt_that_cannot_be_ended_says_why_and_is_tried_again(wish: str) -> None:
    """The operator is down, and with it the webhook that every change of its objects goes through."""

    async def story(scene: Scene) -> None:
        job = await scene.submit()
        real = scene.engine.stop

        async def refuse(job: TrainingJob, attempt: int) -> None:
            raise Unavailable("failed calling webhook: connection refused")

        scene.engine.stop = refuse  # type: ignore[method-assign]
        if wish == "delete":
            await scene.store.mark_deleted("default", "a")
        else:
            job.spec = job.spec.model_copy(update={"suspend": True})
            await scene.store.replace_spec(job)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await scene.look(1)
        job = await scene.store.get("default", "a")
        assert job.status.message == (
            "attempt 1 could not be ended and is tried again: failed calling webhook: connection refused"
        )
        assert (await scene.told())[-1] == ("StopFailed", 1), "said once, not with every try"

        scene.engine.stop = real  # type: ignore[method-assign]
        if wish == "suspend":
            assert (await scene.look()).status.phase is Phase.SUSPENDED
        else:
            with pytest.raises(NotFound):
                await scene.look()

    play(story)


class KeepingStore(MemoryStore):
    """Others keep its jobs too, and take their finalizers off none."""

    async def remove(self, job: TrainingJob) -> None:
        """It stays."""


@pytest.mark.parametrize("stands", ["runs", "backs off", "has finished"])
def test_a_job_that_is_deleted_and_that_others_keep_says_so_and_what_it_came_to(stands: str) -> None:
    """It must not seem to run, or to start again soon; nor is what has succeeded suspended."""

    async def story(scene: Scene) -> None:
        scene.store = KeepingStore()
        scene.reconciler = Reconciler(scene.store, scene.engine)
        job = await scene.submit(replicas=1)
        if stands != "runs":
            scene.engine.end(job, 1, 0, 1 if stands == "backs off" else 0)
            await scene.look(1)
        await scene.store.keep_by(await scene.store.mark_deleted("default", "a"), "example.com/audit")
        job = await scene.look()
        assert not scene.engine.attempts
        verdict = job.status.attempts[0].verdict
        if stands == "has finished":
            assert (job.status.phase, verdict) == (Phase.SUCCEEDED, Verdict.FINISHED)
        else:
            assert (job.status.phase, job.status.next_start_at) == (Phase.SUSPENDED, None)
            assert "it stays until its finalizer example.com/audit" in job.status.message
            assert verdict is (Verdict.SUSPENDED if stands == "runs" else Verdict.FAILED)
        version = job.metadata.resource_version
        assert (await scene.look()).metadata.resource_version == version, "told once"

    play(story)


def test_a_job_that_others_keep_too_says_once_that_its_pieces_cannot_be_deleted() -> None:
    """That, and that it stays until their finalizer is off, were told in turn: each pass wrote twice, with an
    event, and what it wrote brought on the next."""

    async def story(scene: Scene) -> None:
        await scene.submit()
        real = scene.engine.delete

        async def refuse(job: TrainingJob) -> None:
            raise Unavailable("failed calling webhook: connection refused")

        scene.engine.delete = refuse  # type: ignore[method-assign]
        await scene.store.keep_by(await scene.store.mark_deleted("default", "a"), "example.com/audit")
        with pytest.raises(Unavailable):
            await scene.look(9)
        written = (await scene.store.get("default", "a")).metadata.resource_version
        for _ in range(3):
            with pytest.raises(Unavailable):
                await scene.look(1)
        job = await scene.store.get("default", "a")
        assert job.metadata.resource_version == written
        assert job.status.message == (
            "could not be deleted and is tried again: failed calling webhook: connection refused"
        )
        assert (await scene.told())[-1] == ("DeleteFailed", 1)

        scene.engine.delete = real  # type: ignore[method-assign]
        with pytest.raises(NotFound):
            await scene.look()

    play(story)


def test_an_attempt_that_the_engine_does_not_take_starts_with_what_is_corrected_meanwhile() -> None:
    async def story(scene: Scene) -> None:
        real = scene.engine.start

        async def refuse(job: TrainingJob, attempt: int) -> None:
            raise NotReady("exceeded quota: pods=3")

        scene.engine.start = refuse  # type: ignore[method-assign]
        with pytest.raises(NotReady):
            await scene.submit(replicas=4)
        scene.engine.start = real  # type: ignore[method-assign]
        job = await scene.edit(replicas=9)
        assert "cannot run as it is: asks for 9 slots" in job.status.message
        assert not scene.engine.attempts, "what can never run is not even asked for"
        job = await scene.edit(replicas=3)
        (record,) = job.status.attempts
        (attempt,) = scene.engine.running(job.metadata.uid)
        assert (record.replicas, len(attempt.replicas)) == (3, 3)

    play(story)


@pytest.mark.parametrize("made", [True, False], ids=["its pods are there", "nothing of it is made yet"])
def test_an_attempt_that_waits_is_made_anew_when_its_spec_is_corrected(made: bool) -> None:
    """As its message says: ask for less, name another claim, correct the image."""

    async def story(scene: Scene) -> None:
        scene.engine.slots = 4
        other = TrainingJob(metadata=Metadata(name="b"), spec=Spec(command=["x"], replicas=1))
        await scene.engine.start(other, 1)
        job = await scene.submit(replicas=2 if made else 4, image="mistyped:1")
        if made:
            scene.engine.find_no_image(job, 1)
            await scene.look()
        job = await scene.look()
        assert (job.status.phase, job.status.attempt) == (Phase.QUEUED, 1)

        job = await scene.edit(replicas=2, image="correct:1")
        job = await scene.look(passes=5)
        (running,) = scene.engine.running(job.metadata.uid)
        assert (running.number, running.job.spec.image, len(running.replicas)) == (2, "correct:1", 2)
        assert scene.engine.launched.count((job.metadata.uid, 1)) == made, "it is not started to be ended"
        first = job.status.attempts[0]
        assert first.reason == "its spec was changed while it waited; the next one is as it asks now"
        assert (job.status.failures, job.status.disruptions) == (0, 0)
        job = await scene.edit(image="another:1")
        assert [job.status.attempt, running.alive] == [2, True], "what has started goes on as it is"

    play(story)


@pytest.mark.parametrize(
    ("faults", "changes"),
    [
        ((FAULT,), {"image": ""}),  # what cannot be read is left out
        ((), {"ttl_seconds_after_finished": 9, "retries": Retries(failures=7), "idle": Idle.STOP}),
        ((), {}),
    ],
    ids=["into one that cannot be read", "in what makes no other attempt of it", "not at all"],
)
def test_an_attempt_that_waits_is_left_alone_where_its_spec_is_changed_otherwise(
    faults: tuple[str, ...], changes: dict[str, Any]
) -> None:
    """It keeps its place in a queue."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(image="mistyped:1")
        scene.engine.find_no_image(job, 1)
        job = await scene.edit(faults, **changes) if faults or changes else await scene.look()
        job = await scene.look(passes=5)
        assert (job.status.phase, job.status.attempt, job.status.attempts[0].verdict) == (
            Phase.QUEUED,
            1,
            None,
        )

    play(story)


def test_a_job_that_waits_for_an_operator_may_be_corrected_meanwhile() -> None:
    """There is nothing to be ended: it was for as long as the operator was missing, and waited no more."""

    async def story(scene: Scene) -> None:
        here = scene.engine.observe
        why = "waits for the operator"

        async def missing(job: TrainingJob, attempt: int) -> AttemptObservation:
            return AttemptObservation(attempt, exists=True, gone=False, waiting=why)

        async def start(job: TrainingJob, attempt: int) -> None:
            """It does not know such objects."""

        started, scene.engine.start = scene.engine.start, start  # type: ignore[method-assign]
        scene.engine.observe = missing  # type: ignore[method-assign]
        await scene.submit(replicas=3)
        job = await scene.edit(replicas=2)
        assert (job.status.phase, job.status.message) == (Phase.QUEUED, why)
        assert job.status.attempts[0].detected_at is None, "nothing of it was lost"
        scene.engine.start = started  # type: ignore[method-assign]
        scene.engine.observe = here  # type: ignore[method-assign]
        job = await scene.look()
        (running,) = scene.engine.running(job.metadata.uid)
        assert (running.number, len(running.replicas), job.status.attempt) == (1, 2, 1)

    play(story)
