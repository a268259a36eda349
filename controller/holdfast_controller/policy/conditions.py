"""Conditions as Kubernetes keeps them: one of a type, and its time moves only when its status does."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from holdfast_controller.jobs import Condition, Phase, Status

_Truth = Literal["True", "False", "Unknown"]

_ADMITTED = (Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING)


def conditions_of(status: Status, reason: str, now: datetime, *, queued: bool = False) -> list[Condition]:
    """The conditions that belong to a phase, with the times of those that did not change.

    Admitted says in words why it is not; the others' words are the status's message. An attempt that is ended
    while it waits was not admitted by that, nor is one that was just opened for a queue (`queued`).

    Only phases that say something about a type set it: what was never admitted has no Running. What no
    phase speaks of (GPUsIdle) stays as it is.
    """
    phase = status.phase
    wanted: dict[str, bool] = {
        "Admitted": not queued
        and (phase in _ADMITTED or (phase is Phase.RECOVERING and status.next_start_at is None)),
        "Running": phase is Phase.RUNNING,
        "Suspended": phase is Phase.SUSPENDED,
        "Complete": phase is Phase.SUCCEEDED,
        "Failed": phase is Phase.FAILED,
    }
    before = {condition.type: condition for condition in status.conditions}
    conditions = []
    for kind, true in wanted.items():
        old = before.get(kind)
        if old is None and not true and kind != "Admitted":
            continue
        if kind == "Admitted" and old is not None and old.status == "False" and _ends(phase, reason):
            conditions.append(old)
            continue
        truth: _Truth = "True" if true else "False"
        message = status.message if kind == "Admitted" and not true else ""
        if old is not None and (old.status, old.reason, old.message) == (truth, reason, message):
            conditions.append(old)
            continue
        moved = old is None or old.status != truth
        conditions.append(
            Condition(
                type=kind,
                status=truth,
                reason=reason,
                message=message,
                last_transition_time=now if old is None or moved else old.last_transition_time,
            )
        )
    return [*conditions, *(old for kind, old in before.items() if kind not in wanted)]


def _ends(phase: Phase, reason: str) -> bool:
    """Whether an attempt is being ended."""
    return phase is Phase.SUSPENDING or reason == "AttemptEnding"
