"""Settings of the kernel that belong to the whole machine: remembered when the first cluster starts, put
back when the last goes down.

The kubelet sets some of them itself and does not start where it may not; forwarding is ours.
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


def write_setting(name: str, value: str) -> None:
    """Write one, below /proc/sys."""
    (Path("/proc/sys") / name).write_text(value)


def remember_settings(site: Site) -> None:
    """Keep what holds now, unless another cluster is up and has kept what held before it."""
    record = _record(site)
    with locked(record.with_suffix(".lock")):
        if not record.exists():
            values = {name: (Path("/proc/sys") / name).read_text() for name in NAMES if _there(name)}
            beside = record.with_suffix(".new")
            beside.write_text(json.dumps(values))
            beside.rename(record)


def restore_settings(site: Site) -> None:
    """Put back what held before, where no other cluster is up."""
    record = _record(site)
    if not record.exists():
        return
    with locked(record.with_suffix(".lock")):
        if record.exists() and not [other for other in sites() if other.name != site.name]:
            for name, value in json.loads(record.read_text()).items():
                if (Path("/proc/sys") / name).read_text() != value:
                    write_setting(name, value)
            record.unlink()


def _record(site: Site) -> Path:
    return site.home.parent / "kernel-settings.json"


def _there(name: str) -> bool:
    return (Path("/proc/sys") / name).exists()
