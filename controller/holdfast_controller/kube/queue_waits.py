"""Why a queue does not admit an attempt, or wants it no more: what is in the Workload Kueue makes for it. And
out of that queue with one that has ended.

An attempt with a queue is made suspended (manifests.py), and only Kueue ends that: where there is no Kueue,
or it takes no notice of that kind, the job waits instead of running beside every quota, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from holdfast_controller.cluster import NotFound
from holdfast_controller.manifests import PRIORITY_LABEL, QUEUE_LABEL
from holdfast_controller.policy import queue_waits as policy
from holdfast_controller.policy.queue_waits import NO_KUEUE, NO_PRIORITY, NO_WORKLOAD, queue_wait
from holdfast_controller.pytorchjobs import PYTORCH_JOB

from .connection import Connection, Document
from .errors import NotPermitted
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
        concerns=_is_in_queue,
        ask=_why,
        first_seconds=FIRST_SECONDS,
        clock=clock,
    )


async def put_aside(connection: Connection, attempt_object: Document | None) -> str:
    """Of an attempt that has ended: why its queue, which took it back, wants no other. Raises Unavailable."""
    if attempt_object is None or not _is_in_queue(attempt_object):
        return ""
    try:
        _, found = await _workloads(connection, attempt_object)
    except (NotFound, NotPermitted):  # there is no Kueue any more, or we may not read what it keeps
        return ""
    return policy.put_aside(_queue(attempt_object), found[0]) if found else ""


async def leave(connection: Connection, attempt_object: Document) -> None:
    """Take an attempt that was deleted out of its queue, and do not leave that to the garbage collector.

    What waits there for the quota that it was preempted for may be given that while it is deleted: Kueue then
    asks no more whether there is room for the next attempt, until something else ends in that queue.
    """
    if QUEUE_LABEL not in attempt_object["metadata"]["labels"]:
        return
    with suppress(NotFound, NotPermitted):
        path, found = await _workloads(connection, attempt_object)
        for workload in found:
            options = {"preconditions": {"uid": uid_of(workload)}}
            await connection.delete(f"{path}/{workload['metadata']['name']}", options)


def _is_in_queue(attempt_object: Document) -> bool:
    return QUEUE_LABEL in attempt_object["metadata"]["labels"] and is_suspended(attempt_object)


def _queue(attempt_object: Document) -> str:
    return str(attempt_object["metadata"]["labels"][QUEUE_LABEL])


async def _why(connection: Connection, attempt_object: Document) -> str | None:
    queue = _queue(attempt_object)
    try:
        _, found = await _workloads(connection, attempt_object)
    except NotFound:
        return NO_KUEUE.format(queue=queue)
    if not found:
        priority = attempt_object["metadata"]["labels"].get(PRIORITY_LABEL)
        return NO_WORKLOAD + (NO_PRIORITY.format(priority=priority) if priority else "")
    return queue_wait(queue, (found[0].get("status") or {}).get("conditions") or [])


async def _workloads(connection: Connection, attempt_object: Document) -> tuple[str, list[Document]]:
    """Where they are, and its own, one at most. Raises NotFound where there is no Kueue."""
    version = (await connection.get(GROUP))["preferredVersion"]["version"]
    path = f"{GROUP}/{version}/namespaces/{attempt_object['metadata']['namespace']}/workloads"
    listed = await connection.get(path, labelSelector=f"{OWNER_LABEL}={uid_of(attempt_object)}")
    return path, list(listed["items"])
