"""Pods of one job that end or are taken, and what an apiserver over HTTP has of them: it lists, streams logs,
and it keeps what is written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Spec, Status, TrainingJob
from holdfast_controller.kube.connection import connect
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.engine import KubeEngine
from holdfast_controller.kube.last_words import TAIL, LastWords
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.reflector import Reflector
from holdfast_controller.kube.resource import JOBS, status_document
from holdfast_controller.pod_template import attempt_labels
from holdfast_controller.pytorchjobs import PYTORCH_JOB

JOB = TrainingJob(
    metadata=Metadata(name="gpt", namespace="team", uid="job-1"),
    spec=Spec(command=["python"], replicas=2),
    status=Status(
        phase=Phase.RUNNING,
        attempt=1,
        attempts=[AttemptRecord(number=1, started_at=datetime(2026, 1, 1, tzinfo=UTC))],
    ),
)
GOING = "2026-01-01T00:00:30Z"
CLUSTER = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "users": [{"name": "x", "user": {"token": "t"}}],
    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
}


def pod(index: int, state: str = "running", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"gpt-1-worker-{index}",
            "namespace": "team",
            "uid": f"pod-{index}",
            "resourceVersion": "5",
            "labels": {**attempt_labels(JOB, 1), PYTORCH_JOB.index_label: str(index)},
            **metadata,
        },
        "status": {
            "phase": "Running" if state == "running" else "Succeeded",
            "containerStatuses": [{"name": "pytorch", "state": {state: {}}}],
        },
    }


class Server:
    """Logs by pod: what each has said so far, and what it says until its end."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.job = JOB
        self.pods = {one["metadata"]["name"]: one for one in pods}
        self.said: dict[str, list[str]] = {}
        self.will_say: dict[str, list[str]] = {}
        self.containers: set[str] = set()
        """Whose logs were asked for."""
        self.removed = False
        self.refused = 0
        """So many writes of a ConfigMap are refused before the first is taken."""
        self.refused_notes = 0
        """Likewise, of what is noted on a pod."""
        self.config_maps: dict[str, dict[str, Any]] = {}
        self.clashes = 0
        """Writes of one that was there."""
        self.end = asyncio.Event()
        self.slow = False
        """What was said so far is asked for in vain."""

    def tail(self, index: int) -> str | None:
        annotations = self.pods[f"gpt-1-worker-{index}"]["metadata"].get("annotations") or {}
        found: str | None = annotations.get(TAIL)
        return found

    async def list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.Event().wait()
        metadata = {"name": "gpt", "namespace": "team", "uid": "job-1", "resourceVersion": "1"}
        document = {**self.job.to_dict(), "metadata": metadata, "status": status_document(self.job.status)}
        items = {PODS: list(self.pods.values()), JOBS: [document]}.get(request.path, [])
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def log(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        name = request.match_info["pod"]
        self.containers.add(request.query["container"])
        lines, removed = list(self.said.get(name, [])), self.removed
        if self.slow and "follow" not in request.query:
            await asyncio.Event().wait()
        if "follow" in request.query:
            await self.end.wait()
            lines += self.will_say.get(name, [])
        text = "\n".join(lines[-int(request.query.get("tailLines", 1000)) :])
        await answer.write(b"unable to retrieve container logs for c://0" if removed else text.encode())
        return answer

    async def patch(self, request: web.Request) -> web.Response:
        if self.refused_notes:
            self.refused_notes -= 1
            return web.json_response({"message": "etcdserver: request timed out"}, status=500)
        one = self.pods[request.match_info["pod"]]
        one["metadata"]["annotations"] = (await request.json())["metadata"]["annotations"]
        one["metadata"]["resourceVersion"] = str(int(one["metadata"]["resourceVersion"]) + 1)
        return web.json_response(one)

    async def keep(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refused:
            self.refused -= 1
            return web.json_response({"message": "etcdserver: request timed out"}, status=500)
        if body["metadata"]["name"] in self.config_maps:
            self.clashes += 1
            return web.json_response({"reason": "AlreadyExists", "message": "exists"}, status=409)
        self.config_maps[body["metadata"]["name"]] = body
        return web.json_response(body)

    async def make(self, request: web.Request) -> web.Response:
        body = await request.json()
        body["metadata"] |= {"uid": "pytorch-job", "resourceVersion": "6"}
        return web.json_response(body)

    async def drop(self, request: web.Request) -> web.Response:
        found = self.config_maps.pop(request.match_info["name"], None)
        return web.json_response({} if found is not None else {"code": 404}, status=200 if found else 404)

    async def kept(self, request: web.Request) -> web.Response:
        found = self.config_maps.get(request.match_info["name"])
        return web.json_response(found or {"code": 404}, status=200 if found else 404)


@asynccontextmanager
async def running(server: Server, tmp_path: Path) -> AsyncIterator[tuple[KubeEngine, LastWords, Endpoints]]:
    app = web.Application(client_max_size=3 * 2**20)  # as an apiserver takes
    for path in (PODS, PYTORCH_JOB.resource.path, JOBS):
        app.router.add_get(path, server.list_or_watch)
    app.router.add_get("/api/v1/namespaces/team/pods/{pod}/log", server.log)
    app.router.add_patch("/api/v1/namespaces/team/pods/{pod}", server.patch)
    app.router.add_post("/api/v1/namespaces/team/configmaps", server.keep)
    app.router.add_get("/api/v1/namespaces/team/configmaps/{name}", server.kept)
    app.router.add_delete("/api/v1/namespaces/team/configmaps/{name}", server.drop)
    app.router.add_post(PYTORCH_JOB.resource.within("team"), server.make)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(json.dumps({**CLUSTER, "clusters": [
        {"name": "x", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    ]}))  # fmt: skip
    connection = await connect(kubeconfig)
    jobs, pieces = Reflector(connection, JOBS), Pieces(connection)
    endpoints = Endpoints(pieces, jobs)
    engine = KubeEngine(connection, pieces, endpoints, jobs)
    words = engine.last_words
    tasks = [asyncio.ensure_future(work) for work in (jobs.run(), pieces.run(), engine.sweep())]
    try:
        await jobs.synced()
        await pieces.synced()
        yield engine, words, endpoints
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await connection.close()
        await runner.cleanup()


async def lines_of(engine: KubeEngine, job: TrainingJob, rank: int, tail: int | None = None) -> list[str]:
    return [line async for line in engine.logs(job, 1, rank, tail=tail)]


class EndingServer(Server):
    """One whose pods end, as it is watched, when the test says so."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        super().__init__(*pods)
        self.over = asyncio.Event()

    async def list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query or request.path != PODS:
            return await super().list_or_watch(request)
        answer = web.StreamResponse()
        await answer.prepare(request)
        await self.over.wait()
        for one in self.pods.values():
            one["metadata"]["resourceVersion"] = "10"
            one["status"] = pod(0, "terminated")["status"]
            await answer.write(json.dumps({"type": "MODIFIED", "object": one}).encode() + b"\n")
        await asyncio.Event().wait()
        return answer
