"""A replica that was taken, and of which nobody tells that it has ended, holds up no job for ever."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Spec, Status, TrainingJob
from holdfast_controller.policy.decide import Evidence, decide
from holdfast_controller.policy.decision import Decision
from holdfast_controller.policy.peers import LOST_SECONDS
from holdfast_trainer.contract import Termination

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
RUNS = ReplicaObservation(0, ReplicaState.RUNNING)


def taken(due: datetime) -> ReplicaObservation:
    """By the platform; its grace ends then."""
    reason = "DeletionByTaintManager: its node is silent"
    return ReplicaObservation(1, ReplicaState.RUNNING, reason, disrupted=True, due=due.timestamp())


def decided(*replicas: ReplicaObservation, stopping: bool = False, waiting: str = "") -> Decision:
    began = None if waiting else NOON
    record = AttemptRecord(number=1, started_at=began, first_step_at=began)
    status = Status(phase=Phase.QUEUED if waiting else Phase.RUNNING, attempt=1, attempts=[record])
    spec = Spec(command=["true"], replicas=2, suspend=stopping)
    job = TrainingJob(metadata=Metadata(name="a"), spec=spec, status=status)
    seen = AttemptObservation(
        1, exists=True, gone=False, replicas=replicas, waiting=waiting, stopping=stopping
    )
    return decide(job, seen, Evidence(), NOON)


def test_one_that_is_saving_has_its_grace_and_is_looked_at_again_when_it_may_be_lost() -> None:
    decision = decided(RUNS, taken(NOON + timedelta(seconds=20)))
    assert decision.kill is None
    assert decision.requeue_after == pytest.approx(20 + LOST_SECONDS)
    assert decided(RUNS, RUNS).requeue_after is None
    for known in (decision, decided(RUNS, RUNS)):
        assert known.status.phase is Phase.RUNNING
        assert known.status.attempts[0].detected_at is None, "the grace of its ranks counts from a loss"


@pytest.mark.parametrize("stopping", [False, True], ids=["while it trains", "while it is suspended"])
def test_one_whose_grace_is_long_over_is_given_up_with_its_attempt(stopping: bool) -> None:
    decision = decided(RUNS, taken(NOON - timedelta(seconds=LOST_SECONDS)), stopping=stopping)
    assert decision.kill == 1
    assert decision.status.attempts[0].verdict is None, "it has one when nothing of it can write any more"


def test_one_whose_node_fell_silent_before_it_had_started_is_given_up_too() -> None:
    """As while a large image was pulled: its job waited for ever, and with it all its GPUs."""
    waits = "replica 1: DeletionByTaintManager: its node is silent"
    going = replace(taken(NOON + timedelta(seconds=20)), state=ReplicaState.PENDING)
    decision = decided(going, waiting=waits)
    assert (decision.kill, decision.status.phase, decision.status.message) == (None, Phase.QUEUED, waits)
    assert decision.requeue_after == pytest.approx(20 + LOST_SECONDS), "nobody else will tell of it"

    lost = replace(going, due=NOON.timestamp() - LOST_SECONDS)
    decision = decided(lost, waiting=waits)
    assert (decision.kill, decision.status.phase) == (1, Phase.RECOVERING)
    assert "replica 1 is gone (DeletionByTaintManager: its node is silent)" in decision.status.message


def test_a_leader_whose_clock_was_ahead_makes_nobody_s_grace_longer() -> None:
    """A replica that hung on its notice held the gang for as long as the clocks of two leaders differ, beyond
    its grace; from when the next one looks it has that grace, and no more."""
    spec = Spec(command=["true"], replicas=2, grace_seconds=30)
    ahead = NOON + timedelta(hours=1)
    record = AttemptRecord(number=1, started_at=NOON, first_step_at=NOON, detected_at=ahead)
    status = Status(phase=Phase.RUNNING, attempt=1, attempts=[record])
    job = TrainingJob(metadata=Metadata(name="a"), spec=spec, status=status)
    said = ReplicaObservation(1, ReplicaState.FAILED, termination=Termination("interrupted", 5, 5))
    seen = AttemptObservation(1, exists=True, gone=False, replicas=(RUNS, said))
    first = decide(job, seen, Evidence(), NOON)
    assert (first.kill, first.requeue_after) == (None, pytest.approx(30))
    job.status = first.status
    assert decide(job, seen, Evidence(), NOON + timedelta(seconds=30)).kill == 1
