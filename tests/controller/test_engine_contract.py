"""What every engine promises, on processes of this machine and in memory alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import MemoryEngine
from local_world import all_running, at_work, end, local_engine, until, waiting_job

from holdfast_controller.cluster import Engine, NotFound, NotReady, ReplicaState
from holdfast_controller.drills import DrillKind
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.local.launch import run_directory


@dataclass
class World:
    """An engine with room for four replicas, and the hand that ends its ranks."""

    engine: Engine
    end: Callable[[TrainingJob, int, int, int], None]


Story = Callable[[World], Coroutine[Any, Any, None]]
Tell = Callable[[Story], None]


@pytest.fixture(params=["local", "memory"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Tell:
    def run(story: Story) -> None:
        async def told() -> None:
            if request.param == "memory":
                memory = MemoryEngine()
                await story(World(memory, memory.end))
                return
            async with at_work(local_engine(tmp_path)) as engine:

                def end_rank(job: TrainingJob, attempt: int, rank: int, code: int) -> None:
                    run_directory(tmp_path, job).path.mkdir(parents=True, exist_ok=True)
                    end(tmp_path, job, attempt, rank, code)

                await story(World(engine, end_rank))

        asyncio.run(told())

    return run


def test_an_attempt_nobody_started_is_gone(tell: Tell) -> None:
    async def story(world: World) -> None:
        seen = await world.engine.observe(waiting_job(), 1)
        assert (seen.exists, seen.gone) == (False, True)
        await world.engine.stop(waiting_job(), 1)
        await world.engine.kill(waiting_job(), 1)

    tell(story)


def test_an_attempt_from_start_to_finish(tell: Tell) -> None:
    async def story(world: World) -> None:
        job = waiting_job()
        await world.engine.start(job, 1)
        seen = await until(world.engine, job, 1, "all replicas", all_running)
        assert (seen.exists, seen.gone, seen.waiting) == (True, False, "")
        assert seen.started_at is not None
        await world.engine.start(job, 1)  # a reconciler that is not sure asks again
        for rank in (0, 1):
            world.end(job, 1, rank, 0)
        seen = await until(world.engine, job, 1, "the end", lambda s: s.gone)
        assert [r.state for r in seen.replicas] == [ReplicaState.SUCCEEDED] * 2
        assert not any(r.disrupted for r in seen.replicas)

    tell(story)


def test_a_replica_that_fails_is_nobody_elses_fault(tell: Tell) -> None:
    async def story(world: World) -> None:
        job = waiting_job()
        await world.engine.start(job, 1)
        await until(world.engine, job, 1, "all replicas", all_running)
        world.end(job, 1, 1, 3)
        seen = await until(
            world.engine, job, 1, "the failure", lambda s: s.replicas[1].state is ReplicaState.FAILED
        )
        assert not seen.gone
        assert not seen.replicas[1].disrupted
        assert [(r.rank, r.code) for r in seen.replicas[1].ranks] == [(1, 3)]
        assert seen.replicas[1].ended_at is not None
        await world.engine.kill(job, 1)
        seen = await until(world.engine, job, 1, "the end", lambda s: s.gone)
        assert not seen.replicas[0].disrupted

    tell(story)


@pytest.mark.parametrize("kind", [DrillKind.KILL, DrillKind.NOTICE, DrillKind.EVICT])
def test_a_drill_disrupts_one_replica(tell: Tell, kind: DrillKind) -> None:
    async def story(world: World) -> None:
        job = waiting_job()
        with pytest.raises(NotReady, match="is not running"):
            await world.engine.drill(job, 1, 0, kind)
        await world.engine.start(job, 1)
        await until(world.engine, job, 1, "all replicas", all_running)
        with pytest.raises(NotFound, match="no replica 2"):
            await world.engine.drill(job, 1, 2, kind)
        await world.engine.drill(job, 1, 1, kind)
        seen = await until(
            world.engine, job, 1, "the loss", lambda s: s.replicas[1].state is ReplicaState.FAILED
        )
        assert seen.replicas[1].disrupted
        assert seen.replicas[1].reason.startswith("Drilled")
        assert not seen.replicas[0].disrupted
        assert not seen.gone
        with pytest.raises(NotReady, match="replica 1"):
            await world.engine.drill(job, 1, 1, kind)
        await world.engine.kill(job, 1)
        await until(world.engine, job, 1, "the end", lambda s: s.gone)

    tell(story)


def test_a_stop_ends_all_and_is_no_disruption(tell: Tell) -> None:
    async def story(world: World) -> None:
        job = waiting_job()
        await world.engine.start(job, 1)
        await until(world.engine, job, 1, "all replicas", all_running)
        await world.engine.stop(job, 1)
        await world.engine.stop(job, 1)
        seen = await until(world.engine, job, 1, "the end", lambda s: s.gone)
        assert seen.stopping
        assert not any(r.disrupted for r in seen.replicas)

    tell(story)


def test_who_finds_no_room_waits_and_says_why(tell: Tell) -> None:
    async def story(world: World) -> None:
        first, second, third = (waiting_job(name, replicas=3) for name in ("a", "b", "c"))
        await world.engine.start(first, 1)
        await until(world.engine, first, 1, "all replicas", all_running)
        await world.engine.start(second, 1)
        await world.engine.start(third, 1)
        seen = await world.engine.observe(second, 1)
        assert (seen.exists, seen.gone) == (True, False)
        assert seen.waiting.startswith("waits for 3 ")
        await world.engine.stop(second, 1)
        assert not (await world.engine.observe(second, 1)).exists
        await world.engine.kill(first, 1)
        await until(world.engine, third, 1, "its turn", all_running)
        await world.engine.kill(third, 1)
        await until(world.engine, third, 1, "the end", lambda s: s.gone)

    tell(story)


def test_changes_tell_whose_attempt_to_look_at(tell: Tell) -> None:
    async def story(world: World) -> None:
        job = waiting_job()
        changes: Any = world.engine.changes()
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        await world.engine.start(job, 1)
        await until(world.engine, job, 1, "all replicas", all_running)
        world.end(job, 1, 0, 0)
        assert await asyncio.wait_for(waiting, 30) == "default/a"
        await changes.aclose()
        await world.engine.kill(job, 1)
        await until(world.engine, job, 1, "the end", lambda s: s.gone)

    tell(story)


def test_logs_of_what_is_not_there(tell: Tell) -> None:
    async def story(world: World) -> None:
        job = waiting_job()
        with pytest.raises(NotFound):
            await anext(aiter(world.engine.logs(job, 1, 0)))
        await world.engine.start(job, 1)
        await until(world.engine, job, 1, "all replicas", all_running)
        with pytest.raises(NotFound, match="no rank 2"):
            await anext(aiter(world.engine.logs(job, 1, 2)))
        await world.engine.kill(job, 1)
        await until(world.engine, job, 1, "the end", lambda s: s.gone)

    tell(story)


def test_a_deleted_job_leaves_nothing(tell: Tell) -> None:
    async def story(world: World) -> None:
        job = waiting_job()
        await world.engine.start(job, 1)
        await until(world.engine, job, 1, "all replicas", all_running)
        await world.engine.kill(job, 1)
        await until(world.engine, job, 1, "the end", lambda s: s.gone)
        await world.engine.delete(job)
        await world.engine.delete(job)
        assert not (await world.engine.observe(job, 1)).exists
        assert await world.engine.ledger(job) == []

    tell(story)
