"""How jobs go: on request, or when the time of a finished one is up; and what keeps them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from fakes import MemoryEngine, MemoryStore
from scene import Scene, make, play

from holdfast_controller.cluster import Conflict, NotFound, Unavailable
from holdfast_controller.jobs import Phase, TrainingJob


def test_delete_stops_then_forgets() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make())
        await scene.store.mark_deleted("default", "a")
        with pytest.raises(NotFound):
            await scene.look()
        assert scene.engine.attempts == {}
        assert not scene.engine.running(job.metadata.uid)

    play(story)


def test_a_finished_job_goes_when_its_time_is_up() -> None:
    async def story(scene: Scene) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=60))
        await scene.end(0, 0)
        assert scene.after == 60
        scene.now += timedelta(seconds=60)
        with pytest.raises(NotFound):
            await scene.look()

    play(story)


class BehindStore(MemoryStore):
    """Its copy of a job may be of before a change that no watch has told of."""

    copy: TrainingJob | None = None

    async def get(self, namespace: str, name: str) -> TrainingJob:
        return self.copy or await super().get(namespace, name)


def test_a_job_that_was_given_a_longer_life_unheard_keeps_all_it_has() -> None:
    """It stayed, and its attempt's pods and last lines were gone."""

    async def story(scene: Scene) -> None:
        store = scene.store = BehindStore()
        scene.run_on(scene.engine)
        await scene.submit(make(ttlSecondsAfterFinished=60))
        finished = await scene.end(0, 0)
        kept = dict(scene.engine.attempts)
        longer = finished.spec.model_copy(update={"ttl_seconds_after_finished": 10**6})
        await store.replace_spec(finished.model_copy(update={"spec": longer}))
        store.copy = finished
        scene.now += timedelta(seconds=60)
        with pytest.raises(Conflict):
            await scene.look(passes=1)
        assert scene.engine.attempts == kept != {}
        store.copy = None
        job = await scene.look()
        assert (job.metadata.deletion_timestamp, job.status.phase) == (None, Phase.SUCCEEDED)

    play(story)


class ForeignFiles(MemoryEngine):
    """A run directory with files of another user."""

    theirs = True

    async def delete(self, job: TrainingJob) -> None:
        if self.theirs:
            raise Unavailable("cannot remove /runs/a/model.bin: Permission denied")
        await super().delete(job)


@pytest.mark.parametrize("asked", [True, False], ids=["deleted", "its time is up"])
def test_a_job_whose_files_cannot_be_removed_says_so_and_goes_once_they_can(asked: bool) -> None:
    """It was being deleted, for ever, and only the controller's log had the reason."""

    async def story(scene: Scene) -> None:
        engine = scene.run_on(ForeignFiles(clock=scene.seconds))
        await scene.submit(make(ttlSecondsAfterFinished=60))
        await scene.end(0, 0)
        if asked:
            await scene.store.mark_deleted("default", "a")
        scene.now += timedelta(seconds=60)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await scene.look(passes=1)
        job = await scene.store.get("default", "a")
        said = "could not be deleted and is tried again: cannot remove /runs/a/model.bin: Permission denied"
        assert job.status.message == said
        assert (await scene.reasons()).count("DeleteFailed") == 1
        engine.theirs = False
        with pytest.raises(NotFound):
            await scene.look()

    play(story)


class LockedStore(MemoryStore):
    """A policy of the cluster keeps its jobs from being deleted."""

    async def mark_deleted(
        self, namespace: str, name: str, *, known: TrainingJob | None = None
    ) -> TrainingJob:
        raise Unavailable("the apiserver refuses it: jobs are kept for the audit")


def test_a_job_that_may_not_be_deleted_when_its_time_is_up_says_so_and_keeps_all_it_has() -> None:
    async def story(scene: Scene) -> None:
        scene.store = LockedStore()
        scene.run_on(scene.engine)
        await scene.submit(make(ttlSecondsAfterFinished=60))
        await scene.end(0, 0)
        kept = dict(scene.engine.attempts)
        scene.now += timedelta(seconds=60)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await scene.look(passes=1)
        job = await scene.store.get("default", "a")
        assert job.status.message.endswith(
            "is tried again: the apiserver refuses it: jobs are kept for the audit"
        )
        assert (await scene.reasons()).count("DeleteFailed") == 1
        assert scene.engine.attempts == kept != {}

    play(story)


@pytest.mark.parametrize("ttl", [10**12, 2**63 - 1])
def test_a_time_to_live_that_no_calendar_has_the_end_of_is_for_ever(ttl: int) -> None:
    """Each look at the finished job failed with a traceback, every half a minute."""

    async def story(scene: Scene) -> None:
        await scene.submit(make(ttlSecondsAfterFinished=ttl))
        assert (await scene.end(0, 0)).status.phase is Phase.SUCCEEDED
        scene.now += timedelta(days=10_000)
        await scene.look()
        assert scene.after is not None
        assert scene.after > 10**11

    play(story)
