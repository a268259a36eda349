"""What the Kubeflow Training Operator does for a PyTorchJob, in a few lines: for benchmarks alone.

kwok's stages change objects and cannot make any, so the operator's part is played here: for each new
PyTorchJob a headless Service and a pod for every replica, then the condition Created, and Running once they
all run. Pods are spread over the nodes here too, in turn: the scheduler is not what is measured. Nothing here
waits for what the real one does besides, such as its Events.

    python -m bench.controlling.operator KUBECONFIG NODES TRAINERS

reads from standard input how many PyTorchJobs it may take a second (0: no limit), again and again, and
ends with it. The pods of so many first jobs get the addresses of trainers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.controlling.api import MERGE_PATCH, Api, api
from bench.controlling.jobs import key_of
from bench.controlling.trainers import ADDRESS, address_of

from holdfast_controller.kube.pieces import PODS
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_controller.pytorchjobs import PYTORCH_JOB, REPLICA_TYPE

WORKERS = 16
NAME_LABEL = "training.kubeflow.org/job-name"


@dataclass
class Starting:
    """A PyTorchJob whose pods do not all run yet; `waits_for` names these."""

    metadata: dict[str, Any]
    replicas: int
    waits_for: set[str]
    conditions: list[dict[str, Any]] = field(default_factory=list)
    """Those that are told."""


class Operator:
    """Of one cluster; `pace` is PyTorchJobs a second, 0 for no limit."""

    def __init__(self, server: Api, nodes: int, trainers: int):
        self._server = server
        self._addresses = {key_of(n): address_of(n) for n in range(trainers)}
        self._nodes = itertools.cycle(range(nodes))
        self._new: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self._starting: dict[tuple[str, str], Starting] = {}
        """By namespace and name."""
        self._run: asyncio.Queue[Starting] = asyncio.Queue()
        """Those whose pods all run, which is to be told."""
        self.pace = 0.0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())
            group.create_task(self._follow_pods())
            group.create_task(self._tell_running())
            async for event in self._server.watch(PYTORCH_JOB.resource.path):
                if event["type"] == "ADDED":
                    self._new.put_nowait(event["object"])

    async def _work(self) -> None:
        while True:
            async with self._turn:
                job = await self._new.get()
                pause = 0.0
                while self.pace and pause < 1 / self.pace:
                    await asyncio.sleep(0.02)  # and look again: the pace may have changed
                    pause += 0.02
            await self._start(job)

    async def _start(self, job: dict[str, Any]) -> None:
        meta = job["metadata"]
        place = f"/api/v1/namespaces/{meta['namespace']}"
        address = self._addresses.get(f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}")
        replicas = job["spec"]["pytorchReplicaSpecs"][REPLICA_TYPE]["replicas"]
        made = [pieces(job, index, f"node-{next(self._nodes)}") for index in range(replicas)]
        starting = Starting(meta, replicas, {pod["metadata"]["name"] for _, pod in made})
        self._starting[meta["namespace"], meta["name"]] = starting
        for service, pod in made:
            if address is not None:
                pod["metadata"]["annotations"] = {ADDRESS: address}
            await self._server.send("POST", f"{place}/services", json.dumps(service).encode())
            await self._server.send("POST", f"{place}/pods", json.dumps(pod).encode())
        await self._tell(starting, "Created")
        self._look(starting)

    async def _follow_pods(self) -> None:
        async for event in self._server.watch(PODS):
            pod = event["object"]
            meta = pod["metadata"]
            starting = self._starting.get((meta["namespace"], meta["labels"][NAME_LABEL]))
            if starting is not None and pod["status"].get("phase") == "Running":
                starting.waits_for.discard(meta["name"])
                self._look(starting)

    def _look(self, starting: Starting) -> None:
        """Whether all its pods run, and nothing else is still to be told before that."""
        meta = starting.metadata
        ready = starting.conditions and not starting.waits_for
        if ready and self._starting.pop((meta["namespace"], meta["name"]), None) is not None:
            self._run.put_nowait(starting)

    async def _tell_running(self) -> None:
        while True:
            await self._tell(await self._run.get(), "Running")

    async def _tell(self, starting: Starting, what: str) -> None:
        meta, now = starting.metadata, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": what, "status": "True", "reason": f"PyTorchJob{what}",
            "message": f"PyTorchJob {meta['name']} is {what.lower()}.",
            "lastTransitionTime": now, "lastUpdateTime": now,
        }  # fmt: skip
        counted = {"active": starting.replicas} if what == "Running" else {}
        status = {
            "conditions": [*starting.conditions, condition],
            "replicaStatuses": {REPLICA_TYPE: counted},
            "startTime": (starting.conditions or [condition])[0]["lastTransitionTime"],
        }
        path = f"/apis/kubeflow.org/v1/namespaces/{meta['namespace']}/pytorchjobs/{meta['name']}/status"
        await self._server.send("PATCH", path, json.dumps({"status": status}).encode(), MERGE_PATCH)
        starting.conditions.append(condition)


def pieces(job: dict[str, Any], index: int, node: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(Service, pod) of one replica, named and labelled as the real operator does."""
    meta = job["metadata"]
    name = f"{meta['name']}-{REPLICA_TYPE.lower()}-{index}"
    template = job["spec"]["pytorchReplicaSpecs"][REPLICA_TYPE]["template"]
    own = {
        PYTORCH_JOB.index_label: str(index),
        NAME_LABEL: meta["name"],
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/replica-type": REPLICA_TYPE.lower(),
    }
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {"name": name, "ownerReferences": [owner]}
    labels = {**(template["metadata"].get("labels") or {}), **own}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "labels": own},
        "spec": {"clusterIP": "None", "selector": own, "ports": [{"name": "pytorchjob-port", "port": 23456}]},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], **metadata, "labels": labels},
        "spec": {**template["spec"], "nodeName": node, "restartPolicy": "Never"},
    }
    return service, pod


async def main(kubeconfig: Path, nodes: int, trainers: int) -> None:
    async with api(kubeconfig) as server:
        operator = Operator(server, nodes, trainers)
        loop = asyncio.get_running_loop()
        working = asyncio.ensure_future(operator.run())

        def listen() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(setattr, operator, "pace", float(line))
            loop.call_soon_threadsafe(working.cancel)

        threading.Thread(target=listen, daemon=True).start()
        try:
            await working
        except asyncio.CancelledError:
            return


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
