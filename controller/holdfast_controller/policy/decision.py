"""What is to be done with a job next, as a plain value: decide.py makes it, the reconciler carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_controller.cluster import Event
from holdfast_controller.jobs import Status


@dataclass(frozen=True)
class Decision:
    """Stop and kill first, write the status, then suspend or start, then tell the events."""

    status: Status
    stop: int | None = None
    kill: int | None = None
    stacks: bool = False
    """What is killed tells first where it stands."""
    start: int | None = None
    remove: bool = False
    suspend: bool = False
    """Set `spec.suspend`, as a user would."""
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds; None: nothing to do until something changes."""
