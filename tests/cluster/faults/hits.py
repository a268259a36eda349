"""How a job is hit: each is a context that hits when it is entered, and mends what it broke when it is left.

Whoever enters one gives it the job and the number of the attempt that runs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import psutil
from tests.cluster import trainingjobs
from tests.cluster.component import on_node, running, start
from tests.cluster.controllers import wait_ready
from tests.cluster.faults.kinds import KIND
from tests.cluster.faults.world import PATIENCE, Document, Job, World, rank_of
from tests.cluster.images import ImageStore
from tests.cluster.machine import Machine
from tests.cluster.node import wait_node_ready
from tests.cluster.nodes import cut_power, join, restart_kubelet
from tests.cluster.site import MOST_NODES, Site
from waiting import wait_until

from holdfast_controller.kube.pod_state import index_of

Hit = Callable[[Job, int], AbstractContextManager[None]]
TAINT = "holdfast.dev/fault-suite=gone:NoExecute"
PRIORITY = "fault-suite"


def name_of(pod: Document) -> str:
    return str(pod["metadata"]["name"])


def site_of(world: World, pod: Document) -> Site:
    """The node on which a pod runs."""
    nodes = [world.site.node(number) for number in range(1, MOST_NODES + 1)]
    return next(node for node in nodes if node.node_name == pod["spec"]["nodeName"])


# ------------------------------------------------------------------ Kubernetes


@contextmanager
def evicted(job: Job, attempt: int) -> Iterator[None]:
    trainingjobs.evict(job.world.api, job.world.namespace, name_of(job.victim(attempt)))
    yield


@contextmanager
def drained(job: Job, attempt: int) -> Iterator[None]:
    node = job.victim(attempt)["spec"]["nodeName"]
    job.world.api.run(
        "drain", node, "--force", "--delete-emptydir-data", "--ignore-daemonsets",
        f"--timeout={PATIENCE:g}s", seconds=PATIENCE + 10,
    )  # fmt: skip
    try:
        yield
    finally:
        job.world.api.run("uncordon", node)


@contextmanager
def tainted(job: Job, attempt: int) -> Iterator[None]:
    node = job.victim(attempt)["spec"]["nodeName"]
    job.world.api.run("taint", "node", node, TAINT)
    try:
        yield
    finally:
        job.world.api.run("taint", "node", node, f"{TAINT}-")


@contextmanager
def preempted(job: Job, attempt: int) -> Iterator[None]:
    """A pod of higher priority asks for the room of one replica."""
    world, node = job.world, job.victim(attempt)["spec"]["nodeName"]
    world.api.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": PRIORITY},
            "value": 1000,
        }
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "urgent"},
        "spec": {
            "priorityClassName": PRIORITY,
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": world.cluster.busybox,
                    "command": ["sleep", "100000"],
                    "resources": {"requests": {"cpu": "1200m"}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
    world.api.apply(pod, namespace=world.namespace)
    try:
        yield
    finally:
        world.kubectl("delete", "pod", "urgent", "--grace-period=0", "--force")
        world.api.run("delete", "priorityclass", PRIORITY)


@contextmanager
def deleted(job: Job, attempt: int) -> Iterator[None]:
    job.world.kubectl("delete", "pod", name_of(job.victim(attempt)), "--wait=false")
    yield


@contextmanager
def deleted_by_force(job: Job, attempt: int) -> Iterator[None]:
    name = name_of(job.victim(attempt))
    job.world.kubectl("delete", "pod", name, "--wait=false", "--grace-period=0", "--force")
    yield


# ----------------------------------------------------------------------- ranks


def signalled(number: signal.Signals) -> Hit:
    """A signal to the process that trains, in one replica."""

    @contextmanager
    def hit(job: Job, attempt: int) -> Iterator[None]:
        rank_of(job.victim(attempt)).send_signal(number)
        yield

    return hit


def told_to_be(what: str) -> Hit:
    """A rank does itself what ends it, once: see train.py."""

    @contextmanager
    def hit(job: Job, attempt: int) -> Iterator[None]:
        pod = job.victim(attempt)
        rank = rank_of(pod)
        with job.told_to_be(what, str(index_of(pod))):
            wait_until(lambda: not rank.is_running(), f"the {what} rank to end", PATIENCE)
        yield

    return hit


# ----------------------------------------------------------------------- nodes


@contextmanager
def without_kubelet(job: Job, attempt: int) -> Iterator[None]:
    """Its pods train on, and nobody can reach them by way of Kubernetes."""
    world = job.world
    node = site_of(world, job.victim(attempt))
    for process in on_node(node, "kubelet"):
        process.kill()
    try:
        yield
    finally:
        kubelet = restart_kubelet(node)
        wait_node_ready(node.node_name, world.api, kubelet)
        _untainted(world, node)


@contextmanager
def without_power(job: Job, attempt: int) -> Iterator[None]:
    """The machine goes, and its provider takes the node's object away, as cloud controllers do."""
    world = job.world
    node = site_of(world, job.victim(attempt))
    cut_power(node)
    world.api.run("delete", "node", node.node_name)
    try:
        yield
    finally:
        join(node)


