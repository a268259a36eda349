"""Where one cluster keeps its things, and which names and addresses it takes on this machine.

Everything below `state` belongs to one life of the cluster and is erased when it goes down. `images`
holds containerd's and BuildKit's content; it is a cache and stays, so that the next start is quick.
Names and subnets follow from the cluster's name alone: two clusters of different names do not meet.
"""

from __future__ import annotations

import ipaddress
import os
import re
import zlib
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Site:
    """One cluster's places. Make it with `site()`."""

    name: str
    home: Path

    @property
    def state(self) -> Path:
        return self.home / "state"

    @property
    def images(self) -> Path:
        return self.home / "images"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def kubeconfig(self) -> Path:
        """The cluster administrator's."""
        return self.state / "admin.kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def buildkit_socket(self) -> Path:
        return self.state / "buildkit.sock"

    @property
    def cgroup(self) -> str:
        """Name of the cgroup, below each hierarchy's root, that all pods and builds live in."""
        return f"holdfast-{self.name}"

    @property
    def link(self) -> str:
        """The host's end of the cable to the node; at most 15 characters."""
        return f"hf-{zlib.crc32(self.name.encode()):08x}"

    @property
    def network(self) -> ipaddress.IPv4Network:
        """A /16 for the node, its pods and Services."""
        return ipaddress.IPv4Network(f"10.{200 + zlib.crc32(self.name.encode()) % 50}.0.0/16")

    def _part(self, prefix: int, index: int) -> ipaddress.IPv4Network:
        return list(self.network.subnets(new_prefix=prefix))[index]

    @property
    def pods(self) -> ipaddress.IPv4Network:
        return self._part(18, 0)

    @property
    def cable(self) -> ipaddress.IPv4Network:
        """Two addresses: the host's and the node's."""
        return self._part(30, 4096)

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


def sites() -> list[Site]:
    """All clusters that are up, or that a crash has left half up."""
    return [Site(path.parent.name, path.parent) for path in cache_directory().glob("clusters/*/state")]
