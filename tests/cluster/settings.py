"""What the whole machine has only once: remembered when the first cluster with a node starts, put back when
the last one goes down.

The kubelet sets some of the kernel's settings and does not start where it may not; forwarding is ours. Its
usual directory is needed as a place to mount on, inside the node; outside it stays empty.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.locks import locked
from tests.cluster.site import Site, sites

NAMES = (
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
KUBELET = Path("/var/lib/kubelet")
KUBELET_MARK = KUBELET / "made-by-holdfast-cluster"
"""Outside the node the directory holds this alone: one that is not empty nobody removes by mistake, which
would take away, silently, what is mounted on it."""
HAS_NODE = "has-node"
"""File in the state of a cluster that has a node."""


def write_setting(name: str, value: str) -> None:
    """Write one, below /proc/sys."""
    (Path("/proc/sys") / name).write_text(value)


def remember_settings(site: Site) -> None:
    """Keep what holds now, unless another cluster is up and has kept what held before it."""
    record = _record(site)
    with locked(record.with_suffix(".lock")):
        site.state.mkdir(parents=True, exist_ok=True)
        (site.state / HAS_NODE).touch()
        if not record.exists():
            values = {name: (Path("/proc/sys") / name).read_text() for name in NAMES if _there(name)}
            beside = record.with_suffix(".new")
            beside.write_text(json.dumps(values))
            beside.rename(record)
        if not KUBELET.exists():
            KUBELET.mkdir()
            KUBELET_MARK.touch()


def restore_settings(site: Site) -> None:
    """Put back what held before, where no other cluster has a node. Raises ClusterError."""
    record = _record(site)
    if not record.exists():
        return
    with locked(record.with_suffix(".lock")):
        others = [other for other in sites() if other.name != site.name and (other.state / HAS_NODE).exists()]
        if others or not record.exists():
            return
        for name, value in json.loads(record.read_text()).items():
            if (Path("/proc/sys") / name).read_text() != value:
                write_setting(name, value)
        record.unlink()
        if KUBELET_MARK.exists():
            KUBELET_MARK.unlink()
            _remove_empty(KUBELET)


def _remove_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError as error:
        raise ClusterError(
            f"{directory} was made for the cluster and is no longer empty: look what is in it, and remove it"
        ) from error


def _record(site: Site) -> Path:
    return site.home.parent / "machine.json"


def _there(name: str) -> bool:
    return (Path("/proc/sys") / name).exists()
