"""Which job gets which cores and GPUs. Pure: from what is in use to what starts next, and why not.

CPU jobs take one core a rank, or `resources.cpu` a replica; GPU jobs take GPUs, and cores only where
`resources.cpu` names them. A whole GPU is taken whole; a share of 1/N goes to a GPU shared by equal
right, the fullest that still has room. Two shares of one job never meet on one GPU: NCCL refuses two
ranks on one device.

The queue is first come, first served by creation of the job, and no job overtakes an older one that
waits for something it would take too: a wide job can then never starve behind a stream of small ones.
The price is that slots stay free while the oldest waits. A job that waits for GPUs does not hold up
one that needs only cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from holdfast_controller.jobs import Spec, cores


@dataclass(frozen=True)
class Machine:
    """What there is to give away."""

    cores: int
    devices: tuple[int, ...] = ()
    """Its GPUs, by the numbers that `nvidia-smi` has for them."""

    @property
    def gpus(self) -> int:
        return len(self.devices)


@dataclass(frozen=True)
class Request:
    """What one attempt of a job needs: all replicas at once, or nothing."""

    replicas: int
    cores: Fraction
    """per replica"""
    gpus: Fraction
    """per replica; below 1 a share of one device"""

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(kind for kind, amount in (("CPU", self.cores), ("GPU", self.gpus)) if amount)


@dataclass(frozen=True)
class Grant:
    """What one replica holds: cores by amount, GPUs by number."""

    cores: Fraction = Fraction(0)
    gpus: tuple[int, ...] = ()
    share: Fraction = Fraction(1)
    """of each of its GPUs"""


Allocation = tuple[Grant, ...]
"""One grant a replica."""


@dataclass(frozen=True)
class Waiting:
    """A job in the queue; give them oldest first."""

    key: str
    request: Request


def request_of(spec: Spec) -> Request:
    """What the spec asks of this machine."""
    gpus = Fraction(spec.gpus)
    if spec.resources.cpu is not None:
        need = Fraction(cores(spec.resources.cpu)).limit_denominator(1000)
    else:
        need = Fraction(0 if gpus else spec.processes_per_replica)
    return Request(spec.replicas, need, gpus)


def never_fits(request: Request, machine: Machine) -> tuple[str, ...]:
    """Every reason why the request cannot start even on this machine when it is empty."""
    reasons = []
    total = request.cores * request.replicas
    if total > machine.cores:
        reasons.append(
            f"asks for {_number(total)} CPU slots ({_number(request.cores)} for each of {request.replicas} "
            f"replicas); this machine has {machine.cores}: ask for fewer replicas, or set resources.cpu lower"
        )
    devices = request.replicas * max(1, int(request.gpus)) if request.gpus else 0
    if devices > machine.gpus:
        asked = (
            f"asks for {devices} GPUs"
            if request.gpus >= 1
            else f"asks for shares of {devices} GPUs (one a replica)"
        )
        remedy = "set gpus: 0 to train on CPU, or use a cluster"
        reasons.append(f"{asked}; this machine has {machine.gpus}: {remedy}")
    return tuple(reasons)


def allocate(request: Request, machine: Machine, in_use: Mapping[str, Allocation]) -> Allocation | None:
    """Grants for all replicas of a request, or None where there is no room now."""
    if free_cores(machine, in_use) < request.cores * request.replicas:
        return None
    used = _gpu_use(machine, in_use)
    grants = []
    for _ in range(request.replicas):
        if request.gpus >= 1:
            free = [d for d in machine.devices if not used[d]][: int(request.gpus)]
            if len(free) < request.gpus:
                return None
            grants.append(Grant(request.cores, tuple(free)))
        elif request.gpus:
            mine = {d for grant in grants for d in grant.gpus}
            room = [d for d in machine.devices if d not in mine and used[d] + request.gpus <= 1]
            if not room:
                return None
            best = max(room, key=lambda d: (used[d], -d))
            grants.append(Grant(request.cores, (best,), request.gpus))
        else:
            grants.append(Grant(request.cores))
        for device in grants[-1].gpus:
            used[device] += grants[-1].share
    return tuple(grants)


def admit(
    queue: Sequence[Waiting], machine: Machine, in_use: Mapping[str, Allocation]
) -> tuple[dict[str, Allocation], dict[str, str]]:
    """What may start now, and for each job that may not, why it waits (by key)."""
    taken = dict(in_use)
    started: dict[str, Allocation] = {}
    waits: dict[str, str] = {}
    blocked: dict[str, str] = {}
    for job in queue:
        ahead = next((blocked[kind] for kind in sorted(job.request.kinds) if kind in blocked), None)
        if ahead is not None:
            waits[job.key] = f"waits behind job {ahead}, which is older"
        elif (allocation := allocate(job.request, machine, taken)) is not None:
            started[job.key] = allocation
            taken[job.key] = taken.get(job.key, ()) + allocation
            continue
        else:
            waits[job.key] = explain(job.request, machine, taken)
        # Each names the one before it, not the first in line: of hundreds that wait, a start then changes
        # what is said, and written down, of two.
        for kind in job.request.kinds:
            blocked[kind] = job.key
    return started, waits


def explain(request: Request, machine: Machine, in_use: Mapping[str, Allocation]) -> str:
    """Why a request does not start now: what it needs, what is free, who holds the rest."""
    kind = "CPU" if free_cores(machine, in_use) < request.cores * request.replicas else "GPU"
    used = _gpu_use(machine, in_use)
    if kind == "CPU":
        needs = f"{_number(request.cores * request.replicas)} CPU slots"
        left = max(Fraction(0), free_cores(machine, in_use))  # the machine may have had more of them before
        free = f"{_number(left)} of {machine.cores} free"
    elif request.gpus >= 1:
        needs = f"{_number(request.gpus * request.replicas)} GPU slots"
        free = f"{sum(not share for share in used.values())} of {machine.gpus} free"
    else:
        needs = f"{_number(request.gpus)} of {request.replicas} GPU{'' if request.replicas == 1 else 's'}"
        room = sum(share + request.gpus <= 1 for share in used.values())
        free = f"{room} of {machine.gpus} with that much free"
    holders = []
    for key, allocation in sorted(in_use.items()):
        held = sum((_held(grant, kind) for grant in allocation), Fraction(0))
        if held:
            holders.append(f"job {key} holds {_number(held)}")
    return f"waits for {needs}: {free}; {', '.join(holders[:5])}"


def usage(machine: Machine, in_use: Mapping[str, Allocation]) -> dict[str, tuple[float, float]]:
    """Slots used and in all, by resource."""
    return {
        "cpu": (float(machine.cores - free_cores(machine, in_use)), float(machine.cores)),
        "gpu": (float(sum(_gpu_use(machine, in_use).values())), float(machine.gpus)),
    }


def free_cores(machine: Machine, in_use: Mapping[str, Allocation]) -> Fraction:
    return machine.cores - sum((grant.cores for held in in_use.values() for grant in held), Fraction(0))


def _gpu_use(machine: Machine, in_use: Mapping[str, Allocation]) -> dict[int, Fraction]:
    """The part of each GPU that is taken. A GPU the machine no longer has counts for nothing."""
    used = dict.fromkeys(machine.devices, Fraction(0))
    for allocation in in_use.values():
        for grant in allocation:
            for device in grant.gpus:
                if device in used:
                    used[device] += grant.share
    return used


def _held(grant: Grant, kind: str) -> Fraction:
    return grant.cores if kind == "CPU" else grant.share * len(grant.gpus)


def _number(amount: Fraction) -> str:
    return f"{float(amount):g}"
