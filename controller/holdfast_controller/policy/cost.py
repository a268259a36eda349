"""What an attempt's nodes are, and what they cost: prices are the operator's, no price is no figure.

A replica costs its share of its node's hourly price: the part of the node's GPUs that it was given, or of
its cores where it has none. A node with GPUs of several kinds (some whole, others cut by MIG, or cut into
devices of several sizes) does not say what part of it one of them is: then there is no share. The clock runs
from the start of the attempt's first container to the end of its last; what a node costs while it boots, or
stands idle, is on no job's account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from holdfast_controller.breakdown import Whereabouts
from holdfast_controller.cluster import Place
from holdfast_controller.jobs import AttemptRecord, Spec, Status
from holdfast_controller.prices import Prices

from .gpu_request import GPUS, gpu_request
from .placement import MARKS
from .quantity import quantity

NODES_KEPT = 16
UNKNOWN = "Unknown"
INSTANCE_TYPE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
ON_DEMAND: Mapping[str, tuple[str, ...]] = {
    "eks.amazonaws.com/capacityType": ("ON_DEMAND",),
    "karpenter.sh/capacity-type": ("on-demand", "reserved"),
    "cloud.google.com/gke-provisioning": ("standard",),
    "kubernetes.azure.com/scalesetpriority": ("regular",),
}
"""What providers write where a node is not a spot one; some write nothing, and then it is not known."""


@dataclass(frozen=True)
class Node:
    """What is known of a node: its labels, and what of it pods can be given."""

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, str]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Node:
        meta, status = document["metadata"], document.get("status") or {}
        return cls(meta["name"], meta.get("labels") or {}, status.get("allocatable") or {})


def capacity_of(labels: Mapping[str, str]) -> Literal["Spot", "OnDemand"] | None:
    """From the marks of all providers; None where the labels say neither."""
    if any(labels.get(mark.label, "").lower() == mark.value.lower() for mark in MARKS.values()):
        return "Spot"
    if labels.get("cloud.google.com/gke-provisioning") == "spot":
        return "Spot"
    if any(labels.get(label) in values for label, values in ON_DEMAND.items()):
        return "OnDemand"
    return None


def place_of(node: Node, spec: Spec, prices: Prices) -> Place:
    """Of one replica of a job on this node."""
    instance_type = next((node.labels[label] for label in INSTANCE_TYPE if label in node.labels), "")
    capacity = capacity_of(node.labels)
    whole, part = prices.of(instance_type, capacity), share(node, spec)
    price = whole * part if whole is not None and part is not None else None
    return Place(node.name, capacity, instance_type, price, prices.currency if price is not None else "")


def share(node: Node, spec: Spec) -> float | None:
    """The part of the node that a replica takes, up to 1; None where the node does not say."""
    gpus = gpu_request(spec.gpus, spec.mig)
    resource = gpus.resource if gpus.on_gpu else "cpu"
    wanted = float(gpus.count) if gpus.on_gpu else _cores(spec)
    if not offers(node, resource) or (gpus.on_gpu and _other_gpus(node, resource)):
        return None
    return min(1.0, wanted / float(quantity(node.allocatable[resource])))


def offers(node: Node, resource: str) -> bool:
    """Whether pods can be given any of it there."""
    return float(quantity(node.allocatable.get(resource, "0"))) > 0


def _other_gpus(node: Node, resource: str) -> bool:
    """Whether pods can be given GPUs of the node under other names as well."""
    return any(name != resource and name.startswith(GPUS) and offers(node, name) for name in node.allocatable)


def _cores(spec: Spec) -> float:
    return float(quantity(spec.resources.cpu)) if spec.resources.cpu else float(spec.processes_per_replica)


def whereabouts(places: Sequence[Place]) -> Whereabouts:
    """Of all replicas."""
    prices = [place.price_per_hour for place in places]
    priced = [price for price in prices if price is not None]
    whole = len(priced) == len(prices) > 0
    return Whereabouts(
        nodes=list(dict.fromkeys(place.node for place in places))[:NODES_KEPT],
        capacity=dict(Counter(place.capacity or UNKNOWN for place in places)),
        instance_types=dict(Counter(place.instance_type for place in places if place.instance_type)),
        price_per_hour=sum(priced) if whole else None,
        currency=places[0].currency if whole else None,
    )


def cost_of(record: AttemptRecord, until: float) -> float | None:
    """Up to its end, or to `until` (seconds since the epoch) while it runs; None: without a price."""
    where = record.whereabouts
    if where is None or where.price_per_hour is None or record.started_at is None:
        return None
    end = until if record.ended_at is None else record.ended_at.timestamp()
    return where.price_per_hour * max(0.0, end - record.started_at.timestamp()) / 3600


def counted(status: Status, record: AttemptRecord, until: float) -> float | None:
    """As `cost_of`, as a part of the job's cost; None: not known, or of another currency than others'."""
    mine, priced = record.whereabouts, [one for one in status.attempts if one.cost is not None]
    others = {one.whereabouts.currency for one in priced if one.whereabouts is not None}
    if mine is not None and others - {mine.currency}:
        return None
    return cost_of(record, until)


@dataclass(frozen=True)
class Meter:
    """What an attempt that runs adds to its job's cost."""

    ended: float
    """Of those before it."""
    per_hour: float
    since: datetime
    currency: str | None

    def at(self, now: datetime) -> float:
        """Of all of them."""
        return self.ended + self.per_hour * max(0.0, (now - self.since).total_seconds()) / 3600


def meter_of(status: Status) -> Meter | None:
    """None where no attempt runs, and where the cost of one is not known."""
    last = status.attempts[-1] if status.attempts else None
    if last is None or last.verdict is not None or last.started_at is None or status.unpriced_attempts:
        return None
    where = last.whereabouts
    if where is None or where.price_per_hour is None or counted(status, last, 0.0) is None:
        return None
    return Meter(status.ended_cost, where.price_per_hour, last.started_at, where.currency)
