"""What an attempt is made of is made in its order, and again where an operator is a moment behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected

from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube import objects
from holdfast_controller.kube.errors import NotPermitted
from holdfast_controller.kube.objects import Objects
from holdfast_controller.kube.pieces import Pieces
from holdfast_controller.manifests import attempt_manifests
from holdfast_controller.pod_settings import JobsKind, PodSettings
from holdfast_controller.trainjobs import TRAIN_JOB

JOB = TrainingJob(
    metadata=Metadata(name="gpt", namespace="team", uid="job-1"), spec=Spec(command=["python"], image="a:1")
)
LATE = (
    'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: '
    'TrainingRuntime.trainer.kubeflow.org "gpt-1" not found: specified trainingRuntime must be created '
    "before the TrainJob is created"
)
OTHER = 'admission webhook "policy.example.org" denied the request: no TrainJobs on Sundays'


def made(refuse: Callable[[int], str], directory: Path) -> list[str]:
    """The kinds that were asked for, in order; `refuse` says why the n-th TrainJob is not taken."""
    asked: list[str] = []

    async def post(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        asked.append(body["kind"])
        refusal = refuse(asked.count("TrainJob")) if body["kind"] == "TrainJob" else ""
        if refusal:
            return web.json_response({"code": 403, "message": refusal}, status=403)
        body["metadata"] |= {"uid": body["kind"], "resourceVersion": "5"}
        return web.json_response(body, status=201)

    async def story() -> None:
        settings = PodSettings(kind=JobsKind.TRAIN_JOB, default_claim="runs")
        manifests = attempt_manifests(JOB, 1, settings)
        async with connected([web.post("/{path:.*}", post)], directory) as connection:
            pieces = Pieces(connection)
            await Objects(connection, pieces).create(JOB, 1, TRAIN_JOB, manifests)
            assert pieces.object_of(JOB, 1) is not None, "known at once"

    asyncio.run(story())
    return asked


def test_a_train_job_is_asked_for_until_trainer_has_seen_its_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LATE_SECONDS", 0.0)
    asked = made(lambda time: LATE if time < 3 else "", tmp_path)
    assert asked == ["ConfigMap", "TrainingRuntime", "TrainJob", "TrainJob", "TrainJob"]


@pytest.mark.parametrize(
    ("refusal", "times"), [(LATE, objects.LATE_TRIES), (OTHER, 1)], ids=["late", "other"]
)
def test_what_does_not_pass_is_told(
    refusal: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LATE_SECONDS", 0.0)
    tries: list[int] = []

    def refuse(time: int) -> str:
        tries.append(time)
        return refusal

    with pytest.raises(NotPermitted, match=r"denied the request"):
        made(refuse, tmp_path)
    assert len(tries) == times
