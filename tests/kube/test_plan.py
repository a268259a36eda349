"""The dry run on a cluster says what a share of a GPU means, before anybody relies on one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from local_world import waiting_job

from holdfast_controller.jobs import AttemptRecord, Capacity
from holdfast_controller.kube.engine import KubeEngine
from holdfast_controller.kube.prepared import KEPT, Prepared
from holdfast_controller.manifests import Manifests
from holdfast_controller.pod_settings import PodSettings


def environment(manifests: Manifests) -> dict[str, str]:
    (container,) = manifests.pods["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


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


def test_a_command_that_starts_ranks_itself_is_told_in_the_plan() -> None:
    nothing: Any = None
    engine = KubeEngine(nothing, nothing, nothing, nothing, PodSettings(default_claim="runs"))
    (note,) = engine.plan(waiting_job(command=["torchrun", "train.py"], image="docker.io/library/t:1")).notes
    assert note.startswith("spec.command names torchrun")


def test_a_start_is_made_of_its_plan_and_of_no_other() -> None:
    prepared = Prepared(PodSettings(default_claim="runs", default_image="docker.io/library/trainer:1"))
    job = waiting_job()
    planned = prepared.manifests(job, 1)
    assert prepared.manifests(job.model_copy(deep=True), 1) is planned
    assert prepared.manifests(job, 2).attempt_object["metadata"]["name"].endswith("-2")
    changed = job.model_copy(update={"spec": job.spec.model_copy(update={"replicas": 3})})
    worker = prepared.manifests(changed, 1).attempt_object["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 3
    moved = job.model_copy(deep=True)  # opened for other nodes after it was planned
    moved.status.attempts = [AttemptRecord(number=1, capacity=Capacity.ON_DEMAND_FIRST)]
    worker = prepared.manifests(moved, 1).attempt_object["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert "nodeAffinity" in worker["template"]["spec"]["affinity"]
    saved = job.model_copy(deep=True)  # planned before it was known what the attempt before had saved
    assert "HOLDFAST_DURABLE_STEP" not in environment(prepared.manifests(saved, 2))
    saved.status.attempts = [AttemptRecord(number=1, durable_step=40), AttemptRecord(number=2)]
    assert environment(prepared.manifests(saved, 2))["HOLDFAST_DURABLE_STEP"] == "40"
    assert "HOLDFAST_DURABLE_STEP" not in environment(prepared.manifests(saved, 1))
    saved.status.attempts = [AttemptRecord(number=1, durable_step=0, last_step=0)]
    assert "HOLDFAST_DURABLE_STEP" not in environment(prepared.manifests(saved, 2)), "it did not begin"
    saved.status.attempts = [AttemptRecord(number=1, durable_step=0, last_step=3)]
    assert environment(prepared.manifests(saved, 2))["HOLDFAST_DURABLE_STEP"] == "0"
    began = datetime(2026, 11, 30, tzinfo=UTC)  # a program that tells of no step, and ran on
    for seconds, known in ((119, False), (120, True)):
        ended = began + timedelta(seconds=seconds)
        saved.status.attempts = [AttemptRecord(number=1, started_at=began, ended_at=ended)]
        assert ("HOLDFAST_DURABLE_STEP" in environment(prepared.manifests(saved, 2))) is known
    again = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "another"})})
    owners = prepared.manifests(again, 1).beside[0]["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == ["another"]


def test_a_config_whose_1_is_corrected_to_true_is_in_the_next_start() -> None:
    """For Python the two are equal, for who reads the file they are not."""
    prepared = Prepared(PodSettings(default_claim="runs", default_image="docker.io/library/trainer:1"))
    job = waiting_job(config={"compile": 1})
    assert prepared.manifests(job, 1).beside[0]["data"]["config.yaml"] == "compile: 1\n"
    corrected = job.model_copy(update={"spec": job.spec.model_copy(update={"config": {"compile": True}})})
    assert prepared.manifests(corrected, 1).beside[0]["data"]["config.yaml"] == "compile: true\n"


def test_a_label_that_is_changed_before_the_start_is_on_the_pods() -> None:
    """As while the job is suspended, and planned at every look."""
    settings = PodSettings(default_claim="runs", default_image="trainer:1", pod_labels=("team",))
    prepared = Prepared(settings)
    job = waiting_job()
    job.metadata.labels = {"team": "vision"}
    assert prepared.manifests(job, 1).pods["metadata"]["labels"]["team"] == "vision"
    labelled = job.model_copy(deep=True)
    labelled.metadata.labels["team"] = "nlp"
    assert prepared.manifests(labelled, 1).pods["metadata"]["labels"]["team"] == "nlp"


def test_few_prepared_manifests_are_kept() -> None:
    prepared = Prepared(PodSettings(default_claim="runs", default_image="docker.io/library/trainer:1"))
    job = waiting_job()
    first = prepared.manifests(job, 1)
    for attempt in range(2, KEPT + 2):
        prepared.manifests(job, attempt)
    assert prepared.manifests(job, 1) is not first
