"""One look at everything, a scrape: NVML, the kubelet, the apiserver, /proc.

What is kept between looks is only what has happened and cannot unhappen: which GPUs there were and of which
of them each MIG device is a part, how many Xids they had, how often a source failed. No figure is kept.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from .allocations import Allocations
from .attribution import Held, PodLabels, Use, allocated, parents_of, uses
from .figures import plausible
from .pods import NodePods, Pods
from .processes import Origin, origins
from .readings import DeviceReading, Fault, Reading, Reason
from .sampling import Sample, Sampled

NVML, KUBELET, APISERVER = "nvml", "pod-resources", "pods"
Origins = Callable[[Iterable[int]], Mapping[int, Origin]]


class AllocationSource(Protocol):
    """The kubelet, or nobody."""

    def read(self) -> tuple[Allocations, Fault | None]: ...


@dataclass(frozen=True)
class Snapshot:
    """What one look found. A device that is not readable now is there with its fault and no figures."""

    driver: str
    cuda: str
    devices: tuple[DeviceReading, ...]
    uses: tuple[Use, ...]
    held: tuple[Held, ...]
    shares: Mapping[tuple[str, str, str], int]
    """All there are to give, by (GPU's UUID, MIG device's UUID, resource)."""
    sources: Mapping[str, Fault | None]
    """What was asked, and what was wrong with it."""
    failures: Mapping[tuple[str, Reason], int]
    xids: Mapping[tuple[str, int], int]
    read_seconds: float

    @property
    def gpu_indexes(self) -> dict[str, int]:
        return {device.uuid: device.index for device in self.devices}


@dataclass
class _Past:
    known: dict[str, DeviceReading] = field(default_factory=dict)
    parents: dict[str, tuple[str, str]] = field(default_factory=dict)
    """As of `parents_of`: what is held of a GPU is still of it while it cannot be read."""
    xids: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: Counter[tuple[str, Reason]] = field(default_factory=Counter)


class Collector:
    """Looks when it is asked. Safe to call from several threads."""

    def __init__(
        self,
        sampled: Sampled,
        labels: PodLabels,
        *,
        kubelet: AllocationSource | None = None,
        node_pods: NodePods | None = None,
        origins_of: Origins = origins,
    ):
        self._sampled = sampled
        self._labels = labels
        self._kubelet = kubelet
        self._node_pods = node_pods
        self._origins = origins_of
        self._past = _Past()
        self._lock = threading.Lock()

    def look(self) -> Snapshot:
        """At most the sources' deadlines later: what is true now."""
        sample = self._sampled()
        sources: dict[str, Fault | None] = {NVML: sample.fault}
        allocations = Allocations()
        if self._kubelet is not None:
            allocations, sources[KUBELET] = self._kubelet.read()
        reading = sample.reading or Reading()
        readable = tuple(plausible(device) for device in reading.devices)
        found = self._origins(sorted({one.pid for each in readable for one in each.processes or ()}))
        pods = Pods()
        if self._node_pods is None:
            # One machine, which may itself be a pod: whose the processes in it are, they say themselves.
            found = {pid: Origin(environment=origin.environment) for pid, origin in found.items()}
        else:
            containers = {(one.pod_uid, one.container_id) for one in found.values() if one.pod_uid}
            names = {(one.namespace, one.pod) for one in allocations.held}
            pods, sources[APISERVER] = self._node_pods.covering(containers, names)
        with self._lock:
            devices = self._remember(sample, readable, sources)
            failures, xids = dict(self._past.failures), dict(self._past.xids)
            parents = dict(self._past.parents)
        shares = {
            (*parents.get(uuid, (uuid, "")), resource): n
            for (uuid, resource), n in allocations.shares.items()
        }
        return Snapshot(
            reading.driver,
            reading.cuda,
            devices,
            tuple(use for each in readable for use in uses(each, found, pods, self._labels)),
            allocated(allocations.held, parents, pods, self._labels),
            shares,
            sources,
            failures,
            xids,
            sample.seconds,
        )

    def _remember(
        self, sample: Sample, readable: tuple[DeviceReading, ...], sources: Mapping[str, Fault | None]
    ) -> tuple[DeviceReading, ...]:
        """Count what happened; all devices there ever were, the unreadable with their fault."""
        past = self._past
        past.parents.update(parents_of(readable))
        past.xids.update((event.uuid, event.code) for event in sample.xids)
        past.failures.update((source, fault.reason) for source, fault in sources.items() if fault)
        if sample.reading is not None:
            named = {device.index for device in readable if device.uuid}
            past.known = {
                key: device for key, device in past.known.items() if device.uuid or device.index not in named
            }
            readable = _named(readable, past.known.values())
        now = {_key(device): device for device in readable}
        for key, device in now.items():
            past.known[key] = DeviceReading(device.index, device.uuid, device.name, device.bus)
        absent = sample.fault.reason if sample.fault else Reason.GONE
        every = [
            now.get(key) or DeviceReading(device.index, device.uuid, device.name, device.bus, fault=absent)
            for key, device in past.known.items()
        ]
        return tuple(sorted(every, key=lambda device: (device.index, device.uuid)))


def _named(readable: tuple[DeviceReading, ...], known: Iterable[DeviceReading]) -> tuple[DeviceReading, ...]:
    """Those that do not tell their name as the ones that were last seen in their place, unless they are seen
    in another: a reader that is new never heard the name of a GPU that was lost before."""
    seen = {device.uuid for device in readable}
    missed = {device.index: device for device in known if device.uuid and device.uuid not in seen}
    return tuple(
        replace(device, uuid=was.uuid, name=was.name, bus=was.bus)
        if not device.uuid and (was := missed.get(device.index))
        else device
        for device in readable
    )


def _key(device: DeviceReading) -> str:
    return device.uuid or f"number {device.index}"
