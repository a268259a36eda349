"""The operator's and the kubelet's parts, played for tests on a control plane without nodes.

For every new PyTorchJob or TrainJob the operator's part makes its pods, bound to a node that is a name alone.
The kubelet's part lets each run and end as `Life` says, with the termination message that our trainer
leaves; a pod that is deleted is given notice, saves, and goes, as far as its finalizers let it. What ran is
kept, and so is every moment at which something ran that must not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from bench.controlling.operator import pieces

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.cluster import AlreadyExists, NotFound, Unavailable
from holdfast_controller.kube.connection import MERGE_PATCH, Connection, Document
from holdfast_controller.kube.pieces import PODS, attempt_of, pod_path
from holdfast_controller.kube.pod_state import index_of
from holdfast_controller.kube.reflector import Notice, Reflector, key_of, uid_of
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_controller.pytorchjobs import PYTORCH_JOB, REPLICA_TYPE
from holdfast_controller.trainjobs import NODE as NODE_JOB
from holdfast_controller.trainjobs import RUNTIMES, TRAIN_JOB
from holdfast_trainer.contract import Termination

NODE = "far-away"
STEPS = 6


class End(StrEnum):
    """How a pod ends by itself."""

    FINISHED = "finished"
    FAILED = "failed"
    EVICTED = "evicted"
    NEVER = "never"


@dataclass(frozen=True)
class Life:
    """Of one pod: how it ends, after so many seconds."""

    end: End
    seconds: float = 0.3


Lives = Callable[[str, int], Life]
"""By the job's name and the attempt."""


@dataclass
class FakePods:
    """Of one cluster; `run` plays until it is cancelled."""

    connection: Connection
    lives: Lives
    kind: AttemptKind = PYTORCH_JOB
    """What attempts are made as."""
    started: list[tuple[str, int, int]] = field(default_factory=list)
    """Job's uid, attempt and replica of every pod that ran."""
    violations: list[str] = field(default_factory=list)
    _running: dict[str, dict[str, int]] = field(default_factory=dict)
    _asked_to_go: dict[str, asyncio.Event] = field(default_factory=dict)
    _made: set[str] = field(default_factory=set)

    def runs(self, uid: str, attempt: int) -> bool:
        """Whether a pod of this attempt of the job `uid` runs now."""
        return attempt in self._running.get(uid, {}).values()

    async def run(self) -> None:
        pods = Reflector(self.connection, PODS)
        jobs = Reflector(self.connection, self.kind.resource.path)
        async with asyncio.TaskGroup() as group:
            pods.listen(lambda notice: self._hear_pod(notice, group))
            jobs.listen(lambda notice: self._hear_job(notice, group))
            group.create_task(pods.run())
            group.create_task(jobs.run())

    # -------------------------------------------------------------- the operator

    def _hear_job(self, notice: Notice, group: asyncio.TaskGroup) -> None:
        uid = uid_of(notice.object)
        going = notice.type == "DELETED" or "deletionTimestamp" in notice.object["metadata"]
        if not going and uid not in self._made:
            self._made.add(uid)
            group.create_task(self._make_pods(notice.object))

    async def _make_pods(self, job: Document) -> None:
        namespace = job["metadata"]["namespace"]
        with suppress(NotFound):  # it went, with its runtime, before we came to it
            for pod in await self._pods_of(job):
                path = f"/api/v1/namespaces/{namespace}/pods"
                with suppress(AlreadyExists):  # made by a request whose answer did not come
                    await _insist(lambda: self.connection.post(path, pod))  # noqa: B023 - awaited at once

    async def _pods_of(self, job: Document) -> list[Document]:
        if self.kind is PYTORCH_JOB:
            replicas = job["spec"]["pytorchReplicaSpecs"][REPLICA_TYPE]["replicas"]
            return [pieces(job, index, NODE)[1] for index in range(replicas)]
        meta = job["metadata"]
        runtime = await self.connection.get(f"{RUNTIMES.within(meta['namespace'])}/{meta['name']}")
        return _pods_of_train_job(job, runtime)

    # --------------------------------------------------------------- the kubelet

    def _hear_pod(self, notice: Notice, group: asyncio.TaskGroup) -> None:
        uid, going = uid_of(notice.object), "deletionTimestamp" in notice.object["metadata"]
        if uid not in self._asked_to_go and notice.type != "DELETED":
            self._asked_to_go[uid] = asyncio.Event()
            group.create_task(self._live(notice.object, self._asked_to_go[uid]))
        if (going or notice.type == "DELETED") and uid in self._asked_to_go:
            self._asked_to_go[uid].set()

    async def _live(self, pod: Document, asked_to_go: asyncio.Event) -> None:
        with suppress(NotFound):
            if not asked_to_go.is_set():
                await self._start_and_end(pod, asked_to_go)
            await asked_to_go.wait()
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid_of(pod)}}
            await _insist(lambda: self.connection.delete(pod_path(pod), options))

    async def _start_and_end(self, pod: Document, asked_to_go: asyncio.Event) -> None:
        whose = attempt_of(pod)
        assert whose is not None
        (job, attempt), index = whose, index_of(pod)
        started = _now()
        await self._write(pod, "Running", {"running": {"startedAt": started}})
        self._note_start(key_of(pod), job, attempt, index)
        try:
            life = self.lives(pod["metadata"]["labels"][JOB_LABEL], attempt)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if life.end is End.NEVER else life.seconds):
                    await asked_to_go.wait()
            phase, reason, code, message = _end(End.NEVER if asked_to_go.is_set() else life.end)
            ended = {"exitCode": code, "startedAt": started, "finishedAt": _now(), "message": message}
            await self._write(pod, phase, {"terminated": ended}, reason)
        finally:
            del self._running[job][key_of(pod)]

    def _note_start(self, pod: str, job: str, attempt: int, index: int) -> None:
        others = self._running.setdefault(job, {})
        if any(number != attempt for number in others.values()):
            self.violations.append(f"{pod} started beside {others}")
        if (job, attempt, index) in self.started:
            self.violations.append(f"{pod} started a second time")
        others[pod] = attempt
        self.started.append((job, attempt, index))

    async def _write(self, pod: Document, phase: str, state: Document, reason: str = "") -> None:
        one = {"name": self.kind.container, "image": "none", "imageID": "", "ready": "running" in state,
               "restartCount": 0, "state": state}  # fmt: skip
        status: dict[str, Any] = {"phase": phase, "containerStatuses": [one]}
        if reason:
            status |= {"reason": reason, "message": "The node was low on resource: memory."}
        path = f"{pod_path(pod)}/status"
        await _insist(lambda: self.connection.patch(path, {"status": status}, MERGE_PATCH))


