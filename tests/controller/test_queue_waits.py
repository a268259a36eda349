"""Why a queue does not admit a job, in the words of a real Kueue (0.15), and what would help.

tests/kube/captured_workloads.json has the conditions of the Workloads of nine jobs in a quota of 2 CPUs.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import MemoryEngine
from scene import Scene, make

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.jobs import Phase, TrainingJob, Verdict
from holdfast_controller.policy.queue_waits import put_aside, queue_wait

CAPTURED = json.loads(
    (Path(__file__).parents[1] / "kube" / "captured_workloads.json").read_text(encoding="utf-8")
)
ASSIGN = "couldn't assign flavors to pod set worker: "
SAID = {
    "dangling": (
        "ClusterQueue nowhere doesn't exist; make it (k8s/kueue/queues.yaml), or name another queue (queue)"
    ),
    "full": (
        f"{ASSIGN}insufficient unused quota for cpu in flavor any, 500m more needed; wait for the queue's "
        "jobs to end, ask for less (replicas, gpus, resources), or have its quota raised"
    ),
    "no-flavor": (
        "ClusterQueue noflavor is inactive; it admits nothing: `kubectl describe localqueue,clusterqueue` "
        "says why"
    ),
    "no-queue": (
        "LocalQueue missing doesn't exist; make it in the job's namespace (k8s/kueue/queues.yaml), or name "
        "another one (queue)"
    ),
    "not-covered": (
        f"{ASSIGN}resource example.com/fpga unavailable in ClusterQueue; the queue has no quota of "
        "example.com/fpga at all: name another one (queue), or have it added"
    ),
    "not-here": (
        "Workload namespace doesn't match ClusterQueue selector; the queue is not for the job's namespace: "
        "name another one (queue), or change the ClusterQueue's namespaceSelector"
    ),
    "stopped": (
        "ClusterQueue held is inactive; it admits nothing: `kubectl describe localqueue,clusterqueue` "
        "says why"
    ),
    "too-large": (
        f"{ASSIGN}insufficient quota for cpu in flavor any, previously considered podsets requests (0) + "
        "current podset request (3) > maximum capacity (2); the queue can never hold so much cpu: ask for "
        "less (replicas, gpus, resources), or have its quota raised"
    ),
}


@pytest.mark.parametrize("name", sorted(CAPTURED))
def test_a_queued_job_says_why_and_what_would_help(name: str) -> None:
    said = queue_wait("training", CAPTURED[name])
    assert said == (f"waits in its queue 'training': {SAID[name]}" if name in SAID else None)


def test_one_that_has_its_quota_and_is_not_admitted_waits_for_checks() -> None:
    reserved = {"type": "QuotaReserved", "status": "True", "message": "Quota reserved"}
    assert queue_wait("training", [reserved]) == (
        "has its quota in queue 'training' and waits for the queue's admission checks"
    )


def test_one_that_kueue_has_not_looked_at_yet_has_no_reason_of_its_own() -> None:
    assert queue_wait("training", []) is None


def test_one_whose_workload_was_made_inactive_while_it_waited_says_how_it_queues_again() -> None:
    taken = {"type": "QuotaReserved", "status": "False", "message": EVICTED["message"]}
    assert queue_wait("training", [taken]) == (
        "waits in its queue 'training': The workload is deactivated; somebody has set spec.active of its "
        "Workload to false, or Kueue has, where pods were too often not ready in time: set it to true, and "
        "it queues again"
    )


# ------------------------------------------------------------------ a Workload that was made inactive

EVICTED = {
    "type": "Evicted",
    "status": "True",
    "reason": "Deactivated",
    "message": "The workload is deactivated",
}
WHY = "its Workload in queue 'training' was made inactive: The workload is deactivated"


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ({"spec": {"active": False}, "status": {"conditions": [EVICTED]}}, WHY),
        ({"spec": {"active": False}}, "its Workload in queue 'training' was made inactive"),
        ({"spec": {"active": True}, "status": {"conditions": [EVICTED]}}, ""),
        ({}, ""),
    ],
    ids=["evicted", "not told why", "active again", "as ever"],
)
def test_a_queue_wants_no_other_attempt_where_the_workload_is_inactive(
    workload: dict[str, Any], said: str
) -> None:
    assert put_aside("training", workload) == said


class Queue(MemoryEngine):
    """Takes replicas of an attempt back for good."""

    why = ""

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        seen = await super().observe(job, attempt)
        return replace(seen, put_aside=self.why) if seen.exists and seen.gone else seen


def stage() -> tuple[Scene, Queue]:
    scene = Scene()
    return scene, scene.run_on(Queue(clock=scene.seconds))


def taken_back(engine: Queue, job: TrainingJob) -> None:
    engine.why = WHY
    for replica in range(2):
        engine.vanish(job, job.status.attempt, replica)


def test_a_job_that_was_put_aside_is_suspended_and_goes_on_when_it_is_resumed() -> None:
    """Its next attempt got a Workload of its own, and ran beside the will of who had stopped it."""

    async def story() -> None:
        scene, engine = stage()
        job = await scene.submit(make())
        taken_back(engine, job)
        job = await scene.look(passes=1)
        # A controller that comes now, after a crash, finds the record open and the job suspended.
        assert (job.spec.suspend, job.status.phase) == (True, Phase.SUSPENDING)
        assert job.status.attempts[-1].verdict is None
        job = await scene.look(passes=3)
        assert (job.status.phase, job.status.attempt) == (Phase.SUSPENDED, 1)
        assert job.status.message == f"suspended, for {WHY}; resume to go on"
        record = job.status.attempts[-1]
        assert (record.verdict, record.reason) == (Verdict.SUSPENDED, WHY)
        assert (job.status.failures, job.status.disruptions) == (0, 0)

        engine.why = ""
        job = await scene.change(suspend=False)
        assert (job.status.phase, job.status.attempt) == (Phase.STARTING, 2)
        await scene.change(suspend=True)
        job = await scene.look(passes=3)
        assert job.status.message == "suspended; resume to go on", "somebody else did it this time"

    asyncio.run(story())


def test_a_job_that_finished_before_it_was_put_aside_has_finished() -> None:
    async def story() -> None:
        scene, engine = stage()
        job = await scene.submit(make())
        engine.why = WHY
        for replica in range(2):
            engine.end(job, 1, replica, 0)
        job = await scene.look(passes=3)
        assert (job.spec.suspend, job.status.phase) == (False, Phase.SUCCEEDED)

    asyncio.run(story())


def test_a_job_that_was_put_aside_and_cannot_be_read_waits_with_its_spec_as_it_is() -> None:
    """To suspend it would be to write over what its user wrote."""

    async def story() -> None:
        scene, engine = stage()
        job = await scene.submit(make())
        await scene.store.edited_past_our_checks(job, ("spec.gpus: '0.3' GPUs",))
        taken_back(engine, job)
        job = await scene.look(passes=3)
        assert (job.spec.suspend, job.status.phase, job.status.attempt) == (False, Phase.QUEUED, 1)
        assert job.status.attempts[-1].verdict is Verdict.SUSPENDED

    asyncio.run(story())
