"""An attempt whose pods the apiserver refuses says why; a server plays the apiserver that has the Events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile
from tests.kube.documents import RUNNING, in_kind, of_attempt, pod
from waiting import wait_until_async

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.cluster import AttemptObservation, ReplicaState
from holdfast_controller.jobs import Metadata, Spec, TrainingJob, Verdict
from holdfast_controller.kube.connection import Connection
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.engine import KubeEngine
from holdfast_controller.kube.events import events_path
from holdfast_controller.kube.observation import attempt_observation, without_pods
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.reflector import Reflector
from holdfast_controller.kube.resource import JOBS
from holdfast_controller.kube.unmade import BEHIND_SECONDS, FIRST_SECONDS, is_behind, unmade
from holdfast_controller.manifests import KINDS
from holdfast_controller.pod_settings import PodSettings
from holdfast_controller.policy.explain import starting, unreported
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB

JOB = TrainingJob(
    metadata=Metadata(name="gpt", namespace="team", uid="job-1"),
    spec=Spec(command=["python"], image="trainer:1", replicas=2),
)
NO_ROOM = 'pods "gpt-1-worker-1" is forbidden: exceeded quota: team, requested: pods=1, used: pods=1'
SAID = (
    f"FailedCreatePod: {NO_ROOM}; the namespace's quota team has no room for it: wait until others end, ask "
    "for less (replicas, gpus, resources), or have it raised"
)
CREATED = {"type": "Created", "status": "True"}
MAKERS = {
    PYTORCH_JOB: "involvedObject.kind=PyTorchJob,involvedObject.name=gpt-1",
    TRAIN_JOB: "involvedObject.kind=Job,involvedObject.name=gpt-1-node-0",
}
MADE_AT = {"creationTimestamp": "2026-05-01T12:00:01Z"}
NOT_READY = {"jobsStatus": [{"name": "node", "active": 1, "ready": 0, "succeeded": 0, "failed": 0}]}


def told(reason: str, message: str, second: int) -> dict[str, Any]:
    return {
        "metadata": {"creationTimestamp": f"2026-05-01T12:00:{second:02}Z"},
        "reason": reason,
        "message": message,
        "type": "Normal",
    }


def refusal(kind: AttemptKind, second: int) -> list[dict[str, Any]]:
    """What the maker of its pods tells: one was made, and one refused."""
    made = told(kind.refused.replace("Failed", "Successful"), "Created pod: gpt-1-worker-0", 1)
    return [made, told(kind.refused, f"Error creating: {NO_ROOM}", second)]


def seen(
    pods: list[Any],
    events: list[Any],
    status: dict[str, Any],
    directory: Path,
    kind: AttemptKind = PYTORCH_JOB,
) -> tuple[AttemptObservation, int]:
    """The attempt, and how often its Events were listed."""
    metadata = {"name": "gpt-1", **MADE_AT}
    made = of_attempt(JOB, {"metadata": metadata, "spec": {}, "status": status})
    now, asked = [1000.0], [0]

    async def listed(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.Event().wait()
        items = [made] if request.path == kind.resource.path else []
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def tell(request: web.Request) -> web.Response:
        assert request.query["fieldSelector"] == MAKERS[kind]
        asked[0] += 1
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": events})

    async def story() -> AttemptObservation:
        routes = [web.get(path, listed) for path in (PODS, *(one.resource.path for one in KINDS.values()))]
        async with connected([*routes, web.get(events_path("team"), tell)], directory) as connection:
            pieces = Pieces(connection)
            inquiry = unmade(connection, pieces, lambda: now[0])
            async with meanwhile(pieces.run()):
                await pieces.synced()
                with inquiry.followed() as own:
                    now[0] += FIRST_SECONDS
                    await inquiry.look(own)
                    found = pieces.object_of(JOB, 1)
                    return attempt_observation(1, 2, found, pods, unmade=inquiry.known)

    return asyncio.run(story()), asked[0]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        pytest.param(PYTORCH_JOB, {"conditions": [CREATED]}, id="PyTorchJob"),
        pytest.param(
            PYTORCH_JOB,
            {"conditions": [CREATED, {"type": "Suspended", "status": "True"}]},
            id="PyTorchJob that its queue has admitted",
        ),
        pytest.param(TRAIN_JOB, {}, id="TrainJob"),
        pytest.param(TRAIN_JOB, NOT_READY, id="TrainJob, its Job made"),
    ],
)
def test_a_gang_that_its_quota_keeps_out_says_so(
    kind: AttemptKind, status: dict[str, Any], tmp_path: Path
) -> None:
    """It is not the operator, which is installed and running."""
    observation, _ = seen([], refusal(kind, 2), status, tmp_path, kind)
    assert observation.waiting == f"replica 0 (and 1 more replicas): {SAID}"


def test_what_an_event_would_do_to_a_terminal_does_not_come_into_a_jobs_message(tmp_path: Path) -> None:
    """Who may edit a namespace may write Events there, and whoever looks at all jobs reads of them."""
    _, event = refusal(PYTORCH_JOB, 2)
    event["message"] = f"\x1b[2J{event['message']}\x9b31m"
    observation, _ = seen([], [event], {"conditions": [CREATED]}, tmp_path)
    assert observation.waiting == f"replica 0 (and 1 more replicas): {SAID}"


def test_a_gang_whose_names_a_quota_refuses_says_that_it_cannot_meet(tmp_path: Path) -> None:
    """All its pods run and wait for the address of the first one, for hours; it is not their script."""
    pods = [of_attempt(JOB, pod(index, state=RUNNING)) for index in range(2)]
    no_room = NO_ROOM.replace("pods", "services")
    events = [told("FailedCreateService", f"Error creating: {no_room}", 2)]
    observation, _ = seen(pods, events, {"conditions": [CREATED]}, tmp_path)
    assert observation.nameless == "", "they meet at replica 0"
    events[0]["message"] = events[0]["message"].replace("worker-1", "worker-0")
    observation, _ = seen(pods, events, {"conditions": [CREATED]}, tmp_path)
    why = SAID.replace("FailedCreatePod", "FailedCreateService").replace("pods", "services")
    why = why.replace("worker-1", "worker-0")
    assert observation.nameless == why
    assert starting(observation) == f"replicas are up and cannot find each other: {why}"
    assert unreported(observation) == f"its replicas run and cannot find each other: {why}"
    observation, _ = seen(pods, refusal(PYTORCH_JOB, 2), {"conditions": [CREATED]}, tmp_path)
    assert observation.nameless == "", "a pod that was refused is there by now"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_gang_of_which_a_quota_lets_a_part_in_can_give_its_place_back(
    kind: AttemptKind, tmp_path: Path
) -> None:
    made = in_kind(kind, of_attempt(JOB, pod(0, state=RUNNING)))
    observation, _ = seen([made], refusal(kind, 2), {}, tmp_path, kind)
    up, left_out = observation.replicas
    assert up.state is ReplicaState.RUNNING
    assert (left_out.state, left_out.stuck) == (ReplicaState.PENDING, Verdict.UNSCHEDULABLE)
    assert left_out.reason == SAID


@pytest.mark.parametrize(
    ("kind", "events", "status", "asked"),
    [
        pytest.param(
            PYTORCH_JOB, refusal(PYTORCH_JOB, 2)[:1], {"conditions": [CREATED]}, 1, id="nothing is refused"
        ),
        pytest.param(
            PYTORCH_JOB,
            refusal(PYTORCH_JOB, 2),
            {"conditions": [CREATED, {"type": "Running", "status": "True"}]},
            0,
            id="it has run",
        ),
        pytest.param(
            TRAIN_JOB, refusal(TRAIN_JOB, 2), {"jobsStatus": [{"ready": 1}]}, 0, id="all its pods are ready"
        ),
        pytest.param(
            TRAIN_JOB, refusal(TRAIN_JOB, 0), {}, 1, id="a job of its name before it was refused a pod"
        ),
    ],
)
def test_otherwise_its_operator_is_behind_or_what_lies_beneath_that(
    kind: AttemptKind, events: list[Any], status: dict[str, Any], asked: int, tmp_path: Path
) -> None:
    """JobSet makes the pods of a TrainJob: where it is down Trainer, which runs, was to be looked at. And one
    that was making the 300 pods of another job was to be installed."""
    said = {
        PYTORCH_JOB: "waits for the Kubeflow Training Operator to make its pods; is it busy with other "
        "jobs', or down?",
        TRAIN_JOB: "waits for Kubeflow Trainer to make its pods; is it busy with other jobs', or down, or is "
        "JobSet beneath it?",
    }
    observation, listed = seen([], events, status, tmp_path, kind)
    assert observation.waiting == said[kind]
    assert listed == asked


@asynccontextmanager
async def many(attempts: int, pods: int, directory: Path) -> AsyncIterator[tuple[Connection, Pieces]]:
    """So many jobs' attempts, of which the first have their pods."""
    jobs = [
        JOB.model_copy(update={"metadata": Metadata(name=f"gpt-{n}", namespace="team", uid=f"job-{n}")})
        for n in range(attempts)
    ]
    found: dict[str, list[Any]] = {
        PYTORCH_JOB.resource.path: [
            of_attempt(
                job,
                {"metadata": {"name": f"{job.metadata.name}-1", **MADE_AT}, "spec": {}, "status": {}},
            )
            for job in jobs
        ],
        PODS: [of_attempt(job, pod()) for job in jobs[:pods]],
    }
    for job, one in zip(jobs, found[PODS], strict=False):
        one["metadata"]["name"] = one["metadata"]["uid"] = f"{job.metadata.name}-1-worker-0"

    async def listed(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.Event().wait()
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": found.get(request.path, [])})

    paths = (PODS, JOBS, events_path("team"), *(kind.resource.path for kind in KINDS.values()))
    async with connected([web.get(path, listed) for path in paths], directory) as connection:
        pieces = Pieces(connection)
        async with meanwhile(pieces.run()):
            await pieces.synced()
            yield connection, pieces


@pytest.mark.parametrize(
    ("attempts", "pods", "behind"),
    [
        pytest.param(12, 0, True, id="none has any"),
        pytest.param(12, 2, True, id="the first have theirs, as in a line"),
        pytest.param(12, 12, False, id="all have pods, which may wait for nodes"),
        pytest.param(9, 0, False, id="few"),
    ],
)
def test_an_operator_is_behind_where_the_last_of_many_attempts_have_no_pods(
    attempts: int, pods: int, behind: bool, tmp_path: Path
) -> None:
    async def story() -> None:
        now = [1000.0]
        async with many(attempts, pods, tmp_path) as (connection, pieces):
            asked = unmade(connection, pieces, lambda: now[0])
            with asked.followed():
                assert not is_behind(asked, pieces), "it may be making them"
                now[0] += BEHIND_SECONDS
                assert is_behind(asked, pieces) is behind

    asyncio.run(story())


def test_what_a_job_would_wait_for_is_planned_unless_a_queue_has_to_admit_it_first(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with many(12, 0, tmp_path) as (connection, pieces):
            jobs = Reflector(connection, JOBS)
            settings = PodSettings(default_claim="runs")
            engine = KubeEngine(connection, pieces, Endpoints(pieces, jobs), jobs, settings)
            async with meanwhile(jobs.run()), meanwhile(engine.sweep()):
                await wait_until_async(lambda: bool(engine.plan(JOB).waits), "the operator to be behind", 30)
                assert engine.plan(JOB).waits == without_pods(PYTORCH_JOB)
                queued = JOB.spec.model_copy(update={"queue": "research"})
                assert engine.plan(JOB.model_copy(update={"spec": queued})).waits == ""

    asyncio.run(story())
