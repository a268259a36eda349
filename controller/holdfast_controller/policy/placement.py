"""On which nodes the pods of a job may run: tolerations and affinity from its capacity and GPUs.

Providers mark spot nodes with a label, a taint, both or neither; the table has them. A cluster whose
provider nobody named (`auto`) is asked for the marks of all: a node has those of one.

- Spot: a label of a spot node is required and the taints are tolerated.
- SpotFirst, OnDemandFirst: the taints are tolerated and such a label is preferred, or that there is none.
- OnDemand: no such label may be there; no taint is tolerated.
- Any: the taints are tolerated and nothing is required.

Karpenter taints a node that it is about to take with `karpenter.sh/disrupted`: that one is never
tolerated, or the next attempt would start where the last one is being ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast_controller.jobs import Capacity

from .gpu_request import SLICES_LABEL, WHOLE, GpuRequest

DISRUPTED = "karpenter.sh/disrupted"


class Provider(StrEnum):
    """Who takes nodes back."""

    AUTO = "auto"
    GKE = "gke"
    EKS = "eks"
    KARPENTER = "karpenter"
    AKS = "aks"
    GENERIC = "generic"


@dataclass(frozen=True)
class SpotMark:
    """How a provider marks a spot node."""

    label: str
    value: str
    tainted: bool
    """It may carry a taint of the same key and value, NoSchedule."""
    notice_seconds: float
    """Between the notice and the end, of which user pods have the use."""


MARKS: Mapping[Provider, SpotMark] = {
    # Of 30 s the kubelet keeps the second half for system pods.
    Provider.GKE: SpotMark("cloud.google.com/gke-spot", "true", True, 15),
    Provider.EKS: SpotMark("eks.amazonaws.com/capacityType", "SPOT", False, 120),
    Provider.KARPENTER: SpotMark("karpenter.sh/capacity-type", "spot", False, 120),
    Provider.AKS: SpotMark("kubernetes.azure.com/scalesetpriority", "spot", True, 30),
    Provider.GENERIC: SpotMark("node.kubernetes.io/spot", "true", True, 30),
}


def marks_of(provider: Provider) -> tuple[SpotMark, ...]:
    return tuple(MARKS.values()) if provider is Provider.AUTO else (MARKS[provider],)


def notice_seconds(
    provider: Provider, capacity: Capacity, grace_seconds: float, given: float | None = None
) -> float:
    """Seconds that a replica really has to save and end: what the job asks for, bounded by the pool.

    `given` is the operator's own figure for spot nodes. Without it and without a provider's name the
    shortest notice of all is taken: to believe in too little time costs a checkpoint's worth of caution,
    to believe in too much costs the work.
    """
    if capacity is Capacity.ON_DEMAND:
        return grace_seconds
    pool = given if given is not None else min(mark.notice_seconds for mark in marks_of(provider))
    return min(grace_seconds, pool)


def tolerations(provider: Provider, capacity: Capacity, gpus: GpuRequest) -> list[dict[str, Any]]:
    """Taints that the pods accept; each names its key, none accepts everything."""
    keys = []
    if capacity is not Capacity.ON_DEMAND:
        keys += [mark.label for mark in marks_of(provider) if mark.tainted]
    if gpus.on_gpu:
        keys.append(WHOLE)
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def _is_spot(mark: SpotMark) -> dict[str, Any]:
    return {"key": mark.label, "operator": "In", "values": [mark.value]}


def _is_not_spot(mark: SpotMark) -> dict[str, Any]:
    return {"key": mark.label, "operator": "NotIn", "values": [mark.value]}


def _preferred(capacity: Capacity, marks: tuple[SpotMark, ...]) -> list[list[dict[str, Any]]]:
    """Of each preference what has to hold together; a node gets the sum of those that do."""
    if capacity is Capacity.SPOT_FIRST:
        return [[_is_spot(mark)] for mark in marks]
    if capacity is Capacity.ON_DEMAND_FIRST:
        return [[_is_not_spot(mark) for mark in marks]]
    return []


def affinity(
    provider: Provider,
    capacity: Capacity,
    gpus: GpuRequest,
    *,
    replicas: int,
    attempt_labels: Mapping[str, str],
    slices_label: str = SLICES_LABEL,
) -> dict[str, Any]:
    """Node affinity, and one node a replica where two parts might be of one GPU; {} asks for nothing.

    NCCL refuses two ranks on one device, and nothing but the node tells parts of one GPU from others.
    An empty `slices_label` asks for any slice, however the GPU is cut.
    """
    everywhere: list[dict[str, Any]] = []
    if gpus.slices and slices_label:
        everywhere.append({"key": slices_label, "operator": "In", "values": [str(gpus.slices)]})
    marks = marks_of(provider)
    if capacity is Capacity.ON_DEMAND:
        everywhere += [_is_not_spot(mark) for mark in marks]
    terms: list[dict[str, Any]] = [{"matchExpressions": everywhere}] if everywhere else []
    if capacity is Capacity.SPOT:  # terms are alternatives, expressions of one term hold together
        terms = [{"matchExpressions": [_is_spot(mark), *everywhere]} for mark in marks]
    nodes: dict[str, Any] = {}
    if terms:
        nodes["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if preferred := _preferred(capacity, marks):
        nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": {"matchExpressions": expressions}} for expressions in preferred
        ]
    found: dict[str, Any] = {"nodeAffinity": nodes} if nodes else {}
    if gpus.part and replicas > 1:
        found["podAntiAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "labelSelector": {"matchLabels": dict(attempt_labels)},
                    "topologyKey": "kubernetes.io/hostname",
                }
            ]
        }
    return found
