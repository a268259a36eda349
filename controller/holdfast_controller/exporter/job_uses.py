"""What jobs do with the GPUs that they hold, out of a snapshot. Pure.

A GPU is a job's where its pod was given it (the kubelet), where the local engine gave it (a grant), or where
a process of the job is on it. How busy it is for the job:

- Held by this one holder alone: the share of time in which any kernel ran on the GPU.
- Shared: what NVML says of the holder's own processes; nothing of the GPU's is handed down. A holder without
  a process on a GPU whose processes are told does nothing there.
- Where NVML tells neither, a GPU that hardly does anything bounds what each of them does.
- Everything else is not known. A GPU that cannot be read has no figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast_controller.cluster import GpuGrant, GpuUse
from holdfast_controller.policy.idle import IDLE_BELOW

from .attribution import Holder, Use
from .collector import Snapshot
from .readings import DeviceReading

Whose = tuple[str, str, str]
"""A job's `namespace/name`, its attempt, its replica."""


def uses_of_jobs(snapshot: Snapshot, grants: Iterable[GpuGrant] = ()) -> list[GpuUse]:
    """One for each replica and each GPU (or MIG device) that is known to be its own."""
    devices = {device.uuid: device for device in snapshot.devices}
    names = {device.index: device.uuid for device in snapshot.devices}
    there: dict[tuple[str, str], set[Whose]] = {}
    for one in snapshot.held:
        if whose := _whose(one.holder):
            there.setdefault((one.uuid, one.mig), set()).add(whose)
    for use in snapshot.uses:
        if use.holder is not None and (whose := _whose(use.holder)):
            there.setdefault((use.uuid, use.mig), set()).add(whose)
    for grant in grants:
        if uuid := names.get(grant.gpu):
            whose = (grant.key, str(grant.attempt), str(grant.replica))
            there.setdefault((uuid, ""), set()).add(whose)
    return [
        use
        for (uuid, mig), owners in sorted(there.items())
        for use in _on_device(snapshot, devices.get(uuid), uuid, mig, owners)
    ]


def _on_device(
    snapshot: Snapshot, device: DeviceReading | None, uuid: str, mig: str, owners: set[Whose]
) -> Iterator[GpuUse]:
    here = [use for use in snapshot.uses if (use.uuid, use.mig) == (uuid, mig)]
    others = {one.holder for one in snapshot.held if (one.uuid, one.mig) == (uuid, mig)}
    others |= {use.holder for use in here if use.holder is not None}
    strangers = any(_whose(holder) is None for holder in others) or any(use.holder is None for use in here)
    alone = len(owners) == 1 and not strangers
    for whose in sorted(owners):
        mine = [use for use in here if use.holder is not None and _whose(use.holder) == whose]
        ranks = sorted(
            {use.holder.rank for use in mine if use.holder is not None and use.holder.rank}, key=int
        )
        busy = _busy(device, here, mine, alone=alone and not mig)
        yield GpuUse(whose[0], int(whose[1]), whose[2], mig or uuid, busy, ",".join(ranks))


def _busy(device: DeviceReading | None, here: list[Use], mine: list[Use], *, alone: bool) -> float | None:
    if device is None or device.fault is not None:
        return None
    whole = device.figures.get("utilization")
    if alone and whole is not None:
        return whole
    own = [use.sm_ratio for use in mine]
    known = [ratio for ratio in own if ratio is not None]
    if mine and len(known) == len(own):
        return sum(known)
    if not mine and here and all(use.holder is not None for use in here):
        return 0.0
    return whole if whole is not None and whole < IDLE_BELOW else None


def _whose(holder: Holder) -> Whose | None:
    if not (holder.job and holder.attempt.isdigit()):
        return None
    return f"{holder.namespace}/{holder.job}", holder.attempt, holder.replica
