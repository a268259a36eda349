"""What lies between the ranks, and what it is rated for: as the kernel and the driver tell.

Nothing is looked up in a table: an interface, an RDMA port and a PCIe slot have their rate in /sys, NVLink's
is told by nvidia-smi (a process of its own, as a driver may hang). Where no rate is told there is none.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .sizes import size_text

SLOW_SHARE = 0.5
"""Of what the link is rated for: a good all-reduce reaches more, whatever the protocol takes."""
NVIDIA_SMI_SECONDS = 20.0
_ENCODED = {2.5: 0.8, 5.0: 0.8}
"""PCIe: 8 of 10 bits up to the second generation; 128 of 130 since."""


@dataclass(frozen=True)
class Link:
    """Between ranks; of what carries the data of one of them, or of one machine."""

    kind: Literal["memory", "socket", "rdma", "nvlink", "pcie"]
    name: str
    bytes_per_second: float | None
    """One way; None where nothing rates it."""
    better: str = ""
    """What is there besides and carries more, as a setting: NCCL_SOCKET_IFNAME=eth1."""
    setting: str = ""
    """What names the interface."""


def link_between(
    *, nccl: bool, one_machine: bool, pci: str = "", environ: Mapping[str, str], root: Path = Path("/")
) -> Link:
    """`pci` is this rank's GPU, such as 0000:3b:00.0; `root` is where /sys and /proc are."""
    if one_machine:
        if nccl:
            return _nvlink(pci) or _pcie(pci, root)
        return Link("memory", "this machine's memory", None)
    ports = _rdma_ports(root)
    if nccl and ports and environ.get("NCCL_IB_DISABLE", "0") == "0":
        used = _one_each(ports, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        return Link("rdma", "RDMA on " + ", ".join(used), sum(used.values()))
    return _socket(nccl, ports if nccl else {}, environ, root)


def judged(measured: float, link: Link) -> tuple[str, str] | None:
    """(what to set, why) where the bus bandwidth `measured`, bytes a second, is far below the link's."""
    if link.bytes_per_second is None or measured >= SLOW_SHARE * link.bytes_per_second:
        return None
    told = (
        f"all-reduce reaches {size_text(measured)}/s, {measured / link.bytes_per_second:.0%} of the "
        f"{size_text(link.bytes_per_second)}/s that {link.name} is rated for"
    )
    if link.better:
        return link.better.partition("=")[0], f"{told}; try {link.better}"
    if link.kind == "rdma":
        advice = "NCCL_DEBUG=INFO says whether NCCL takes it (NET/IB) and what keeps GPUDirect away"
        return "NCCL_IB_HCA", f"{told}; {advice}"
    if link.kind == "socket":
        return link.setting, f"{told}; see who else uses it, its MTU, and name another one if there is"
    advice = "NCCL_DEBUG=INFO says which way is taken; NCCL_P2P_DISABLE must not be 1"
    return "NCCL_P2P_DISABLE", f"{told}: GPUs do not reach each other directly; {advice}"


# --------------------------------------------------------------------- sockets


def _socket(nccl: bool, ports: Mapping[str, float], environ: Mapping[str, str], root: Path) -> Link:
    variable = "NCCL_SOCKET_IFNAME" if nccl else "GLOO_SOCKET_IFNAME"
    speeds = _interfaces(root)
    named = environ.get(variable, "").lstrip("=").split(",")[0]
    # A name may be the beginning of one; "^" excludes instead.
    mine = next((name for name in speeds if named and name.startswith(named)), None) or _default_route(root)
    speed = speeds.get(mine or "")
    better = ""
    if ports:
        better = "NCCL_IB_DISABLE=0"
    elif faster := [name for name, rate in speeds.items() if rate and speed and rate > speed]:
        better = f"{variable}={max(faster, key=lambda name: speeds[name] or 0.0)}"
    return Link("socket", mine or "an interface that could not be told", speed, better, variable)


def _interfaces(root: Path) -> dict[str, float | None]:
    """Bytes a second of each interface that is up, but for the loopback one; virtual ones have no rate."""
    found: dict[str, float | None] = {}
    for path in sorted((root / "sys/class/net").glob("*")):
        if path.name != "lo" and _read(path / "operstate") == "up":
            told = _read(path / "speed")  # Mb/s; -1, or an error, where there is none
            real = os.path.exists(path / "device") or os.path.exists(path / "bonding")
            found[path.name] = int(told) * 1e6 / 8 if real and told.isdigit() and int(told) else None
    return found


def _default_route(root: Path) -> str | None:
    lines = _read(root / "proc/net/route").splitlines()[1:]
    return next((line.split()[0] for line in lines if line.split()[1:2] == ["00000000"]), None)


def _one_each(devices: Mapping[str, float], ranks: int) -> dict[str, float]:
    """The fastest, one for each rank of this machine, by name: NCCL takes the nearest to its GPU, and a
    machine has others, for storage or for the GPUs of other pods."""
    fastest = sorted(devices, key=lambda name: -devices[name])[:ranks]
    return {name: devices[name] for name in sorted(fastest)}


def _rdma_ports(root: Path) -> dict[str, float]:
    """Bytes a second of each active port of InfiniBand or RoCE, by device."""
    found: dict[str, float] = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
        if rate and "ACTIVE" in _read(port / "state"):
            device = port.parent.parent.name
            found[device] = found.get(device, 0.0) + float(rate[1]) * 1e9 / 8
    return found


# ------------------------------------------------------------- in one machine


def _pcie(pci: str, root: Path) -> Link:
    """The speed of a GPU's slot drops while it has nothing to do, so what it can reach counts."""
    device = root / "sys/bus/pci/devices" / pci
    speed = re.match(r"([\d.]+) GT/s", _read(device / "max_link_speed"))
    width = _read(device / "current_link_width")
    if not (pci and speed and width.isdigit()):
        return Link("pcie", "PCIe, whose rate could not be told", None)
    transfers = float(speed[1])
    rate = transfers * 1e9 * _ENCODED.get(transfers, 128 / 130) * int(width) / 8
    return Link("pcie", f"PCIe at {transfers:g} GT/s x{width}", rate)


def _nvlink(pci: str) -> Link | None:
    try:
        told = subprocess.run(
            ["nvidia-smi", "nvlink", "--status", "--id", pci],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    links = [float(rate) for rate in re.findall(r"^\s*Link \d+: ([\d.]+) GB/s", told, re.MULTILINE)]
    return Link("nvlink", f"{len(links)} NVLinks", sum(links) * 1e9) if links else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
