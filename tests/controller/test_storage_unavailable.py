"""A disk that somebody else has filled: a job that cannot begin waits for room, and is not ended for it."""

from __future__ import annotations

from datetime import timedelta

from scene import Scene, make, play

from holdfast_controller.jobs import Phase, Verdict


def test_it_waits_ever_longer_and_goes_on_once_there_is_room() -> None:
    """A spot reclaim in a night in which the volume is full for hours."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(retries={"failures": 0}))
        for replica in range(2):
            scene.engine.vanish(job, 1, replica)
        job = await scene.look(passes=4)
        waited = []
        for attempt in range(2, 10):
            assert job.status.attempt == attempt
            scene.engine.find_no_storage(job, attempt)
            job = await scene.look(passes=4)
            assert job.status.attempts[-1].verdict is Verdict.STORAGE_UNAVAILABLE
            assert (job.status.phase, job.status.failures, job.status.disruptions) == (Phase.RECOVERING, 0, 1)
            assert "starts again after a back-off: replica 0: there is no room to begin" in job.status.message
            assert job.status.next_start_at is not None
            waited.append((job.status.next_start_at - scene.now).total_seconds())
            scene.now = job.status.next_start_at + timedelta(seconds=1)
            job = await scene.look(passes=4)
        longest = [15, 30, 60, 120, 240, 300, 300, 300]
        assert all(0.7 * most < wait <= most for wait, most in zip(waited, longest, strict=True)), waited
        assert "StorageUnavailable" in await scene.reasons()

        assert len(scene.engine.running(job.metadata.uid)) == 1
        job = await scene.end(0, 0)
        assert job.status.phase is Phase.SUCCEEDED

    play(story)
