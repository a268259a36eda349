"""Who uses and who holds which GPU: readings, allocations and pods joined. Pure.

Nothing of a device's figures is handed down to those who share it: what a container uses is the sum of
its own processes' figures, and a sum with an unknown part is unknown. Who holds a share and uses nothing
has an allocation and no process.

A pod's labels say which job it is of. Where there is no pod (the local engine) the process's environment
does; in a pod it adds the rank alone, and only where it does not contradict the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from holdfast_trainer.contract import ENV_ATTEMPT, ENV_JOB, ENV_REPLICA

from .allocations import Allocation
from .pods import Pod, Pods
from .processes import ENV_RANK, Origin
from .readings import DeviceReading, ProcessReading


@dataclass(frozen=True)
class PodLabels:
    """The labels that pods of jobs have."""

    job: str
    attempt: str
    replica: tuple[str, ...]
    """One of these, whichever the pod has."""


@dataclass(frozen=True)
class Holder:
    """Whose something is; "" where that is not known or does not apply."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    job: str = ""
    attempt: str = ""
    replica: str = ""
    rank: str = ""


@dataclass(frozen=True)
class Use:
    """What the processes of one holder do on one GPU (or MIG device). None: not told of all of them."""

    uuid: str
    mig: str
    holder: Holder | None
    """None: processes that belong to no pod and no job."""
    processes: int
    memory_bytes: float | None
    sm_ratio: float | None


@dataclass(frozen=True)
class Held:
    """Shares of one device that a container was given."""

    uuid: str
    mig: str
    resource: str
    holder: Holder
    shares: int


def uses(
    device: DeviceReading, origins: Mapping[int, Origin], pods: Pods, labels: PodLabels
) -> tuple[Use, ...]:
    """The processes of one GPU, summed up by holder. One that has ended since it was read counts no more."""
    instances = {mig.instance: mig.uuid for mig in device.mig}
    groups: dict[tuple[str, Holder | None], list[ProcessReading]] = {}
    for process in device.processes or ():
        origin = origins.get(process.pid)
        if origin is None:
            continue
        mig = instances.get(process.instance, "") if process.instance is not None else ""
        groups.setdefault((mig, holder_of(origin, pods, labels)), []).append(process)
    return tuple(
        Use(
            device.uuid,
            mig,
            holder,
            len(group),
            _sum(group, lambda process: process.memory_bytes),
            _sum(group, lambda process: process.sm_ratio),
        )
        for (mig, holder), group in groups.items()
    )


def allocated(
    allocations: Iterable[Allocation],
    parents: Mapping[str, tuple[str, str]],
    pods: Pods,
    labels: PodLabels,
) -> tuple[Held, ...]:
    """Allocations with the jobs they belong to; a MIG device's stand under its GPU: `parents_of`."""
    found = []
    for one in allocations:
        pod = pods.by_name.get((one.namespace, one.pod))
        holder = _of_pod(pod, labels) if pod else Holder(one.namespace, one.pod)
        holder = Holder(**{**vars(holder), "container": one.container})
        uuid, mig = parents.get(one.uuid, (one.uuid, ""))
        found.append(Held(uuid, mig, one.resource, holder, one.shares))
    return tuple(found)


def parents_of(devices: Iterable[DeviceReading]) -> dict[str, tuple[str, str]]:
    """(GPU's UUID, MIG device's UUID or "") by what else they are called: a MIG device by its own UUID, and
    both as GKE's device plugin does."""
    found = {}
    for device in devices:
        if device.minor is not None and device.uuid:
            found[f"nvidia{device.minor}"] = device.uuid, ""
        for mig in device.mig:
            found[mig.uuid] = device.uuid, mig.uuid
            if device.minor is not None:
                found[f"nvidia{device.minor}/gi{mig.instance}"] = device.uuid, mig.uuid
    return found


def holder_of(origin: Origin, pods: Pods, labels: PodLabels) -> Holder | None:
    """Whose process it is; None where it is nobody's that we know."""
    environment = origin.environment
    if origin.pod_uid:
        pod = pods.by_uid.get(origin.pod_uid)
        if pod is None:
            return None
        holder = _of_pod(pod, labels)
        container = pod.containers.get(origin.container_id, "")
        told = environment.get(ENV_JOB), environment.get(ENV_ATTEMPT)
        agrees = told == (f"{pod.namespace}/{holder.job}", holder.attempt)
        rank = environment.get(ENV_RANK, "") if holder.job and agrees else ""
        return Holder(**{**vars(holder), "container": container, "rank": _number(rank)})
    namespace, slash, job = environment.get(ENV_JOB, "").partition("/")
    if not (slash and namespace.isprintable() and job.isprintable()):  # who sees all may be root
        return None
    attempt, replica, rank = (
        _number(environment.get(name, "")) for name in (ENV_ATTEMPT, ENV_REPLICA, ENV_RANK)
    )
    return Holder(namespace=namespace, job=job, attempt=attempt, replica=replica, rank=rank)


def _of_pod(pod: Pod, labels: PodLabels) -> Holder:
    job = pod.labels.get(labels.job, "")
    of_job = {
        "job": job,
        "attempt": pod.labels.get(labels.attempt, ""),
        "replica": next((pod.labels[name] for name in labels.replica if name in pod.labels), ""),
    }
    return Holder(namespace=pod.namespace, pod=pod.name, **(of_job if job else {}))


def _number(text: str) -> str:
    """A label from a user's process: a number or nothing."""
    return text if text.isascii() and text.isdigit() and len(text) <= 6 else ""


def _sum(group: list[ProcessReading], figure: Callable[[ProcessReading], float | None]) -> float | None:
    values = [figure(process) for process in group]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
