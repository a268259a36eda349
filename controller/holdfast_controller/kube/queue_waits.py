"""Why a queue does not admit an attempt: the conditions of the Workload that Kueue makes for it.

An attempt with a queue is made suspended (manifests.py), and only Kueue ends that: where there is no Kueue,
or it takes no notice of that kind, the job waits instead of running beside every quota, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast_controller.cluster import NotFound
from holdfast_controller.manifests import PRIORITY_LABEL, QUEUE_LABEL
from holdfast_controller.policy.queue_waits import NO_KUEUE, NO_PRIORITY, NO_WORKLOAD, queue_wait
from holdfast_controller.pytorchjobs import PYTORCH_JOB

from .connection import Connection, Document
from .inquiry import Inquiry
from .observation import is_suspended
from .pieces import Pieces
from .reflector import uid_of

GROUP = "/apis/kueue.x-k8s.io"
OWNER_LABEL = "kueue.x-k8s.io/job-uid"
FIRST_SECONDS = 3.0


def queue_waits(
    connection: Connection, pieces: Pieces, clock: Callable[[], float] = time.monotonic
) -> Inquiry[str]:
    """About attempt objects of the kind that may have a queue."""
    return Inquiry(
        connection,
        pieces,
        lambda pieces: [pieces.objects[PYTORCH_JOB]],
        concerns=_is_queued,
        ask=_why,
        first_seconds=FIRST_SECONDS,
        clock=clock,
    )


def _is_queued(attempt_object: Document) -> bool:
    return QUEUE_LABEL in attempt_object["metadata"]["labels"] and is_suspended(attempt_object)


async def _why(connection: Connection, attempt_object: Document) -> str | None:
    meta = attempt_object["metadata"]
    queue = meta["labels"][QUEUE_LABEL]
    try:
        group = await connection.get(GROUP)
    except NotFound:
        return NO_KUEUE.format(queue=queue)
    version = group["preferredVersion"]["version"]
    path = f"{GROUP}/{version}/namespaces/{meta['namespace']}/workloads"
    found = (await connection.get(path, labelSelector=f"{OWNER_LABEL}={uid_of(attempt_object)}"))["items"]
    if not found:
        priority = meta["labels"].get(PRIORITY_LABEL)
        return NO_WORKLOAD + (NO_PRIORITY.format(priority=priority) if priority else "")
    return queue_wait(queue, (found[0].get("status") or {}).get("conditions") or [])
