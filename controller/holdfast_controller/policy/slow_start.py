"""Why a pod that has its node does not start, from what was told of it in Events. Pure.

Its status says `ContainerCreating` and no more: what of its volumes, its sandbox or its image is in the way
is told in Events alone. They follow a pod on its way, so the newest one has the reason, and news that it went
on takes back what was told before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_controller.cluster import Event

from .waits import explain_wait

FAILS = frozenset(
    (
        "FailedAttachVolume",
        "FailedCreatePodContainer",
        "FailedCreatePodSandBox",
        "FailedMapVolume",
        "FailedMount",
        "FailedPrepareDynamicResources",
        "NetworkNotReady",
    )
)
"""What the kubelet and the attach controller warn of before a container starts. Warnings of other kinds are
about the node's DNS settings and the like, or stand in the pod's status too."""
PULLING = "Pulling"
"""The one step of a start that may well take minutes."""
STARTED = "Started"
"""Of a container; of a pod that has not started it is one before its own."""
_BEFORE = "Scheduled"


@dataclass(frozen=True)
class SlowStart:
    """`reason` as it was told, with what would help; empty where a container before its own has started, and
    the pod's status says which. `fails`: it was tried and did not work."""

    reason: str
    fails: bool


def slow_start(events: Sequence[Event]) -> SlowStart | None:
    """Of one pod's events, oldest first; None where nothing that was told is in its way."""
    told = [event for event in events if event.reason in FAILS or event.type == "Normal"]
    if not told or told[-1].reason == _BEFORE:
        return None
    last = told[-1]
    if last.reason == STARTED:
        return SlowStart("", fails=False)
    if last.reason not in FAILS and last.reason != PULLING:
        return None
    return SlowStart(explain_wait(f"{last.reason}: {' '.join(last.message.split())}"), last.reason in FAILS)