def _untainted(world: World, node: Site) -> None:
    def free() -> bool:
        return not world.api.get("node", node.node_name)["spec"].get("taints")

    wait_until(free, f"{node.node_name} to take pods again", PATIENCE)


@contextmanager
def room_for_one(job: Job, attempt: int) -> Iterator[None]:
    """Evicted where all nodes but one take no pods any more: half of the next gang finds a place."""
    with nothing_beside(job.world, {job.victim(attempt)["spec"]["nodeName"]}), evicted(job, attempt):
        yield


def without_image(*, everywhere: bool = False) -> Hit:
    """Evicted where one of both nodes has not got the image any more, or neither has, nor can get it."""

    @contextmanager
    def hit(job: Job, attempt: int) -> Iterator[None]:
        world, pods = job.world, job.pods(attempt)
        with ExitStack() as stack:
            stack.enter_context(nothing_beside(world, {pod["spec"]["nodeName"] for pod in pods}))
            for pod in pods if everywhere else [job.victim(attempt)]:
                stack.enter_context(_image_gone(world, site_of(world, pod)))
            stack.enter_context(evicted(job, attempt))
            yield

    return hit


@contextmanager
def _image_gone(world: World, node: Site) -> Iterator[None]:
    images = ImageStore(node, Machine.running(node).enter)
    kept = f"{world.image}-kept"  # or its layers would go too
    images.run("images", "tag", world.image, kept)
    images.run("images", "rm", world.image)
    try:
        yield
    finally:
        images.run("images", "tag", kept, world.image)
        images.run("images", "rm", kept)


@contextmanager
def nothing_beside(world: World, names: set[str]) -> Iterator[None]:
    """No other nodes than these take new pods."""
    nodes = {node["metadata"]["name"] for node in world.api.get("nodes")["items"]} - names
    for node in nodes:
        world.api.run("cordon", node)
    try:
        yield
    finally:
        for node in nodes:
            world.api.run("uncordon", node)


@contextmanager
def cut_off(job: Job, attempt: int) -> Iterator[None]:
    """Nothing goes between one pod and other nodes any more; its own node still sees it."""
    pod = job.victim(attempt)
    machine = Machine.running(site_of(job.world, pod))
    address = pod["status"]["podIP"]
    rules = [f"FORWARD -{way} {address} -j DROP" for way in "sd"]
    machine.run("\n".join(f"iptables -w -I {rule}" for rule in rules), "cutting a pod off")
    try:
        yield
    finally:
        machine.run("\n".join(f"iptables -w -D {rule}" for rule in rules), "mending the network")


# --------------------------------------------------------------- the cluster's


def restarted(name: str) -> Hit:
    """A part of the control plane is killed, and started again as it was."""

    @contextmanager
    def hit(job: Job, attempt: int) -> Iterator[None]:
        site = job.world.site
        [process] = running(site, name)
        command = process.cmdline()
        process.kill()
        with suppress(psutil.NoSuchProcess):
            process.wait(PATIENCE)
        start(site, name, command, prefix=Machine.running(site).enter)
        ready = ("get", "--raw=/readyz", "--request-timeout=2s")
        wait_until(lambda: job.world.api.attempt(*ready).returncode == 0, f"{name} to be back", PATIENCE)
        yield

    return hit


@contextmanager
def operator_killed(job: Job, attempt: int) -> Iterator[None]:
    api = job.world.api
    for namespace in KIND.operators:
        api.run("delete", "pods", f"-n={namespace}", "--all", "--grace-period=0", "--force", "--wait=false")
    for namespace, deployment in KIND.operators.items():
        wait_ready(api, namespace, deployment)
    yield


@contextmanager
def controller_killed(job: Job, attempt: int) -> Iterator[None]:
    job.world.kill_controller()
    job.world.start_controller()
    yield


def evicted_while(around: Callable[[World], AbstractContextManager[Any]]) -> Hit:
    """The pod is evicted while something else is down, which comes back when the next attempt has pods."""

    @contextmanager
    def hit(job: Job, attempt: int) -> Iterator[None]:
        with around(job.world), evicted(job, attempt):

            def started() -> bool:
                pods = job.pods(attempt + 1)
                return len(pods) == 2 and all(pod["status"].get("phase") == "Running" for pod in pods)

            wait_until(started, "the next attempt's pods to run", PATIENCE)
        yield

    return hit


@contextmanager
def without_dns(world: World) -> Iterator[None]:
    where = ("-n=kube-system", "deployment/coredns")
    world.api.run("scale", *where, "--replicas=0")
    wait_until(
        lambda: world.api.get("pods", "-n=kube-system", "-l=k8s-app=kube-dns")["items"] == [],
        "DNS to be down",
        PATIENCE,
    )
    try:
        yield
    finally:
        world.api.run("scale", *where, "--replicas=1")
        world.api.run("rollout", "status", *where, "--timeout=300s", seconds=310)