def _pods_of_train_job(job: Document, runtime: Document) -> list[Document]:
    """As the indexed Job of its JobSet makes them, but for their names: by those, which end at random, nobody
    would see that a pod is made a second time."""
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = node["template"]["spec"]["template"]
    name, uid = job["metadata"]["name"], uid_of(job)
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": name,
        "uid": uid,
        "controller": True,
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": f"{name}-{NODE_JOB}-0-{index}-{uid[:5]}",
                "labels": {**template["metadata"]["labels"], TRAIN_JOB.index_label: str(index)},
                "ownerReferences": [owner],
            },
            "spec": {**template["spec"], "nodeName": NODE},
        }
        for index in range(runtime["spec"]["mlPolicy"]["numNodes"])
    ]


async def _insist(request: Callable[[], Awaitable[Document]]) -> None:
    """Until the server answers: a busy machine must not end the play."""
    while True:
        try:
            await request()
            return
        except Unavailable:
            await asyncio.sleep(0.2)


def _end(how: End) -> tuple[str, str, int, str]:
    """(phase, reason, exit code, termination message) of a pod; NEVER: it was given notice."""
    if how is End.FINISHED:
        return "Succeeded", "", 0, Termination("finished", STEPS, STEPS).to_json()
    if how is End.NEVER:
        return "Failed", "", 1, Termination("interrupted", 3, 3).to_json()
    if how is End.FAILED:
        return "Failed", "", 1, Termination("failed", 3, 0, "ValueError: loss is nan").to_json()
    return "Failed", "Evicted", 137, ""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def make_node(connection: Connection) -> None:
    """The name that pods are bound to; where none is, the control plane would collect them."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
    with suppress(AlreadyExists):
        await connection.post("/api/v1/nodes", node)
