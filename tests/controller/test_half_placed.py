"""A gang of which a part runs and a part finds no place gives its places back, or goes on with those it had;
nothing is held against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fakes import MemoryEngine
from hypothesis import assume, given
from hypothesis import strategies as st
from scene import Scene, make, play

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.jobs import AttemptRecord, Phase, Spec, Status, TrainingJob, Verdict
from holdfast_controller.policy.decide import Evidence, decide
from holdfast_controller.policy.half_placed import half_placed, held_up_at, seconds_left
from holdfast_controller.policy.size import next_replicas

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
STARTED = AttemptRecord(number=1, opened_at=NOON, started_at=NOON)
UP = ReplicaObservation(0, ReplicaState.RUNNING)
NO_ROOM = ReplicaObservation(1, ReplicaState.PENDING, "Unschedulable: 0/3 nodes", stuck=Verdict.UNSCHEDULABLE)
NO_IMAGE = ReplicaObservation(1, ReplicaState.PENDING, "ErrImagePull: not found", stuck=Verdict.IMAGE_PULL)
COMING = ReplicaObservation(1, ReplicaState.PENDING)
LATER = NOON + timedelta(seconds=200)
HELD = replace(NO_IMAGE, placed_at=NOON)
HELD_LATER = replace(NO_IMAGE, index=0, placed_at=LATER)
NO_VOLUME = ReplicaObservation(
    1, ReplicaState.PENDING, "FailedMount: no such claim", stuck=Verdict.UNSCHEDULABLE, placed_at=NOON
)


@pytest.mark.parametrize(
    ("replicas", "seconds", "verdict"),
    [
        pytest.param((UP, NO_ROOM), 301, Verdict.UNSCHEDULABLE, id="no room for one"),
        pytest.param((UP, NO_IMAGE), 301, Verdict.IMAGE_PULL, id="no image on one node"),
        pytest.param((UP, NO_ROOM), 299, None, id="it may still come"),
        pytest.param((UP, COMING), 9999, None, id="it is being made"),
        pytest.param((UP, UP), 9999, None, id="all run"),
        pytest.param((NO_ROOM, NO_ROOM), 9999, None, id="what holds nothing may wait"),
        pytest.param((NO_IMAGE, NO_IMAGE), 9999, None, id="nor does this one"),
    ],
)
def test_when_a_part_of_a_gang_is_given_up(
    replicas: tuple[ReplicaObservation, ...], seconds: float, verdict: Verdict | None
) -> None:
    seen = AttemptObservation(1, True, False, replicas)
    given_up = half_placed(STARTED, seen, NOON + timedelta(seconds=seconds))
    assert (None if given_up is None else given_up.verdict) is verdict
    if given_up is not None:
        assert given_up.reason.startswith("1 of 2 replicas ran for 300 s and waited for replica 1: ")


@pytest.mark.parametrize(
    ("replicas", "seconds", "verdict"),
    [
        pytest.param((HELD, HELD), 301, Verdict.IMAGE_PULL, id="no image on any node"),
        pytest.param((HELD_LATER, HELD), 301, Verdict.IMAGE_PULL, id="the other has its node for a moment"),
        pytest.param((HELD_LATER, HELD_LATER), 499, None, id="both have"),
        pytest.param((NO_ROOM, HELD), 301, Verdict.IMAGE_PULL, id="and no node for the other"),
        pytest.param((NO_VOLUME, NO_ROOM), 301, Verdict.UNSCHEDULABLE, id="a volume that does not come"),
        pytest.param((HELD, COMING), 301, Verdict.IMAGE_PULL, id="the other is being made"),
        pytest.param((replace(COMING, placed_at=NOON), COMING), 9999, None, id="a large image is pulled"),
    ],
)
def test_when_a_gang_is_given_up_that_holds_places_and_cannot_start(
    replicas: tuple[ReplicaObservation, ...], seconds: float, verdict: Verdict | None
) -> None:
    seen = AttemptObservation(1, True, False, replicas, waiting="replica 1: ErrImagePull: not found")
    given_up = half_placed(STARTED, seen, NOON + timedelta(seconds=seconds))
    assert (None if given_up is None else given_up.verdict) is verdict
    if given_up is not None:
        assert given_up.reason.startswith("it held places for 300 s and waited for replica 1: ")
    assert half_placed(STARTED, replace(seen, stopping=True), NOON + timedelta(seconds=9999)) is None


def test_what_waits_for_a_node_holds_none_until_it_has_one() -> None:
    """And from then on it has as long as any; nor does it wait longer for that another one is held up."""
    late = NOON + timedelta(seconds=250)
    record, held = STARTED.model_copy(), replace(NO_IMAGE, index=0, placed_at=late)
    waits = AttemptObservation(1, True, False, (UP, NO_ROOM))
    assert held_up_at(record, waits, NOON) is None
    record.held_up_at = held_up_at(record, replace(waits, replicas=(held, UP)), late)
    assert seconds_left(record, replace(waits, replicas=(held, UP)), late) == 300
    assert seconds_left(record, replace(waits, replicas=(held, NO_ROOM, replace(UP, index=2))), late) == 50


@pytest.mark.parametrize(
    ("replicas", "seconds"),
    [
        pytest.param((HELD_LATER, HELD), 300 - 100, id="though nothing of it runs"),
        pytest.param((UP, NO_ROOM), 300 - 100, id="then it is looked at again, though nothing happens"),
        pytest.param((UP, COMING), None, id="it is being made"),
        pytest.param((NO_ROOM, NO_ROOM), None, id="what holds nothing may wait"),
    ],
)
def test_how_long_it_has_left(replicas: tuple[ReplicaObservation, ...], seconds: float | None) -> None:
    seen = AttemptObservation(1, True, False, replicas)
    assert seconds_left(STARTED, seen, NOON + timedelta(seconds=100)) == seconds


@pytest.mark.parametrize(
    ("replicas", "verdict"),
    [
        pytest.param((UP, NO_ROOM), Verdict.UNSCHEDULABLE, id="a part of it runs"),
        pytest.param((HELD, HELD), Verdict.IMAGE_PULL, id="nothing of it runs"),
    ],
)
def test_a_leader_whose_clock_was_ahead_makes_no_gang_hold_its_places_for_longer(
    replicas: tuple[ReplicaObservation, ...], verdict: Verdict
) -> None:
    """It held them for as long as the clocks of the two leaders differ, beyond what it is given."""
    ahead = NOON + timedelta(hours=1)
    record = AttemptRecord(number=1, opened_at=ahead, held_up_at=ahead)
    seen = AttemptObservation(1, True, False, replicas, waiting="" if UP in replicas else "ErrImagePull")
    if UP in replicas:
        record.started_at = ahead
    job = make()
    job.status = Status(phase=Phase.STARTING, attempt=1, attempts=[record])
    first = decide(job, seen, Evidence(), NOON)
    assert first.requeue_after == 300
    job.status = first.status
    assert decide(job, seen, Evidence(), NOON + timedelta(seconds=300)).status.attempts[0].ending is verdict


async def leave_out(scene: Scene, job: TrainingJob, *replicas: int) -> TrainingJob:
    """For longer than the attempt waits."""
    for replica in replicas:
        scene.engine.leave_out(job, job.status.attempt, replica)
    scene.now += timedelta(seconds=301)
    return await scene.look(passes=4)


class OtherTime(MemoryEngine):
    """Its nodes' clocks are so many seconds ahead of the controller's."""

    def __init__(self, ahead: float, clock: Callable[[], float]):
        super().__init__(clock=clock)
        self.ahead = timedelta(seconds=ahead)

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        seen = await super().observe(job, attempt)
        return replace(seen, started_at=seen.started_at and seen.started_at + self.ahead)


@pytest.mark.parametrize("ahead", [-600, 600])
def test_it_waits_for_as_long_where_its_nodes_have_another_time(ahead: float) -> None:
    async def story(scene: Scene) -> None:
        scene.run_on(OtherTime(ahead, scene.seconds))
        job = await scene.submit(make(replicas=2))
        scene.engine.leave_out(job, 1, 1)
        scene.now += timedelta(seconds=299)
        job = await scene.look(passes=4)
        assert len(scene.engine.running(job.metadata.uid)) == 1, "a node may still be added for the other"
        scene.now += timedelta(seconds=2)
        job = await scene.look(passes=4)
        assert not scene.engine.running(job.metadata.uid), "what it held is free"
        assert job.status.attempts[0].verdict is Verdict.UNSCHEDULABLE

    play(story)


def take(scene: Scene, job: TrainingJob) -> None:
    """All replicas of the attempt that runs."""
    for attempt in scene.engine.running(job.metadata.uid):
        for replica in range(len(attempt.replicas)):
            scene.engine.vanish(job, attempt.number, replica)


def test_a_gang_that_loses_a_replica_while_it_waits_for_another_was_disrupted() -> None:
    """What is being ended already is not given up as well: nobody would count that it was taken."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=3, minReplicas=1))
        scene.engine.leave_out(job, 1, 2)
        await scene.look()
        scene.now += timedelta(seconds=299.5)
        scene.engine.vanish(job, 1, 0)
        await scene.look()
        scene.now += timedelta(seconds=1)
        job = await scene.look(passes=4)
        first = job.status.attempts[0]
        assert (first.verdict, first.ending, first.placed) == (Verdict.DISRUPTED, None, None)
        assert (job.status.attempt, job.status.disruptions) == (2, 1)

    play(story)


