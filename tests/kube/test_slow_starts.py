"""What is told of a pod that has its node and does not start, as a real cluster told it.

The documents in captured_events are those of pods that were made so that they could not start; a server
over HTTP plays the apiserver that has them.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile
from structlog.testing import capture_logs
from waiting import wait_until_async

from holdfast_controller.cluster import AttemptObservation, Event
from holdfast_controller.jobs import Metadata, Spec, TrainingJob, Verdict
from holdfast_controller.kube.connection import Connection, Document
from holdfast_controller.kube.inquiry import AGAIN_SECONDS, SPEAKERS, Inquiry
from holdfast_controller.kube.observation import attempt_observation
from holdfast_controller.kube.pending import creating
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.slow_starts import SLOW_SECONDS, slow_starts
from holdfast_controller.pod_template import attempt_labels
from holdfast_controller.policy.slow_start import SlowStart, slow_start
from holdfast_controller.pytorchjobs import PYTORCH_JOB

CAPTURED = Path(__file__).with_name("captured_events")
Look = Callable[[], Awaitable[None]]
JOB = TrainingJob(
    metadata=Metadata(name="gpt", namespace="team", uid="job-1"), spec=Spec(command=["python"], replicas=2)
)
STORAGE = "the node does not get the volume of storage.claim: see whether the storage and its driver on the "
SAID = {
    "configmap-gone": (
        'FailedMount: MountVolume.SetUp failed for volume "config" : configmap "gpt-1" not found; what the '
        "pod mounts is gone: suspend and resume the job, and it is made anew"
    ),
    "image-pull-fails": (
        'ImagePullBackOff: Back-off pulling image "10.255.255.1/acme/train:1": ErrImagePull: failed to pull'
    ),
    "no-attacher": (
        'FailedAttachVolume: AttachVolume.Attach failed for volume "disk" : timed out waiting for '
        f"external-attacher of disks.example.com CSI driver to attach volume disk; {STORAGE}node are up"
    ),
    "no-driver-on-the-node": (
        'FailedMount: MountVolume.MountDevice failed for volume "disk2" : kubernetes.io/csi: '
        "attacher.MountDevice failed to create newCsiDriverClient: driver name share.example.com not found "
        "in the list of registered CSI drivers; the node has no driver share.example.com: install it there, "
        "or name a claim of another storage class (storage.claim)"
    ),
    "no-nfs-on-the-node": (
        'FailedMount: MountVolume.SetUp failed for volume "nfs" : mount failed: exit status 32 Mounting '
        "command: mount Mounting arguments: -t nfs 10.255.255.1:/runs /var/lib/kubelet/pods/1729358b"
    ),
    "no-such-path": (
        'FailedMount: MountVolume.SetUp failed for volume "data" : hostPath type check failed: /no/such is '
        f"not a directory; {STORAGE}node are up"
    ),
    "no-such-runtime": (
        "FailedCreatePodSandBox: Failed to create pod sandbox: rpc error: code = Unknown desc = failed to "
        'get sandbox runtime: no runtime for "nvidia" is configured; the container runtime of the node does '
        "not know nvidia: set it up there, or take the node out"
    ),
    "secret-missing": (
        'FailedMount: MountVolume.SetUp failed for volume "secret" : secret "keys" not found; make the '
        "secret keys in the job's namespace"
    ),
    "slow-pull": (
        'Pulling: Pulling image "127.0.0.1:5999/acme/train:1"; the node is fetching the image: wait; it is '
        "quick where the node has it already"
    ),
}


def captured(name: str, index: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The pod, as one of the job's, and its Events."""
    document = json.loads((CAPTURED / f"{name}.json").read_text(encoding="utf-8"))
    pod, events = document["pod"], document["events"]
    pod["metadata"] |= {
        "resourceVersion": "5",
        "labels": {**attempt_labels(JOB, 1), PYTORCH_JOB.index_label: str(index)},
    }
    if index:
        pod["metadata"] |= {"uid": f"pod-{index}", "name": f"gpt-1-worker-{index}"}
    return pod, events


@dataclass
class World:
    """A cluster of such pods, and whoever looks at them, by a clock that a test moves."""

    pods: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)
    refused: bool = False
    asked: list[str] = field(default_factory=list)
    now: float = 1000.0
    changes: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)

    async def list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self.watch(request)
        items = self.pods if request.path == PODS else []
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def watch(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while request.path == PODS:
            change = {"type": "MODIFIED", "object": await self.changes.get()}
            await answer.write(json.dumps(change).encode() + b"\n")
        await asyncio.Event().wait()
        return answer

    async def tell(self, request: web.Request) -> web.Response:
        if self.refused:
            return web.json_response({"reason": "Forbidden", "message": "may not list events"}, status=403)
        uid = request.query["fieldSelector"].removeprefix("involvedObject.uid=")
        self.asked.append(uid)
        items = [event for event in self.events if event["involvedObject"]["uid"] == uid]
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})


