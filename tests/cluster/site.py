"""Where one cluster keeps its things, and which names and addresses it takes on this machine.

Everything below `state` belongs to one life of the cluster and is erased when it goes down. `images`
holds containerd's and BuildKit's content; it is a cache and stays, so that the next start is quick.
Names and subnets follow from the cluster's name alone: two clusters of different names do not meet.
"""

from __future__ import annotations

import ipaddress
import os
import re
import uuid
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from tests.cluster.errors import ClusterError

DEFAULT_NAME = "dev"

MARK = "HOLDFAST_CLUSTER"
"""Environment name that every process of a cluster carries; its value is the cluster's state directory."""


def cache_directory() -> Path:
    """`HOLDFAST_CACHE`, else `holdfast` in the user's cache directory."""
    named = os.environ.get("HOLDFAST_CACHE")
    if named:
        return Path(named).resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").resolve() / "holdfast"


NODE_MARK = "HOLDFAST_CLUSTER_NODE"
"""Environment name that says which of the cluster's nodes a process belongs to; its value is the number."""

MOST_NODES = 4


@dataclass(frozen=True)
class Site:
    """The places of one node of a cluster, and of the cluster itself. Make it with `site()`."""

    name: str
    home: Path
    number: int = 1
    """The first node also runs the control plane; `node()` has the places of the others."""

    def node(self, number: int) -> Site:
        """The places of another node of the same cluster. Raises ClusterError where there is no room."""
        if not 1 <= number <= MOST_NODES:
            raise ClusterError(f"there is no node {number}: a cluster has 1 to {MOST_NODES}, numbered from 1")
        return replace(self, number=number)

    @property
    def state(self) -> Path:
        """The cluster's; every process of every node carries it as its mark."""
        return self.home / "state"

    @property
    def node_name(self) -> str:
        return self.name if self.number == 1 else f"{self.name}-{self.number}"

    @property
    def node_state(self) -> Path:
        """This node's own files."""
        return self.state if self.number == 1 else self.state / self.node_name

    @property
    def images(self) -> Path:
        """What containerd and BuildKit keep. Of the further nodes it goes with the cluster."""
        return self.home / "images" if self.number == 1 else self.node_state / "images"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def kubeconfig(self) -> Path:
        """The cluster administrator's."""
        return self.state / "admin.kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        return self.node_state / "containerd.sock"

    @property
    def buildkit_socket(self) -> Path:
        return self.state / "buildkit.sock"

    @property
    def cgroup(self) -> str:
        """Name of the cgroup, below each hierarchy's root, that all pods and builds of the node live in.

        Two kubelets below one would end each other's pods.
        """
        return f"holdfast-{self.node_name}"

    @property
    def link(self) -> str:
        """The host's end of the cable to the node; at most 15 characters."""
        return f"hf-{zlib.crc32(self.name.encode()):08x}" + ("" if self.number == 1 else f"-{self.number}")

    @property
    def network(self) -> ipaddress.IPv4Network:
        """A /16 for the nodes, their pods and Services."""
        return ipaddress.IPv4Network(f"10.{200 + zlib.crc32(self.name.encode()) % 50}.0.0/16")

    def _part(self, prefix: int, index: int) -> ipaddress.IPv4Network:
        return list(self.network.subnets(new_prefix=prefix))[index]

    @property
    def pods(self) -> ipaddress.IPv4Network:
        """Of all nodes."""
        return self._part(18, 0)

    @property
    def node_pods(self) -> ipaddress.IPv4Network:
        return self._part(20, self.number - 1)

    @property
    def cable(self) -> ipaddress.IPv4Network:
        """Two addresses: the host's and the node's."""
        return self._part(30, 4096 + self.number - 1)

    @property
    def services(self) -> ipaddress.IPv4Network:
        return self._part(18, 2)

    @property
    def host_address(self) -> str:
        return str(self.cable[1])

    @property
    def node_address(self) -> str:
        return str(self.cable[2])

    @property
    def dns_address(self) -> str:
        return str(self.services[10])


def site(name: str) -> Site:
    """The places of the cluster called `name`. Raises ClusterError for a name that is no DNS label."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", name):
        raise ClusterError(
            f"{name!r} is no name for a cluster: at most 20 lower-case letters, digits and dashes, "
            "beginning with a letter"
        )
    return Site(name, cache_directory() / "clusters" / name)


def site_apart(kind: str) -> Site:
    """One whose name begins with `kind`, and whose network no other cluster here has: there are but fifty."""
    taken = {other.network for other in (site(DEFAULT_NAME), *sites())}
    while True:
        found = site(f"{kind}-{uuid.uuid4().hex[:8]}")
        if found.network not in taken:
            return found


def sites() -> list[Site]:
    """All clusters that are up, or that a crash has left half up."""
    return [Site(path.parent.name, path.parent) for path in cache_directory().glob("clusters/*/state")]