@pytest.mark.parametrize("left", [True, False], ids=["its pods are left", "nothing is left of it"])
def test_it_waits_with_its_budgets_whole_and_comes_back(left: bool) -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=2, retries={"failures": 0, "disruptions": 0}))
        scene.engine.leave_out(job, 1, 1)
        scene.now += timedelta(seconds=301)
        job = await scene.look(passes=1)
        assert job.status.attempts[0].ending is Verdict.UNSCHEDULABLE
        assert scene.engine.running(job.metadata.uid), "who finds it gone after a crash can read why"
        if not left:
            del scene.engine.attempts[job.metadata.uid, 1]
        job = await scene.look(passes=4)
        (first,) = job.status.attempts
        assert (first.verdict, first.ending) == (Verdict.UNSCHEDULABLE, Verdict.UNSCHEDULABLE)
        assert (job.status.phase, job.status.failures, job.status.disruptions) == (Phase.RECOVERING, 0, 0)
        assert "starts again after a back-off: 1 of 2 replicas ran for 300 s" in job.status.message
        assert not scene.engine.running(job.metadata.uid)
        scene.now += timedelta(seconds=15)
        job = await scene.look(passes=4)
        assert job.status.attempt == 2
        assert len(scene.engine.running(job.metadata.uid)) == 1

    play(story)


