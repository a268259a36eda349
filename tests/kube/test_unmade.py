"""An attempt whose pods the apiserver refuses says why; a server plays the apiserver that has the Events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile
from tests.kube.documents import RUNNING, of_attempt, pod

from holdfast_controller.cluster import AttemptObservation, ReplicaState
from holdfast_controller.jobs import Metadata, Spec, TrainingJob, Verdict
from holdfast_controller.kube.events import events_path
from holdfast_controller.kube.observation import attempt_observation
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.unmade import FIRST_SECONDS, unmade
from holdfast_controller.pytorchjobs import PYTORCH_JOB

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


def told(reason: str, message: str, second: int) -> dict[str, Any]:
    return {
        "metadata": {"creationTimestamp": f"2026-05-01T12:00:{second:02}Z"},
        "reason": reason,
        "message": message,
        "type": "Normal",
    }


EVENTS = [
    told("SuccessfulCreatePod", "Created pod: gpt-1-worker-0", 1),
    told("FailedCreatePod", f"Error creating: {NO_ROOM}", 2),
]


def seen(
    pods: list[Any], events: list[Any], conditions: list[Any], directory: Path
) -> tuple[AttemptObservation, int]:
    """The attempt, and how often its Events were listed."""
    metadata = {"name": "gpt-1", "creationTimestamp": "2026-05-01T12:00:00Z"}
    made = of_attempt(JOB, {"metadata": metadata, "spec": {}, "status": {"conditions": conditions}})
    now, asked = [1000.0], [0]

    async def listed(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.Event().wait()
        items = [made] if request.path == PYTORCH_JOB.resource.path else []
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def tell(request: web.Request) -> web.Response:
        assert request.query["fieldSelector"] == "involvedObject.uid=gpt-1"
        asked[0] += 1
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": events})

    async def story() -> AttemptObservation:
        routes = [web.get(path, listed) for path in (PODS, PYTORCH_JOB.resource.path)]
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


def test_a_gang_that_its_quota_keeps_out_says_so(tmp_path: Path) -> None:
    """It is not the operator, which is installed and running."""
    observation, _ = seen([], EVENTS, [CREATED], tmp_path)
    assert observation.waiting == f"replica 0 (and 1 more replicas): {SAID}"


def test_a_gang_of_which_a_quota_lets_a_part_in_can_give_its_place_back(tmp_path: Path) -> None:
    observation, _ = seen([of_attempt(JOB, pod(0, state=RUNNING))], EVENTS, [], tmp_path)
    up, left_out = observation.replicas
    assert up.state is ReplicaState.RUNNING
    assert (left_out.state, left_out.stuck) == (ReplicaState.PENDING, Verdict.UNSCHEDULABLE)
    assert left_out.reason == SAID


@pytest.mark.parametrize(
    ("events", "conditions", "asked"),
    [
        pytest.param(EVENTS[:1], [CREATED], 1, id="nothing is refused"),
        pytest.param(EVENTS, [CREATED, {"type": "Running", "status": "True"}], 0, id="it has run"),
    ],
)
def test_otherwise_its_operator_is_behind(
    events: list[Any], conditions: list[Any], asked: int, tmp_path: Path
) -> None:
    observation, listed = seen([], events, conditions, tmp_path)
    assert observation.waiting == (
        "waits for the Kubeflow Training Operator to make its pods; is it installed and running?"
    )
    assert listed == asked
