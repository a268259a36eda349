"""The controller is killed twenty times while fifty jobs start, stop, suspend, fail and are deleted; and,
while a few do, after each of its writes, be they PyTorchJobs or TrainJobs that it makes.

The control plane is real, and so are the controllers and their ends; pods are fake_pods.py's. What comes of
the jobs must be what comes of them when nobody kills anything.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import forked_controller, trainer, training_operator, trainingjobs
from tests.cluster.control_plane import start_control_plane
from tests.cluster.fake_pods import End, FakePods, Life, make_node
from tests.cluster.kubectl import Kubectl
from tests.cluster.site import Site
from waiting import wait_until_async

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.cluster import HoldfastError, NotFound
from holdfast_controller.kube.connection import MERGE_PATCH, Connection, Document, connect
from holdfast_controller.kube.pieces import PODS, SELECTOR
from holdfast_controller.kube.reflector import uid_of
from holdfast_controller.kube.resource import JOBS, job_path, jobs_path
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600)]
CRD = Path(__file__).parents[2] / "helm" / "holdfast" / "templates" / "crd.yaml"
SETTINGS = {"defaultImage": "none:1", "defaultClaim": "runs"}
TRAIN_JOBS = "written-train"
"""The namespace whose attempts are TrainJobs; those of others are PyTorchJobs."""
LEASE = "kills"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{LEASE}"
CONFIG_MAPS = "/api/v1/configmaps"
KILLS = 20
SEED = int(os.environ.get("KILL_SEED", "20261121"))
"""Printed with a failure; set KILL_SEED to see the same choices again."""
PATIENCE = 600.0

JOBS_OF = {"plain": 18, "pair": 6, "taken": 6, "broken": 6, "pause": 8, "gone": 6}
"""Fifty in all, by what becomes of them."""
EXPECTED = {
    "plain": ("Succeeded", 0, 0, ["Finished"]),
    "pair": ("Succeeded", 0, 0, ["Finished"]),
    "taken": ("Succeeded", 0, 1, ["Disrupted", "Finished"]),
    "broken": ("Failed", 1, 0, ["Failed"]),
    "pause": ("Succeeded", 0, 0, ["Suspended", "Finished"]),
}
"""Phase, failures, disruptions, and the verdict of every attempt."""


def life(job: str, attempt: int) -> Life:
    kind = job.split("-")[0]
    first = {"taken": End.EVICTED, "broken": End.FAILED, "pause": End.NEVER, "gone": End.NEVER}
    return Life(first.get(kind, End.FINISHED) if attempt == 1 else End.FINISHED)


@dataclass
class Story:
    """Jobs of one namespace, what their users do, and the controllers that come and go."""

    kubectl: Kubectl
    connection: Connection
    pods: FakePods
    namespace: str
    directory: Path
    kills: int = 0
    _controllers: list[ForkServerProcess] = field(default_factory=list)

    # --------------------------------------------------------------- controllers

    def start(self, *, dies_writing: bool = False) -> tuple[ForkServerProcess, Path]:
        settings = self.directory / "jobs.yaml"
        settings.write_text(yaml.safe_dump({**SETTINGS, "kind": self.pods.kind.resource.kind}))
        identity = f"{self.namespace}-{len(self._controllers)}"
        log = self.directory / f"{identity}.log"
        log.touch()
        process = forked_controller.start(
            self.kubectl.kubeconfig, settings, identity, LEASE, log, dies_writing=dies_writing
        )
        self._controllers.append(process)
        return process, log

    async def leads(self, process: ForkServerProcess, log: Path) -> None:
        def it_does() -> bool:
            assert process.is_alive(), log.read_text()[-3000:]
            return forked_controller.LEADS in log.read_text()

        await wait_until_async(it_does, "the controller to lead", PATIENCE)

    async def kill(self, process: ForkServerProcess) -> None:
        """With SIGKILL; its lease goes too, or each would wait it out."""
        process.kill()
        await asyncio.to_thread(process.join)
        with suppress(NotFound):
            await self.connection.delete(LEASES)

    async def end_all(self) -> None:
        for process in self._controllers:
            if process.is_alive():
                await self.kill(process)

    async def storm(self, rng: random.Random) -> None:
        """Kill each controller at some moment, most of them while they act."""
        while self.kills < KILLS:
            process, log = self.start()
            if rng.random() < 0.8:
                await self.leads(process, log)
            await asyncio.sleep(rng.uniform(0, 0.8))  # the moment is what is drawn
            await self.kill(process)
            self.kills += 1

    async def die_writing(self) -> None:
        """One controller after the other, each killed by what it writes first."""
        while True:
            process, log = self.start(dies_writing=True)
            await asyncio.to_thread(process.join)
            assert process.exitcode == -signal.SIGKILL, log.read_text()[-3000:]
            await self.kill(process)
            self.kills += 1

    def last_writes(self) -> set[str]:
        """What those who died writing had written: `METHOD resource`, with its subresource if it has one."""
        text = "\n".join(path.read_text() for path in self.directory.glob("*.log"))
        namespace = f"/namespaces/{self.namespace}/"
        pattern = f"{forked_controller.DIES}(\\w+) \\S*{namespace}(\\w+)(?:/[^/]+(/\\w+)?)?$"
        return {"".join((method, " ", *rest)) for method, *rest in re.findall(pattern, text, re.MULTILINE)}

    # --------------------------------------------------------------------- users

    async def use(self, name: str, after_kills: int) -> None:
        """What the user of one job does, from its submission on."""
        kind = name.split("-")[0]
        await wait_until_async(lambda: self.kills >= after_kills, f"{after_kills} kills", PATIENCE * 2)
        spec = {
            "command": ["python", "train.py"],
            "replicas": 2 if kind == "pair" else 1,
            "retries": {"failures": 0},
            "graceSeconds": 5,
        }
        job = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        uid = uid_of(await self.connection.post(jobs_path(self.namespace), job))
        path = job_path(self.namespace, name)
        if kind in ("gone", "pause"):
            await wait_until_async(lambda: self.pods.runs(uid, 1), f"{name} to run", PATIENCE)
        if kind == "gone":
            await self.connection.delete(path)
        if kind == "pause":
            await self.connection.patch(path, {"spec": {"suspend": True}}, MERGE_PATCH)

            async def suspended() -> bool:
                found = await self.connection.get(path)
                return (found.get("status") or {}).get("phase") == "Suspended"

            await wait_until_async(suspended, f"{name} to be suspended", PATIENCE)
            await self.connection.patch(path, {"spec": {"suspend": False}}, MERGE_PATCH)

    # ----------------------------------------------------------------- the result

    async def items(self, path: str, **query: str) -> list[Document]:
        found = await self.connection.get(path, **query)
        items: list[Document] = found["items"]
        return [item for item in items if item["metadata"]["namespace"] == self.namespace]

    async def names(self, path: str) -> list[str]:
        """Of what is ours of one kind."""
        return sorted(item["metadata"]["name"] for item in await self.items(path, labelSelector=SELECTOR))

    async def outcomes(self) -> dict[str, Any]:
        """Phase, failures, disruptions and verdicts of every job."""
        found = {}
        for job in await self.items(JOBS):
            status = job.get("status") or {}
            verdicts = [record.get("verdict") for record in status.get("attempts", [])]
            counts = (status.get("failures"), status.get("disruptions"))
            found[job["metadata"]["name"]] = (status.get("phase"), *counts, verdicts)
        return found

    async def ends(self) -> dict[str, Any]:
        """The outcomes, once every job has one and nothing but last attempts is left."""
        seen: dict[str, Any] = {}

        async def over() -> bool:
            seen.clear()
            seen.update(await self.outcomes())
            return all(one[0] in ("Succeeded", "Failed") for one in seen.values()) and not any(
                name.startswith("gone") for name in seen
            )

        try:
            await wait_until_async(over, "all jobs to end", PATIENCE)
        except AssertionError as error:
            logs = "\n".join(path.read_text()[-1500:] for path in self.directory.glob("*.log"))
            raise AssertionError(f"{error}\n{seen}\n{logs[-6000:]}") from None
        kind = self.pods.kind
        last = sorted(f"{name}-{len(outcome[3])}" for name, outcome in seen.items())
        pods = sorted(name for name in last for _ in range(2 if name.startswith("pair") else 1))
        for what, expected in (*((path, last) for path in made_of(kind)), (PODS, pods)):

            async def as_expected(what: str = what, expected: list[str] = expected) -> bool:
                names = await self.names(what)
                return (sorted(map(attempt_of_pod, names)) if what == PODS else names) == expected

            try:
                await wait_until_async(as_expected, f"{what} of last attempts alone", PATIENCE)
            except AssertionError as error:
                there = await self.names(what)
                raise AssertionError(f"{error}\ntoo many: {set(there) - set(expected)}") from None
        return dict(sorted(seen.items()))

    async def clear(self) -> None:
        """Delete all jobs: whatever is theirs goes too."""
        for name in await self.outcomes():
            await self.connection.delete(job_path(self.namespace, name))

        async def nothing() -> bool:
            if await self.items(JOBS):
                return False
            return not any([await self.names(what) for what in (*made_of(self.pods.kind), PODS)])

        await wait_until_async(nothing, "no orphan to be left", PATIENCE)


def made_of(kind: AttemptKind) -> tuple[str, ...]:
    """The paths of all that is made for an attempt, beside its pods."""
    return kind.resource.path, CONFIG_MAPS, *(one.path for one in kind.beside)


def attempt_of_pod(name: str) -> str:
    return re.sub("-(worker|node)-.*", "", name)


@asynccontextmanager
async def story(kubectl: Kubectl, namespace: str, directory: Path) -> AsyncIterator[Story]:
    """Told in the block; its controllers end with it."""
    connection = await connect(kubectl.kubeconfig, per_second=1000, burst=1000)
    pods = FakePods(connection, life, TRAIN_JOB if namespace == TRAIN_JOBS else PYTORCH_JOB)
    playing = asyncio.create_task(pods.run())
    told = Story(kubectl, connection, pods, namespace, directory)
    try:
        await make_node(connection)
        yield told
        assert not playing.done(), playing.exception()
    finally:
        with suppress(HoldfastError):
            await told.end_all()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await connection.close()


def test_killed_at_any_moment_and_after_each_write_it_ends_as_if_it_had_not_been(
    short_lived: Site, tmp_path: Path
) -> None:
    print(f"KILL_SEED={SEED}")
    kubectl = start_control_plane(short_lived).kubectl
    crds = (yaml.safe_load(CRD.read_text()), training_operator.crd(kubectl))
    trainingjobs.install(kubectl, *crds, namespaces=("calm", "stormy", "written", TRAIN_JOBS))
    trainer.serve_crds(kubectl)
    names = [f"{kind}-{number}" for kind, count in JOBS_OF.items() for number in range(count)]

    async def calm() -> dict[str, Any]:
        async with story(kubectl, "calm", tmp_path) as told:
            process, log = told.start()
            await told.leads(process, log)
            await asyncio.gather(*(told.use(name, 0) for name in names))
            ends = await told.ends()
            await told.clear()
        assert told.pods.violations == []
        return ends

    async def stormy() -> dict[str, Any]:
        rng = random.Random(SEED)
        when = {name: rng.randrange(KILLS - 3) for name in names}
        async with story(kubectl, "stormy", tmp_path) as told:
            async with asyncio.TaskGroup() as group:
                group.create_task(told.storm(rng))
                using = [group.create_task(told.use(name, when[name])) for name in names]
                # Users who wait for what no controller does any more would wait for ever.
                await wait_until_async(lambda: told.kills == KILLS, "the last kill", PATIENCE * 3)
                process, log = told.start()
                await told.leads(process, log)
            assert all(one.done() for one in using)
            ends = await told.ends()
            await told.clear()
        assert told.pods.violations == []
        assert len(told.pods.started) == len(set(told.pods.started))
        return ends

    async def written(namespace: str) -> dict[str, Any]:
        async with story(kubectl, namespace, tmp_path) as told, asyncio.TaskGroup() as group:
            dying = group.create_task(told.die_writing())
            await asyncio.gather(*(told.use(f"{kind}-0", 0) for kind in JOBS_OF))
            ends = await told.ends()
            await told.clear()
            made = {path.rpartition("/")[2] for path in made_of(told.pods.kind)}
            attempts = told.pods.kind.resource.path.rpartition("/")[2]
            assert told.last_writes() >= {
                *(f"POST {one}" for one in made),
                f"DELETE {attempts}",
                "PATCH trainingjobs",
                "PATCH trainingjobs/status",
            }
            dying.cancel()
        assert told.pods.violations == []
        assert len(told.pods.started) == len(set(told.pods.started))
        return ends

    expected = {name: EXPECTED[name.split("-")[0]] for name in sorted(names) if not name.startswith("gone")}
    assert asyncio.run(calm()) == expected
    assert asyncio.run(stormy()) == expected
    few = {name: outcome for name, outcome in expected.items() if name.endswith("-0")}
    for namespace in ("written", TRAIN_JOBS):
        assert asyncio.run(written(namespace)) == few