def test_a_gang_whose_image_no_node_can_pull_gives_its_places_back() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=2, minReplicas=1, retries={"failures": 0, "disruptions": 0}))
        scene.engine.find_no_image(job, 1)
        job = await scene.look(passes=4)
        assert (job.status.phase, job.status.message) == (Phase.QUEUED, "replica 0: ErrImagePull: not found")
        assert scene.after == 300, "then it is looked at again, though nothing happens"
        scene.now += timedelta(seconds=301)
        job = await scene.look(passes=4)
        assert not scene.engine.running(job.metadata.uid), "its GPUs are free"
        (first,) = job.status.attempts
        assert (first.verdict, first.placed) == (Verdict.IMAGE_PULL, None)
        assert (job.status.phase, job.status.failures, job.status.disruptions) == (Phase.RECOVERING, 0, 0)
        assert "starts again after a back-off: it held places for 300 s" in job.status.message

        scene.now += timedelta(seconds=15)
        job = await scene.look(passes=4)
        assert [len(attempt.replicas) for attempt in scene.engine.running(job.metadata.uid)] == [2]

    play(story)


@pytest.mark.parametrize("beside", [(), (UP,)])
def test_a_pull_that_fails_after_long_is_waited_for_as_any(beside: tuple[ReplicaObservation, ...]) -> None:
    """Kubernetes tries it again within seconds: the ten minutes before that it was under way."""

    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=1 + len(beside)))
        (attempt,) = scene.engine.running(job.metadata.uid)
        index, place = len(beside), scene.now

        async def pulls(**found: Any) -> TrainingJob:
            attempt.replicas = [
                *beside,
                ReplicaObservation(index, ReplicaState.PENDING, placed_at=place, **found),
            ]
            return await scene.look(passes=4)

        await pulls()
        scene.now += timedelta(minutes=10)
        fails = {"reason": "ErrImagePull: unexpected EOF", "stuck": Verdict.IMAGE_PULL}
        for _ in range(2):
            job = await pulls(**fails)
            assert (job.status.attempts[0].ending, scene.after) == (None, 300)
            scene.now += timedelta(seconds=299)
            await pulls()
        await pulls(**fails)
        scene.now += timedelta(seconds=301)
        job = await pulls(**fails)
        first = job.status.attempts[0]
        assert (first.verdict, first.placed) == (Verdict.IMAGE_PULL, None), "there was a place for all of it"

    play(story)