@asynccontextmanager
async def known(world: World, directory: Path) -> AsyncIterator[tuple[Connection, Pieces]]:
    routes = [web.get(path, world.list_or_watch) for path in (PODS, PYTORCH_JOB.resource.path)]
    routes.append(web.get("/api/v1/namespaces/team/events", world.tell))
    async with connected(routes, directory) as connection:
        pieces = Pieces(connection)
        async with meanwhile(pieces.run()):
            await pieces.synced()
            yield connection, pieces


@asynccontextmanager
async def watched(world: World, directory: Path) -> AsyncIterator[tuple[Look, Inquiry[SlowStart], Pieces]]:
    async with known(world, directory) as (connection, pieces):
        slow = slow_starts(connection, pieces, lambda: world.now)
        with slow.followed() as own:
            yield partial(slow.look, own), slow, pieces


async def after_a_look(pod: dict[str, Any], events: list[dict[str, Any]], place: Path) -> AttemptObservation:
    """What is seen of the pod once it was asked why it does not start."""
    world = World([pod], events)
    async with watched(world, place) as (look, slow, pieces):
        world.now += SLOW_SECONDS
        await look()
        return attempt_observation(1, 2, {"metadata": {}}, pieces.pods_of(JOB, 1), slow=slow.known)


@pytest.mark.parametrize("name", sorted(path.stem for path in CAPTURED.glob("*.json")))
def test_a_job_says_why_its_pod_does_not_start_and_what_would_help(name: str, tmp_path: Path) -> None:
    pod, events = captured(name)

    seen = asyncio.run(after_a_look(pod, events, tmp_path))
    assert seen.waiting.startswith(f"replica 0: {SAID[name]}")


