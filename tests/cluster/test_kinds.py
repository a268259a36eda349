"""Attempts of either kind: what a change of the kind finds at work, what a dying controller leaves.

A real apiserver, no nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import yaml
from tests.cluster import trainer, training_operator, trainingjobs
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Kubectl
from waiting import wait_until, wait_until_async

from holdfast_controller.jobs import AttemptRecord, TrainingJob
from holdfast_controller.kube.connection import connect
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.engine import KubeEngine
from holdfast_controller.kube.errors import NotLeader
from holdfast_controller.kube.pieces import Pieces
from holdfast_controller.kube.prerequisites import missing
from holdfast_controller.kube.reflector import Reflector, Timing
from holdfast_controller.kube.resource import JOBS, decode
from holdfast_controller.pod_settings import JobsKind, PodSettings
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
CRD = Path(__file__).parents[2] / "helm" / "holdfast" / "templates" / "crd.yaml"
QUICK = Timing(first_retry_seconds=0.05, longest_retry_seconds=0.3)
TEAM = "team-kinds"
MADE = "pytorchjobs,trainjobs,trainingruntimes,configmaps"


@asynccontextmanager
async def engine_of(
    kind: JobsKind, kubectl: Kubectl, may_write: Callable[[], bool] = lambda: True
) -> AsyncIterator[tuple[KubeEngine, Pieces, Reflector]]:
    """As a controller has it that was started with this setting."""
    connection = (await connect(kubectl.kubeconfig)).guarded(may_write)
    pieces, jobs = Pieces(connection, timing=QUICK), Reflector(connection, JOBS, timing=QUICK)
    settings = PodSettings(kind=kind, default_image="none:1", default_claim="runs")
    keeping = asyncio.gather(pieces.run(), jobs.run())
    try:
        await pieces.synced()
        await jobs.synced()
        yield KubeEngine(connection, pieces, Endpoints(pieces, jobs), jobs, settings), pieces, jobs
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await connection.close()


def made(kubectl: Kubectl) -> list[str]:
    """All that is there for attempts."""
    words = ("get", MADE, f"-n={TEAM}", "-l=app.kubernetes.io/managed-by=holdfast", "-o=name")
    return sorted(line.replace(".kubeflow.org", "") for line in kubectl.run(*words).split())


def a_job(kubectl: Kubectl) -> TrainingJob:
    document = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt"},
        "spec": {"command": ["true"], "replicas": 2},
    }
    kubectl.apply(document, namespace=TEAM)
    job = decode(kubectl.get("tj", "gpt", f"-n={TEAM}"))
    job.status.attempts = [AttemptRecord(number=1), AttemptRecord(number=2)]
    return job


@pytest.fixture
def kubectl(control_plane: ControlPlane) -> Iterator[Kubectl]:
    """Where both kinds are, and a namespace for jobs."""
    kubectl = control_plane.kubectl
    trainingjobs.install(kubectl, yaml.safe_load(CRD.read_text()), namespaces=(TEAM,))
    training_operator.serve_crd(kubectl)
    trainer.serve_crds(kubectl)
    try:
        yield kubectl
    finally:
        kubectl.run("delete", "tj", "gpt", f"-n={TEAM}", "--ignore-not-found")
        trainingjobs.remove_namespaces(kubectl, TEAM)


def test_an_attempt_at_work_outlives_a_change_of_the_kind(kubectl: Kubectl) -> None:
    job = a_job(kubectl)

    async def story() -> None:
        async with engine_of(JobsKind.PYTORCH_JOB, kubectl) as (engine, _, _):
            await engine.start(job, 1)
            assert (await engine.observe(job, 1)).exists
        assert made(kubectl) == ["configmap/gpt-1", "pytorchjob/gpt-1"]

        async with engine_of(JobsKind.TRAIN_JOB, kubectl) as (engine, _, _):
            seen = await engine.observe(job, 1)
            assert (seen.exists, seen.gone, seen.stopping) == (True, False, False)
            assert "the Kubeflow Training Operator" in seen.waiting
            await engine.start(job, 1)
            assert made(kubectl) == ["configmap/gpt-1", "pytorchjob/gpt-1"], "it is not made a second time"
            await engine.start(job, 2)
            assert made(kubectl) == [
                "configmap/gpt-2",
                "trainingruntime.trainer/gpt-2",
                "trainjob.trainer/gpt-2",
            ]
            assert "Kubeflow Trainer" in (await engine.observe(job, 2)).waiting

        async with engine_of(JobsKind.PYTORCH_JOB, kubectl) as (engine, _, _):
            assert (await engine.observe(job, 2)).exists
            await engine.kill(job, 2)
            assert "trainjob.trainer/gpt-2" not in made(kubectl), "it may make no pods any more"
            await engine.delete(job)
        kubectl.run("delete", "tj", "gpt", f"-n={TEAM}")
        await wait_until_async(lambda: made(kubectl) == [], "nothing to be left")

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kind", "newest"),
    [
        (JobsKind.PYTORCH_JOB, ["configmap/gpt-2", "pytorchjob/gpt-2"]),
        (JobsKind.TRAIN_JOB, ["configmap/gpt-2", "trainingruntime.trainer/gpt-2", "trainjob.trainer/gpt-2"]),
    ],
)
def test_a_controller_that_dies_between_two_writes_leaves_nothing_of_the_attempt_before(
    kubectl: Kubectl, kind: JobsKind, newest: list[str]
) -> None:
    job = a_job(kubectl)

    async def dies_after(writes: int) -> bool:
        """Whether it died, not having had enough of them."""
        left = 1000

        def may_write() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        async with engine_of(kind, kubectl, may_write) as (engine, pieces, _):
            await engine.start(job, 1)
            await wait_until_async(lambda: len(pieces.objects_of(job)) == 1, "the first to be seen")
            left = writes
            try:
                await engine.start(job, 2)
            except NotLeader:
                died = True
            else:
                died = False
        async with engine_of(kind, kubectl) as (engine, pieces, _):
            if not (await engine.observe(job, 2)).exists:  # else nobody starts it again
                assert died
                await engine.start(job, 2)
            assert made(kubectl) == newest, f"killed after {writes} writes"
            await wait_until_async(lambda: len(pieces.objects_of(job)) == 1, "the second to be seen")
            await engine.delete(job)
        return died

    async def story() -> None:
        writes = 0
        while await dies_after(writes):
            writes += 1
        assert made(kubectl) == []
        assert writes > len(newest), "some of them clear"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kind", "crd", "operator"),
    [
        (JobsKind.PYTORCH_JOB, "pytorchjobs.kubeflow.org", "the Kubeflow Training Operator"),
        (JobsKind.TRAIN_JOB, "trainjobs.trainer.kubeflow.org", "Kubeflow Trainer"),
    ],
)
def test_the_operator_that_is_missing_is_that_of_the_kind(
    kubectl: Kubectl, kind: JobsKind, crd: str, operator: str
) -> None:
    """And of no other: what a cluster lacks without needing it is not told."""
    kubectl.run("delete", "crd", crd)
    wait_until(lambda: kubectl.attempt("get", crd, "-A").returncode != 0, "the kind to be gone")
    kinds = {one.resource.kind: one for one in (PYTORCH_JOB, TRAIN_JOB)}
    [other] = set(JobsKind) - {kind}
    job = TrainingJob.model_validate({"metadata": {"name": "a"}, "spec": {"command": ["true"]}})

    async def story() -> None:
        async with engine_of(kind, kubectl) as (engine, pieces, jobs):
            [sentence] = missing(jobs, pieces, kinds[kind])
            assert sentence.startswith(f"{operator}: the CRD {crd} is not there; jobs are taken and wait")
            assert missing(jobs, pieces, kinds[other]) == ()
            assert f"the cluster has no CRD {crd}" in (await engine.observe(job, 1)).waiting
        async with engine_of(other, kubectl) as (engine, _, _):
            seen = await engine.observe(job, 1)
            assert (seen.exists, seen.gone, seen.waiting) == (False, True, "")

    try:
        asyncio.run(story())
    finally:
        training_operator.serve_crd(kubectl)
        trainer.serve_crds(kubectl)
