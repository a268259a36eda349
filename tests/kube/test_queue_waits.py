"""An attempt with a queue is admitted by Kueue or waits, and says why; a server plays the apiserver."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile

from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube.objects import Objects
from holdfast_controller.kube.observation import attempt_observation
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.queue_waits import FIRST_SECONDS, GROUP, put_aside, queue_waits
from holdfast_controller.manifests import attempt_manifests
from holdfast_controller.pod_settings import PodSettings
from holdfast_controller.pytorchjobs import PYTORCH_JOB

JOB = TrainingJob(
    metadata=Metadata(name="gpt", namespace="team", uid="job-1"),
    spec=Spec(command=["python"], image="trainer:1", queue="training", priority="urgent"),
)
FULL = json.loads((Path(__file__).with_name("captured_workloads.json")).read_text(encoding="utf-8"))["full"]
PREFERRED = {"name": "kueue.x-k8s.io", "preferredVersion": {"version": "v1beta2"}}


def said(group: Any, workloads: list[Any], directory: Path) -> str:
    """What the job says that it waits for; `group`, `workloads`: answers, or the status of a refusal."""
    return asked(group, workloads, directory)[0]


def asked(
    group: Any, workloads: list[Any], directory: Path, *, suspended: bool = True, **spec: Any
) -> tuple[str, str]:
    """What the job says that it waits for, and why it is not to be queued again, if it is not."""
    job = JOB.model_copy(update={"spec": JOB.spec.model_copy(update=spec)})
    made = attempt_manifests(job, 1, PodSettings(default_claim="runs")).attempt_object
    made["spec"]["runPolicy"]["suspend"] = suspended
    made["metadata"] |= {"uid": "pytorch-job-1", "resourceVersion": "5"}
    now = [1000.0]

    def answer(found: Any) -> web.Response:
        if isinstance(found, int):
            return web.json_response({"message": "no"}, status=found)
        return web.json_response(found)

    async def listed(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.Event().wait()
        items = [made] if request.path == PYTORCH_JOB.resource.path else []
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def queues(request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == "kueue.x-k8s.io/job-uid=pytorch-job-1"
        return answer(workloads[0] if workloads and isinstance(workloads[0], int) else {"items": workloads})

    async def groups(_: web.Request) -> web.Response:
        return answer(group)

    async def story() -> tuple[str, str]:
        routes = (
            web.get(PODS, listed),
            web.get(PYTORCH_JOB.resource.path, listed),
            web.get(GROUP, groups),
            web.get(f"{GROUP}/v1beta2/namespaces/team/workloads", queues),
        )
        async with connected(routes, directory) as connection:
            pieces = Pieces(connection)
            waits = queue_waits(connection, pieces, lambda: now[0])
            async with meanwhile(pieces.run()):
                await pieces.synced()
                with waits.followed() as own:
                    now[0] += FIRST_SECONDS
                    await waits.look(own)
                    found = pieces.object_of(JOB, 1)
                    waiting = attempt_observation(1, 1, found, [], queued=waits.known).waiting
                    return waiting, await put_aside(connection, found)

    return asyncio.run(story())


@pytest.mark.parametrize("queue", ["training", None])
@pytest.mark.parametrize("answer", [200, 403, 404])
def test_an_attempt_that_is_cleared_away_leaves_its_queue_at_once(
    queue: str | None, answer: int, tmp_path: Path
) -> None:
    """One that was preempted, and deleted while its quota came back, was given that: the next attempt waited
    until something else ended in the queue. Without Kueue, or its right, it goes as it did."""
    job = JOB.model_copy(update={"spec": JOB.spec.model_copy(update={"queue": queue, "priority": None})})
    made = attempt_manifests(job, 1, PodSettings(default_claim="runs")).attempt_object
    made["metadata"] |= {"uid": "pytorch-job-1", "resourceVersion": "5"}
    workloads = f"{GROUP}/v1beta2/namespaces/team/workloads"
    deleted: list[tuple[str, Any]] = []

    async def listed(request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == "kueue.x-k8s.io/job-uid=pytorch-job-1"
        items = [{"metadata": {"name": "of-attempt-1", "uid": "workload-1"}}]
        return web.json_response({"items": items} if answer == 200 else {"message": "no"}, status=answer)

    async def delete(request: web.Request) -> web.Response:
        deleted.append((request.path, (await request.json()).get("preconditions")))
        return web.json_response({})

    async def versions(_: web.Request) -> web.Response:
        return web.json_response(PREFERRED)

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({}, status=404)

    async def story() -> None:
        every = web.delete("/{path:.*}", delete), web.get("/{path:.*}", nothing)
        queues = web.get(GROUP, versions), web.get(workloads, listed)
        async with connected((*queues, *every), tmp_path) as connection:
            await Objects(connection, Pieces(connection)).clear(job, 1, made)

    asyncio.run(story())
    left = [(path, uid) for path, uid in deleted if path.startswith(workloads)]
    expected = [(f"{workloads}/of-attempt-1", {"uid": "workload-1"})]
    assert left == (expected if queue and answer == 200 else [])
    assert deleted[0][1] == {"uid": "pytorch-job-1"}


def test_an_attempt_with_a_queue_is_made_suspended_and_one_without_is_not() -> None:
    """So that one whom no Kueue admits waits, and runs beside no quota."""
    for queue, policy in (
        ("training", {"cleanPodPolicy": "None", "suspend": True}),
        (None, {"cleanPodPolicy": "None"}),
    ):
        spec = JOB.spec.model_copy(update={"queue": queue, "priority": None})
        job = JOB.model_copy(update={"spec": spec})
        made = attempt_manifests(job, 1, PodSettings(default_claim="runs")).attempt_object
        assert made["spec"]["runPolicy"] == policy


@pytest.mark.parametrize(
    ("group", "workloads", "words"),
    [
        pytest.param(
            404,
            [],
            "waits for Kueue, which its queue 'training' belongs to: the cluster has no API kueue.x-k8s.io, "
            "and without it no quota would be kept; install Kueue (k8s/kueue) and it goes on by itself, or "
            "take queue out of the job",
            id="no Kueue",
        ),
        pytest.param(
            PREFERRED,
            [],
            "waits for Kueue, which has taken no notice of it: see that its controller runs, and that its "
            "configuration names kubeflow.org/pytorchjob among integrations.frameworks; or there is no "
            "WorkloadPriorityClass 'urgent', which its priority names (k8s/kueue)",
            id="no Workload",
        ),
        pytest.param(
            PREFERRED,
            [{"status": {"conditions": FULL}}],
            "waits in its queue 'training': couldn't assign flavors to pod set worker: insufficient unused "
            "quota for cpu in flavor any, 500m more needed; wait for the queue's jobs to end",
            id="no quota left",
        ),
        pytest.param(PREFERRED, [{}], "waits for room in its queue 'training': ", id="not looked at yet"),
        pytest.param(PREFERRED, [403], "waits for room in its queue 'training': ", id="may not be read"),
    ],
)
def test_a_job_in_a_queue_says_what_it_waits_for(
    group: Any, workloads: list[Any], words: str, tmp_path: Path
) -> None:
    assert said(group, workloads, tmp_path).startswith(words)


@pytest.mark.parametrize(
    ("group", "workloads", "words"),
    [
        (PREFERRED, [{"spec": {"active": False}}], "its Workload in queue 'training' was made inactive"),
        (PREFERRED, [{"spec": {"active": True}}], ""),
        (PREFERRED, [], ""),
        (PREFERRED, [403], ""),
        (404, [], ""),
    ],
    ids=["inactive", "active", "no Workload", "may not be read", "no Kueue"],
)
def test_an_attempt_that_its_queue_took_back_is_not_put_aside_unless_its_workload_says_so(
    group: Any, workloads: list[Any], words: str, tmp_path: Path
) -> None:
    assert asked(group, workloads, tmp_path)[1] == words


@pytest.mark.parametrize(
    ("job", "workloads", "waits"),
    [
        pytest.param(
            {"queue": None, "priority": None},
            [{"spec": {"active": False}}],
            "somebody keeps it suspended, though it is in no queue: ",
            id="in no queue",
        ),
        pytest.param({"suspended": False}, [{"spec": {"active": False}}], "waits for ", id="not taken back"),
        pytest.param({"priority": None}, [], "waits for Kueue, ", id="no priority"),
    ],
)
def test_what_no_queue_holds_is_not_put_down_to_one(
    job: dict[str, Any], workloads: list[Any], waits: str, tmp_path: Path
) -> None:
    told, aside = asked(PREFERRED, workloads, tmp_path, **job)
    assert told.startswith(waits)
    assert not any(words in told for words in ("'training'", "WorkloadPriorityClass"))
    assert aside == ""
