"""A whole Kubernetes on this machine: up, down, status.

`up` makes a machine (namespaces), a control plane and a node inside it, CoreDNS and the Training Operator.
What it has begun when it fails, or when it is killed, `down` finds by the cluster's name alone; `up` begins
with the same clearing. Both hold the cluster's lock, so they never meet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import dns, images, training_operator
from tests.cluster.build import build, program
from tests.cluster.component import end_all, names_of, nodes_of
from tests.cluster.control_plane import ON_A_NODE, ControlPlane, start_control_plane
from tests.cluster.errors import ClusterError
from tests.cluster.images import ImageStore
from tests.cluster.kubectl import Kubectl
from tests.cluster.locks import locked
from tests.cluster.machine import Machine, erase, remove_outside
from tests.cluster.node import start_containerd, start_kubelet, start_proxy, wait_node_ready
from tests.cluster.nodes import join
from tests.cluster.room import CLUSTER, need_room
from tests.cluster.settings import restore_settings
from tests.cluster.site import Site
from tests.cluster.tools import COREDNS, KUBERNETES, SMALL, TRAINING_OPERATOR

ROLLOUT_SECONDS = 320
PUBLIC_BUSYBOX = "docker.io/library/busybox:1.36"


@dataclass(frozen=True)
class Cluster:
    """One that is up, as those who use it see it."""

    kubectl: Kubectl
    site: Site | None
    """None for a cluster that was not started here."""

    @property
    def is_up(self) -> bool:
        """True while its API answers."""
        return (
            self.kubectl.kubeconfig.exists()
            and self.kubectl.attempt("get", "--raw=/readyz", "--request-timeout=2s").returncode == 0
        )

    @property
    def busybox(self) -> str:
        """An image with a shell that its nodes have, or can pull."""
        return images.BUSYBOX if self.site else os.environ.get("BUSYBOX_IMAGE_UNDER_TEST", PUBLIC_BUSYBOX)


def cluster(site: Site) -> Cluster:
    """The cluster at `site`, which need not be up."""
    return Cluster(Kubectl(site.kubeconfig, program("kubectl")), site)


def named_cluster(kubeconfig: Path) -> Cluster:
    """The cluster that `kubeconfig` names. Raises ClusterError where it does not answer."""
    there = Cluster(Kubectl(kubeconfig, program("kubectl")), None)
    if not kubeconfig.exists():
        raise ClusterError(f"KUBECONFIG_UNDER_TEST={kubeconfig} is no file; unset it to start a cluster here")
    answer = there.kubectl.attempt("get", "--raw=/readyz", "--request-timeout=10s")
    if answer.returncode:
        raise ClusterError(
            f"the cluster of KUBECONFIG_UNDER_TEST={kubeconfig} does not answer: {answer.stderr}"
        )
    return there


def up(
    site: Site,
    *,
    nodes: int = 1,
    operator: bool = True,
    lost_seconds: int | None = None,
    say: Callable[[str], None] = print,
) -> Cluster:
    """Start it, or find it up already; nodes that are missing join. For `lost_seconds` see control_plane.py.

    Raises ClusterError for a number of nodes that no cluster has, CannotRunNode, NoRoom, MissingTool,
    BuildFailed, ComponentFailed; what was started ends before that.
    """
    wanted = [site.node(number) for number in range(1, site.node(nodes).number + 1)]
    for module in (SMALL, KUBERNETES, COREDNS):
        build(module)
    if operator:
        build(TRAINING_OPERATOR)
    with locked(site.home / "lock"):
        there = cluster(site)
        if not there.is_up:
            _clear(site)
            need_room(site.images, CLUSTER, "a cluster")
            try:
                with _timed("cluster", say):
                    _start(site, operator, lost_seconds, say)
            except BaseException:
                _clear(site, keep_logs=True)
                raise
        present = nodes_of(site)
        for node in wanted:
            if node.number not in present:
                with _timed(f"node {node.node_name}", say):
                    join(node)
    return there


def _start(site: Site, operator: bool, lost_seconds: int | None, say: Callable[[str], None]) -> None:
    with _timed("machine and containerd", say):
        machine = Machine.start(site)
        containerd, store = start_containerd(machine)
    with _timed("control plane", say):
        plane = start_control_plane(
            site,
            address=site.node_address,
            ports=ON_A_NODE,
            prefix=machine.enter,
            lost_seconds=lost_seconds,
        )
    with _timed("node", say):
        kubelet = start_kubelet(machine, plane)
        proxy = start_proxy(machine, plane)
        plane.components.extend([containerd, kubelet, proxy])
        _import_images(store, operator)
        wait_node_ready(site.node_name, plane.kubectl, kubelet)
    with _timed("DNS and operator" if operator else "DNS", say):
        plane.kubectl.apply(*dns.manifests(site))
        if operator:
            training_operator.install(plane.kubectl)
            _wait_deployment(plane, training_operator.NAMESPACE, training_operator.DEPLOYMENT)
        _wait_deployment(plane, dns.NAMESPACE, "coredns")
        if operator:
            training_operator.wait_until_asked(plane.kubectl)
    plane.check()


def _import_images(store: ImageStore, operator: bool) -> None:
    wanted = [images.pause(), images.busybox(), images.coredns()]
    store.add([*wanted, images.training_operator()] if operator else wanted)
    store.forget_replaced()


def _wait_deployment(plane: ControlPlane, namespace: str, name: str) -> None:
    done = plane.kubectl.attempt(
        "rollout", "status", f"--namespace={namespace}", f"deployment/{name}",
        f"--timeout={ROLLOUT_SECONDS}s", seconds=ROLLOUT_SECONDS + 10,
    )  # fmt: skip
    if done.returncode:
        pods = plane.kubectl.attempt("describe", "pods", f"--namespace={namespace}").stdout
        raise ClusterError(f"{name} does not become available: {done.stderr.strip()}\n{pods[-3000:]}")


def down(site: Site, *, purge: bool = False) -> None:
    """End it and leave nothing behind but the cache of images, and not that with `purge`.

    Fine where it is not up, or only half. Raises ComponentFailed where something does not end.
    """
    if not site.home.exists():
        return
    with locked(site.home / "lock"):
        _clear(site)
        if purge:
            erase(site.home)


def _clear(site: Site, *, keep_logs: bool = False) -> None:
    began = site.state.exists()
    end_all(site)
    if not began:
        return
    remove_outside(site)
    if keep_logs and site.logs.exists():
        erase(site.home / "failed-logs")
        site.logs.rename(site.home / "failed-logs")
    erase(site.state)
    restore_settings(site)


def status(site: Site) -> str:
    """A few words on what is there."""
    names = sorted({name for _, name in names_of(site)})
    if not names:
        return f"cluster {site.name} is down"
    state = "up" if cluster(site).is_up else "half up: `down` clears it"
    return f"cluster {site.name} is {state}: {', '.join(names)}\nkubeconfig {site.kubeconfig}"


@contextmanager
def _timed(what: str, say: Callable[[str], None]) -> Iterator[None]:
    began = time.monotonic()
    yield
    say(f"cluster: {what} ready in {time.monotonic() - began:.1f} s")
