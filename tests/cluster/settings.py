"""What the whole machine has only once: remembered when the first cluster with a node starts, put back when
the last one goes down.

The kubelet sets some of the kernel's settings and does not start where it may not; forwarding is ours. Its
usual directory is needed as a place to mount on, inside the node; outside it stays empty.
"""

from __future__ import annotations

import json
from pathlib import Path

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
            beside.write_text(json.dumps({"settings": values, "made_kubelet": not KUBELET.exists()}))
            beside.rename(record)
        KUBELET.mkdir(exist_ok=True)


def restore_settings(site: Site) -> None:
    """Put back what held before, where no other cluster has a node.

    While one has, the directory must stay too: removing it takes away what others have mounted on it.
    """
    record = _record(site)
    if not record.exists():
        return
    with locked(record.with_suffix(".lock")):
        others = [other for other in sites() if other.name != site.name and (other.state / HAS_NODE).exists()]
        if others or not record.exists():
            return
        kept = json.loads(record.read_text())
        for name, value in kept["settings"].items():
            if (Path("/proc/sys") / name).read_text() != value:
                write_setting(name, value)
        if kept["made_kubelet"] and KUBELET.exists():
            KUBELET.rmdir()
        record.unlink()


def _record(site: Site) -> Path:
    return site.home.parent / "machine.json"


def _there(name: str) -> bool:
    return (Path("/proc/sys") / name).exists()
