"""A gang of which a part runs and a part finds no place gives its places back; nothing is held against it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from fakes import MemoryEngine, MemoryStore

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.jobs import Metadata, Phase, Spec, TrainingJob, Verdict
from holdfast_controller.policy.half_placed import half_placed, seconds_left
from holdfast_controller.reconciler import Reconciler

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
UP = ReplicaObservation(0, ReplicaState.RUNNING)
NO_ROOM = ReplicaObservation(1, ReplicaState.PENDING, "Unschedulable: 0/3 nodes", stuck=Verdict.UNSCHEDULABLE)
NO_IMAGE = ReplicaObservation(1, ReplicaState.PENDING, "ErrImagePull: not found", stuck=Verdict.IMAGE_PULL)
COMING = ReplicaObservation(1, ReplicaState.PENDING)


@pytest.mark.parametrize(
    ("replicas", "seconds", "verdict"),
    [
        pytest.param((UP, NO_ROOM), 301, Verdict.UNSCHEDULABLE, id="no room for one"),
        pytest.param((UP, NO_IMAGE), 301, Verdict.IMAGE_PULL, id="no image on one node"),
        pytest.param((UP, NO_ROOM), 299, None, id="it may still come"),
        pytest.param((UP, COMING), 9999, None, id="it is being made"),
        pytest.param((UP, UP), 9999, None, id="all run"),
        pytest.param((NO_ROOM, NO_ROOM), 9999, None, id="what holds nothing may wait"),
    ],
)
def test_when_a_part_of_a_gang_is_given_up(
    replicas: tuple[ReplicaObservation, ...], seconds: float, verdict: Verdict | None
) -> None:
    seen = AttemptObservation(1, True, False, replicas, started_at=NOON)
    given_up = half_placed(seen, NOON + timedelta(seconds=seconds))
    assert (None if given_up is None else given_up.verdict) is verdict
    if given_up is not None:
        assert given_up.reason.startswith("1 of 2 replicas ran for 300 s and waited for replica 1: ")


@pytest.mark.parametrize(
    ("replicas", "seconds"),
    [
        pytest.param((UP, NO_ROOM), 300 - 100, id="then it is looked at again, though nothing happens"),
        pytest.param((UP, COMING), None, id="it is being made"),
        pytest.param((NO_ROOM, NO_ROOM), None, id="what holds nothing may wait"),
    ],
)
def test_how_long_it_has_left(replicas: tuple[ReplicaObservation, ...], seconds: float | None) -> None:
    seen = AttemptObservation(1, True, False, replicas, started_at=NOON)
    assert seconds_left(seen, NOON + timedelta(seconds=100)) == seconds


def test_it_waits_with_its_budgets_whole_and_comes_back() -> None:
    async def story() -> None:
        now = NOON
        store, engine = MemoryStore(), MemoryEngine(clock=lambda: datetime.timestamp(now))
        reconciler = Reconciler(store, engine, clock=lambda: now)
        spec = {"command": ["x"], "replicas": 2, "retries": {"failures": 0, "disruptions": 0}}
        await store.create(TrainingJob(metadata=Metadata(name="a"), spec=Spec.model_validate(spec)))

        async def look() -> TrainingJob:
            for _ in range(4):
                await reconciler.reconcile("default/a")
            return await store.get("default", "a")

        job = await look()
        engine.leave_out(job, 1, 1)
        now += timedelta(seconds=301)
        job = await look()
        (first,) = job.status.attempts
        assert (first.verdict, first.ending) == (Verdict.UNSCHEDULABLE, Verdict.UNSCHEDULABLE)
        assert (job.status.phase, job.status.failures, job.status.disruptions) == (Phase.RECOVERING, 0, 0)
        assert "starts again after a back-off: 1 of 2 replicas ran for 300 s" in job.status.message
        assert not engine.running(job.metadata.uid)
        now += timedelta(seconds=15)
        job = await look()
        assert job.status.attempt == 2
        assert len(engine.running(job.metadata.uid)) == 1

    asyncio.run(story())