def test_a_job_that_may_have_fewer_replicas_goes_on_with_the_places_that_there_are() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=4, minReplicas=2, retries={"failures": 0, "disruptions": 9}))

        def running() -> list[int]:
            return [len(attempt.replicas) for attempt in scene.engine.running(job.metadata.uid)]

        assert running() == [4]
        job = await leave_out(scene, job, 3)
        told = [event.message for event in await scene.store.events("default", "a")]
        assert told[-1] == "attempt 2 opened with 2 of 4 replicas"
        assert running() == [2], "at once: three had a place, and of these two share a batch evenly"
        assert (job.status.failures, job.status.disruptions) == (0, 0)

        take(scene, job)
        job = await scene.look(passes=4)
        assert job.status.attempt == 3
        assert running() == [2], "it was seen a moment ago that there is no room for all"
        scene.now += timedelta(minutes=31)
        take(scene, job)
        job = await scene.look(passes=4)
        assert job.status.attempt == 4
        assert running() == [4], "by now there may be"
        assert [record.replicas for record in job.status.attempts] == [4, 2, 2, 4]

        job = await leave_out(scene, job, 1, 2, 3)
        assert "starts again after a back-off: 1 of 4 replicas ran" in job.status.message
        assert running() == [], "one is fewer than it may have: it gives the place back"

    play(story)


def test_fewer_replicas_that_fail_wait_as_all_would() -> None:
    async def story(scene: Scene) -> None:
        job = await scene.submit(make(replicas=4, minReplicas=2))
        job = await leave_out(scene, job, 3)
        assert job.status.attempts[-1].replicas == 2
        job = await scene.end(1, 1)
        assert (job.status.attempt, job.status.failures) == (2, 1)
        assert job.status.message.startswith("starts again after a back-off")

    play(story)


def ended(placed: int | None = None, replicas: int | None = None, minutes: int = 0) -> AttemptRecord:
    """An attempt that ended so many minutes after noon; given up where so many were `placed`."""
    verdict = Verdict.DISRUPTED if placed is None else Verdict.UNSCHEDULABLE
    at = NOON + timedelta(minutes=minutes)
    return AttemptRecord(number=1, verdict=verdict, placed=placed, replicas=replicas, ended_at=at)


SUSPENDED = AttemptRecord(number=2, verdict=Verdict.SUSPENDED, replicas=4, ended_at=NOON)


@pytest.mark.parametrize(
    ("fewest", "attempts", "then"),
    [
        pytest.param(None, [ended(7)], None, id="it asks for all or none"),
        pytest.param(8, [ended(7)], None, id="in other words"),
        pytest.param(1, [], None, id="it begins with all"),
        pytest.param(1, [ended()], None, id="they had all found room"),
        pytest.param(1, [ended(7)], 4, id="4 is the largest divisor of 8 below 7"),
        pytest.param(1, [ended(3)], 2, id="2 below 3"),
        pytest.param(3, [ended(3)], None, id="3 would divide nothing, and 2 are too few"),
        pytest.param(1, [ended(7), ended(3, 4, 9)], 2, id="fewer still"),
        pytest.param(1, [ended(7), ended(None, 4, 29)], 4, id="as many, for a while"),
        pytest.param(1, [ended(7), ended(None, 4, 31)], None, id="then all again"),
        pytest.param(1, [ended(7), ended(6, 8, 31), ended(None, 4, 45)], 4, id="in vain: for a while again"),
        pytest.param(4, [ended(7), ended(None, 2, 1)], None, id="it may not be that few any more"),
        pytest.param(1, [ended(7), SUSPENDED], None, id="resumed, it begins with all"),
        pytest.param(1, [ended(9, 12)], None, id="since then it asks for fewer, and all of them had a place"),
    ],
)
def test_how_many_replicas_the_next_attempt_has(
    fewest: int | None, attempts: list[AttemptRecord], then: int | None
) -> None:
    now = max([NOON, *(one.ended_at for one in attempts if one.ended_at)])
    assert next_replicas(Spec(command=["x"], replicas=8, min_replicas=fewest), attempts, now) == then


@given(replicas=st.integers(1, 64), fewest=st.integers(1, 64), placed=st.integers(0, 64))
def test_fewer_replicas_divide_what_all_divide_and_have_places(
    replicas: int, fewest: int, placed: int
) -> None:
    assume(fewest <= replicas and placed < replicas)
    spec = Spec(command=["x"], replicas=replicas, min_replicas=fewest)
    then = next_replicas(spec, [ended(placed)], NOON)
    may = [size for size in range(fewest, placed + 1) if replicas % size == 0]
    assert then == max(may, default=None)


def test_more_than_all_replicas_cannot_be_the_fewest() -> None:
    with pytest.raises(ValueError, match="minReplicas 3 is more than replicas, which is 2"):
        Spec(command=["x"], replicas=2, min_replicas=3)
