"""The dry run on a cluster says what a share of a GPU means, before anybody relies on one."""

from __future__ import annotations

from typing import Any

import pytest
from local_world import waiting_job

from holdfast_controller.kube.engine import KubeEngine
from holdfast_controller.pod_settings import PodSettings


@pytest.mark.parametrize(
    ("gpus", "replicas", "told"),
    [
        ("0", 2, ()),
        ("1", 2, ()),
        ("0.25", 1, ("shares its memory",)),
        ("0.25", 2, ("shares its memory", "NCCL refuses two ranks on one GPU")),
    ],
)
def test_the_plan_of_a_share(gpus: str, replicas: int, told: tuple[str, ...]) -> None:
    nothing: Any = None  # a plan asks nobody
    engine = KubeEngine(nothing, nothing, nothing, nothing, PodSettings(default_claim="runs"))
    job = waiting_job(gpus=gpus, replicas=replicas, image="docker.io/library/trainer:1")
    plan = engine.plan(job)
    assert plan.reasons == ()
    assert plan.manifests
    assert len(plan.notes) == len(told)
    for note, words in zip(plan.notes, told, strict=True):
        assert words in note
