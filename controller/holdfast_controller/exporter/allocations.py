"""Who was given which share of which GPU: what the kubelet's answer means. Pure.

NVIDIA's device plugin names shares of a GPU whose time it slices `GPU-uuid::0`, `GPU-uuid::1`, ...; without
slices the name is the UUID alone, and a MIG device has a UUID of its own. GKE's own plugin names a GPU by its
device file, `nvidia0`, a MIG device by its instance, `nvidia0/gi7`, and shares of either `.../vgpu0`: whose
UUID that is NVML knows (attribution.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

VENDOR = "nvidia.com/"


@dataclass(frozen=True)
class Allocation:
    """Shares of one device that one container holds."""

    uuid: str
    resource: str
    namespace: str
    pod: str
    container: str
    shares: int


@dataclass(frozen=True)
class Allocations:
    """Of one node. `shares` are all that there are to give, by (UUID, resource)."""

    held: tuple[Allocation, ...] = ()
    shares: dict[tuple[str, str], int] = field(default_factory=dict)


def device_uuid(device_id: str) -> str:
    """The device that a share is of: its UUID, or GKE's name of it."""
    return device_id.partition("::")[0].partition("/vgpu")[0]


def held_by(
    namespace: str, pod: str, container: str, resource: str, device_ids: list[str]
) -> list[Allocation]:
    """One allocation a device."""
    shares = Counter(device_uuid(each) for each in device_ids)
    return [Allocation(uuid, resource, namespace, pod, container, n) for uuid, n in sorted(shares.items())]
