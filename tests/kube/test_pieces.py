"""What the cluster holds of an attempt, as the labels of each object say by now."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from small_apiserver import connected, meanwhile
from tests.kube.documents import RUNNING, of_attempt, pod
from waiting import wait_until_async

from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.reflector import Timing
from holdfast_controller.manifests import KINDS
from holdfast_controller.pod_template import UID_LABEL

PATHS = (PODS, *(kind.resource.path for kind in KINDS.values()))


def test_a_pod_whose_labels_somebody_took_off_is_forgotten(tmp_path: Path) -> None:
    """It was remembered as it had been, running, long after it was gone: its attempt never ended."""
    job = TrainingJob(metadata=Metadata(name="gpt", namespace="team", uid="job-1"), spec=Spec(command=["x"]))
    pods: list[dict[str, Any]] = [of_attempt(job, pod(index, state=RUNNING)) for index in (0, 1)]

    async def list_or_watch(request: web.Request) -> web.Response:
        if "watch" in request.query:  # the next list follows as soon as it ends
            await asyncio.sleep(0)
            return web.json_response({"code": 410}, status=410)
        items = pods if request.path == PODS else []
        version = max((one["metadata"]["resourceVersion"] for one in items), default="9")
        return web.json_response({"metadata": {"resourceVersion": version}, "items": items})

    async def story() -> None:
        routes = [web.get(path, list_or_watch) for path in PATHS]
        async with connected(routes, tmp_path) as connection:
            pieces = Pieces(connection, timing=Timing(first_retry_seconds=0.01, longest_retry_seconds=0.02))
            async with meanwhile(pieces.run()):
                await pieces.synced()
                assert len(pieces.pods_of(job, 1)) == 2
                other = copy.deepcopy(pods[1])
                del other["metadata"]["labels"][UID_LABEL]
                other["metadata"]["resourceVersion"] = "6"
                pods[1] = other
                await wait_until_async(lambda: len(pieces.pods_of(job, 1)) == 1, "it to be no pod of the job")
                pods.clear()
                await wait_until_async(lambda: not pieces.all_pods_of(job), "the other to go")

    asyncio.run(story())


def test_what_cannot_be_listed_is_a_fault_and_what_is_not_installed_is_none(tmp_path: Path) -> None:
    """A controller that may not list pods takes jobs and starts none: it passed for ready."""
    forbidden = {PODS}

    async def list_or_watch(request: web.Request) -> web.StreamResponse:
        if request.path in forbidden:
            said = 'pods is forbidden: User "holdfast" cannot list resource "pods"'
            return web.json_response({"message": said}, status=403)
        if "watch" in request.query:
            answer = web.StreamResponse()
            await answer.prepare(request)
            await asyncio.Event().wait()
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": []})

    async def story() -> None:
        pods, installed, _ = PATHS
        routes = [web.get(path, list_or_watch) for path in (pods, installed)]
        async with connected(routes, tmp_path) as connection:
            pieces = Pieces(connection, timing=Timing(first_retry_seconds=0.01, longest_retry_seconds=0.02))
            assert pieces.fault == "not listed yet"
            async with meanwhile(pieces.run()):
                await wait_until_async(lambda: "cannot list" in str(pieces.fault), "what is in the way")
                forbidden.clear()
                await wait_until_async(lambda: pieces.fault is None, "it to be over")

    asyncio.run(story())


def test_a_pod_of_a_list_and_of_a_watch_is_one(tmp_path: Path) -> None:
    """Only the latter says that it is a Pod. Of its conditions those are kept that are read."""
    job = TrainingJob(metadata=Metadata(name="gpt", namespace="team", uid="job-1"), spec=Spec(command=["x"]))
    listed: dict[str, Any] = of_attempt(job, pod(state=RUNNING))
    read = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "DisruptionTarget")]
    others = [{"type": kind, "status": "True"} for kind in ("Initialized", "example.com/up")]
    listed["status"]["conditions"] = [*others, *read]
    told = {**copy.deepcopy(listed), "kind": "Pod", "apiVersion": "v1"}
    told["metadata"]["resourceVersion"] = "7"

    async def list_or_watch(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            items = [listed] if request.path == PODS else []
            return web.json_response({"metadata": {"resourceVersion": "6"}, "items": items})
        answer = web.StreamResponse()
        await answer.prepare(request)
        if request.path == PODS:
            await answer.write(json.dumps({"type": "MODIFIED", "object": told}).encode() + b"\n")
        await asyncio.Event().wait()
        return answer

    async def story() -> None:
        routes = [web.get(path, list_or_watch) for path in PATHS]
        async with connected(routes, tmp_path) as connection:
            pieces = Pieces(connection)
            async with meanwhile(pieces.run()):
                await pieces.synced()

                def versions() -> list[str]:
                    return [one["metadata"]["resourceVersion"] for one in pieces.pods_of(job, 1)]

                await wait_until_async(lambda: "7" in versions(), "the watch to be heard")
                assert versions() == ["7"]
                assert pieces.pods_of(job, 1)[0]["status"]["conditions"] == read

    asyncio.run(story())
