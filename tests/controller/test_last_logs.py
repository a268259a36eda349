"""The ranks' last lines and whole logs are asked for before the verdict, which waits for none in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from fakes import MemoryEngine, MemoryStore
from scene import Scene, make, play
from waiting import wait_until_async

from holdfast_controller.cluster import Unavailable
from holdfast_controller.jobs import Phase, TrainingJob
from holdfast_controller.reconciler import Reconciler


@pytest.mark.parametrize(("replicas", "kept"), [(8, False), (9, True)])
def test_logs_that_status_has_no_room_for_are_kept_before_the_verdict(replicas: int, kept: bool) -> None:
    async def story(scene: Scene) -> None:
        scene.engine.slots = replicas
        job = await scene.submit(make(replicas=replicas))
        scene.engine.vanish(job, 1, replicas - 1)
        await scene.look()
        scene.now += timedelta(seconds=1)
        job = await scene.look(passes=3)
        assert len(job.status.attempts[0].log_tail) == 8
        assert str(replicas - 1) in job.status.attempts[0].log_tail, "the one that was hit"
        assert ((job.metadata.uid, 1) in scene.engine.kept_logs) is kept

    play(story)


def test_all_ranks_of_an_attempt_are_asked_for_logs_though_its_job_asks_for_fewer_by_now() -> None:
    async def story(scene: Scene) -> None:
        await scene.submit(make(replicas=2))
        await scene.change(replicas=1)
        job = await scene.end(1, 1)
        assert set(job.status.attempts[0].log_tail) == {"0", "1"}

    play(story)


class LostNode(MemoryEngine):
    """Its replicas' logs lie on a node that does not answer."""

    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        raise Unavailable("the node does not answer")
        yield ""


def test_logs_that_cannot_be_read_do_not_keep_an_attempt_from_its_verdict() -> None:
    async def story() -> None:
        store, engine = MemoryStore(), LostNode()
        reconciler = Reconciler(store, engine)
        running = asyncio.create_task(reconciler.run())
        try:
            job = make(replicas=1, retries={"failures": 0})
            await store.create(job)

            async def phase(wanted: Phase) -> bool:
                return (await store.get("default", "a")).status.phase is wanted

            await wait_until_async(lambda: phase(Phase.STARTING), "the attempt")
            engine.end(job, 1, 0, 1)
            await wait_until_async(lambda: phase(Phase.FAILED), "the verdict")
            record = (await store.get("default", "a")).status.attempts[0]
            assert record.log_tail == {"0": "(its log could not be read: the node does not answer)"}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


class SlowNode(MemoryEngine):
    """It gives the log of an attempt at the third time of asking."""

    asked = 0

    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        self.asked += 1
        if self.asked % 3:
            raise Unavailable("the node does not answer")
        yield f"attempt {attempt}"


def test_each_attempt_has_as_many_tries_for_its_log() -> None:
    async def story() -> None:
        store, engine = MemoryStore(), SlowNode()
        running = asyncio.create_task(Reconciler(store, engine).run())
        try:
            job = make(replicas=1, retries={"failures": 1})
            await store.create(job)

            async def ended() -> TrainingJob | None:
                known = await store.get("default", "a")
                if engine.running(job.metadata.uid):
                    engine.end(job, known.status.attempt, 0, 1)
                return known if known.status.phase is Phase.FAILED else None

            found = await wait_until_async(ended, "both attempts to fail")
            assert found is not None
            tails = [record.log_tail for record in found.status.attempts]
            assert tails == [{"0": "attempt 1"}, {"0": "attempt 2"}]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


class SilentNode(MemoryEngine):
    """The log of replica 1 lies on a node that never answers."""

    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        await (asyncio.Event().wait() if rank == 1 else asyncio.sleep(0.01))  # the others' takes a moment
        yield f"rank {rank}"


def test_a_log_that_never_comes_takes_no_time_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_controller.reconciler.TAILS_SECONDS", 2.0)

    async def story() -> None:
        scene = Scene()
        engine = scene.run_on(SilentNode(clock=scene.seconds))
        job = await scene.submit(make(replicas=3))
        engine.vanish(job, 1, 1)
        await scene.look()
        scene.now += timedelta(seconds=1)
        job = await scene.look(passes=3)
        silent = "(its log could not be read: no answer in time)"
        assert job.status.attempts[0].log_tail == {"0": "rank 0", "1": silent, "2": "rank 2"}

    asyncio.run(story())
