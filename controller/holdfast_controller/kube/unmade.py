"""Why an operator does not make an attempt's pods: Events of the attempt object say, its status does not.

A quota that has no room, a LimitRange, an admission webhook: the apiserver refuses a pod, and whoever asked
for it tells that in an Event and asks again. Kubeflow Trainer's pods are made by a Job two objects further
down, so of TrainJobs nothing is known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast_controller.policy.waits import explain_wait
from holdfast_controller.pytorchjobs import PYTORCH_JOB

from .connection import Connection, Document
from .events import EventLog
from .inquiry import Inquiry
from .observation import is_suspended
from .pieces import Pieces
from .reflector import uid_of

FIRST_SECONDS = 5.0
REFUSED = "FailedCreatePod"


def unmade(
    connection: Connection, pieces: Pieces, clock: Callable[[], float] = time.monotonic
) -> Inquiry[str]:
    """About PyTorchJobs of which the operator has not said yet that they run."""
    return Inquiry(
        connection,
        pieces,
        lambda pieces: pieces.objects[PYTORCH_JOB],
        concerns=_is_in_the_making,
        ask=_why,
        first_seconds=FIRST_SECONDS,
        clock=clock,
    )


def _is_in_the_making(attempt_object: Document) -> bool:
    known = (attempt_object.get("status") or {}).get("conditions") or []
    return not is_suspended(attempt_object) and all(one["type"] == "Created" for one in known)


async def _why(connection: Connection, attempt_object: Document) -> str | None:
    told = await EventLog(connection).of(attempt_object["metadata"]["namespace"], uid_of(attempt_object))
    refused = [event.message for event in told if event.reason == REFUSED]
    return explain_wait(f"{REFUSED}: {refused[-1].removeprefix('Error creating: ')}") if refused else None
