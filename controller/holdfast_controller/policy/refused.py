"""What is said of a job that cannot start as it is. Pure.

REST refuses such a job before it is stored. By kubectl it can be stored all the same: the definition's schema
is wider than what we read, and knows nothing of what this cluster allows. It then waits, with the reason in
its status, until its spec is corrected or the cluster allows more. An attempt that runs already goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from holdfast_controller.jobs import Phase, Status

from .conditions import conditions_of
from .waits import MAKING, explain

UNREADABLE = "its spec cannot be read and no other attempt starts until it is corrected: "


def waits(reasons: Sequence[str]) -> str:
    """Of a job that has no attempt running."""
    return f"cannot run as it is: {'; '.join(reasons)}; correct the spec and it goes on"


def goes_on(message: str, faults: Sequence[str]) -> str:
    """Of an attempt that runs, while the spec was changed into one that cannot be read."""
    return f"{message}; {UNREADABLE}{'; '.join(faults)}" if faults else message


def could_not_start(attempt: int, error: Exception) -> str:
    """Of an attempt whose objects the engine did not take; it is tried again."""
    return f"attempt {attempt} could not be started and is tried again: {explain(str(error), MAKING)}"


def waits_to_start(status: Status, message: str, now: datetime) -> Status:
    """Of a job of whose attempt nothing is there; `message` is `could_not_start`'s."""
    told = status.model_copy(update={"phase": Phase.QUEUED, "message": message})
    told.conditions = conditions_of(told, "StartFailed", now)
    return told


def could_not_end(attempt: int, error: Exception) -> str:
    """Of an attempt whose end the engine could not bring about; it is tried again."""
    return f"attempt {attempt} could not be ended and is tried again: {error}"


def could_not_delete(error: Exception) -> str:
    """Of a job of which something is left that the engine could not remove; it is tried again."""
    return f"could not be deleted and is tried again: {error}"