def test_a_warning_of_another_matter_does_not_hide_why_a_pod_does_not_start() -> None:
    """Nodes warn of their DNS settings again and again."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    mount = Event(now, "Warning", "FailedMount", "MountVolume.SetUp failed")
    found = slow_start([mount, Event(now, "Warning", "DNSConfigForming", "too many nameservers")])
    assert found is not None
    assert found.reason.startswith("FailedMount: MountVolume.SetUp failed")


def test_a_job_says_which_container_of_a_webhooks_its_own_waits_for(tmp_path: Path) -> None:
    """One that waits for a vault that is sealed held its GPUs, and nothing was said of it."""
    pod, events = captured("slow-pull")
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "PodInitializing"}}
    state = {"running": {"startedAt": "2026-11-22T08:40:24Z"}}
    pod["status"]["initContainerStatuses"] = [{"name": "vault-agent-init", "state": state}]
    events.append({**events[-1], "reason": "Started", "message": "Container started"})

    seen = asyncio.run(after_a_look(pod, events, tmp_path))
    assert seen.waiting == (
        "replica 0: init container vault-agent-init is not done; an admission webhook has put "
        "vault-agent-init into the pod: see whoever runs that, or have it leave the pods of jobs alone"
    )
    assert seen.replicas[0].stuck is None, "it may be done any moment"


def test_an_nfs_mount_is_told_with_its_end_and_its_remedy(tmp_path: Path) -> None:
    pod, events = captured("no-nfs-on-the-node")

    async def story() -> None:
        world = World([pod], events)
        async with watched(world, tmp_path) as (look, slow, _):
            world.now += SLOW_SECONDS
            await look()
            [start] = slow.known.values()
            assert "unknown filesystem type 'nfs'" in start.reason
            assert start.reason.endswith(
                "; the node lacks the program that mounts such volumes (nfs-common for NFS): install it there"
            )

    asyncio.run(story())


def test_a_pod_is_asked_about_once_it_is_slow_and_again_only_after_a_while(tmp_path: Path) -> None:
    pod, events = captured("secret-missing")
    uid = pod["metadata"]["uid"]

    async def story() -> None:
        world = World([pod], events)
        async with watched(world, tmp_path) as (look, slow, pieces):
            world.now += SLOW_SECONDS - 1
            await look()
            assert world.asked == []

            changes = pieces.changes()
            told = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(0)
            world.now += 1
            await look()
            await look()
            assert world.asked == [uid]
            assert await told == "team/gpt"
            await changes.aclose()

            # Somebody makes the secret: it goes on to its image, and what was told before counts no more.
            _, pulling = captured("slow-pull")
            last = copy.deepcopy(pulling[-1])
            last["involvedObject"]["uid"], last["lastTimestamp"] = uid, "2026-11-22T09:00:00Z"
            world.events.append(last)
            world.now += AGAIN_SECONDS
            await look()
            assert world.asked == [uid, uid]
            assert slow.known[uid].reason.startswith("Pulling: ")
            assert not slow.known[uid].fails

            # Its container runs: nothing is left to be asked, and nothing of it is kept.
            started = copy.deepcopy(pod)
            started["metadata"]["resourceVersion"] = "6"
            started["status"]["containerStatuses"][0]["state"] = {"running": {}}
            world.changes.put_nowait(started)
            await wait_until_async(lambda: not slow.known, "what was told of it to be forgotten")
            world.now += AGAIN_SECONDS
            await look()
            assert world.asked == [uid, uid]

    asyncio.run(story())


def test_of_a_pod_that_goes_on_waiting_nothing_older_is_kept(tmp_path: Path) -> None:
    """Thousands may wait: what is asked about is what the copy of all pods has, and no state of before."""
    pod, _ = captured("secret-missing")
    asked: list[Document] = []

    async def ask(_: Connection, document: Document) -> None:
        asked.append(document)

    async def story() -> None:
        world = World([pod])
        async with known(world, tmp_path) as (connection, pieces):
            inquiry = Inquiry(
                connection, pieces, lambda its: [its.pods], concerns=creating, ask=ask, first_seconds=0
            )
            with inquiry.followed() as own:
                again = copy.deepcopy(pod)
                again["metadata"]["resourceVersion"] = "6"
                world.changes.put_nowait(again)

                def newest() -> Document:
                    [found] = pieces.pods.all()
                    return found

                await wait_until_async(
                    lambda: newest()["metadata"]["resourceVersion"] == "6", "its change to be heard"
                )
                await inquiry.look(own)
                [about] = asked
                assert about is newest()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("takes", "rest"),
    [
        pytest.param(0.002, 0.038, id="a small namespace"),
        pytest.param(0.4, 7.6, id="one with a hundred thousand Events"),
        pytest.param(60.0, AGAIN_SECONDS, id="no answer"),
    ],
)
def test_the_longer_an_answer_takes_the_less_often_is_asked(
    takes: float, rest: float, tmp_path: Path
) -> None:
    world, pauses = World([captured("secret-missing", index)[0] for index in (1, 2)]), list[float]()

    async def ask(_: Connection, document: Document) -> None:
        world.asked.append(document["metadata"]["uid"])
        world.now += takes

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def story() -> None:
        async with known(world, tmp_path) as (connection, pieces):
            inquiry = Inquiry(
                connection,
                pieces,
                lambda its: [its.pods],
                concerns=creating,
                ask=ask,
                first_seconds=0,
                clock=lambda: world.now,
                pause=pause,
            )
            with inquiry.followed() as own:
                await inquiry.look(own)
        assert len(world.asked) == 2
        assert pauses == pytest.approx([rest, rest])

    asyncio.run(story())


def test_of_a_large_gang_the_first_few_replicas_speak_for_all(tmp_path: Path) -> None:
    async def story() -> None:
        world = World([captured("secret-missing", index)[0] for index in reversed(range(1, 33))])
        async with watched(world, tmp_path) as (look, _, _pieces):
            world.now += SLOW_SECONDS
            await look()
            assert world.asked == [f"pod-{number}" for number in range(1, SPEAKERS + 1)]

    asyncio.run(story())


def test_who_may_not_read_events_is_told_so_once_and_jobs_go_on(tmp_path: Path) -> None:
    pod, events = captured("secret-missing")

    async def story() -> None:
        world = World([pod], events, refused=True)
        async with watched(world, tmp_path) as (look, slow, _):
            with capture_logs() as logs:
                for _again in range(3):
                    world.now += AGAIN_SECONDS
                    await look()
            assert [line["event"] for line in logs] == ["cannot read why it waits"]
            assert "may not list events" in logs[0]["error"]
            assert slow.known == {}

    asyncio.run(story())


def test_a_replica_that_cannot_start_gives_back_what_its_peer_holds(tmp_path: Path) -> None:
    """As one that finds no place; one that fetches its image is waited for."""

    async def story() -> None:
        for name, verdict in (("no-attacher", Verdict.UNSCHEDULABLE), ("slow-pull", None)):
            pod, events = captured(name)
            world = World([pod], events)
            async with watched(world, tmp_path) as (look, slow, pieces):
                world.now += SLOW_SECONDS
                await look()
                seen = attempt_observation(
                    1, 1, {"kind": "PyTorchJob", "metadata": {}}, pieces.pods_of(JOB, 1), slow=slow.known
                )
                assert seen.replicas[0].stuck == verdict

    asyncio.run(story())
