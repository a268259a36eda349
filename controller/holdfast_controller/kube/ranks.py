"""What is asked of ranks inside their containers: to stand still, to run out of memory, to tell their stacks.

None of it is on record as a drill: what comes of it is to be found out as if nobody had asked. Everything
has a bound, for the node of a pod may be the very thing that does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from holdfast_controller.cluster import HoldfastError, Invalid, NotReady
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.policy.quantity import quantity

from .connection import Connection, Document
from .execution import inside

log = structlog.get_logger(__name__)

ANSWER_SECONDS = 30.0
"""For a program to be started in a container, and to answer."""
STACKS_SECONDS = 2.0
"""For ranks that are killed to write their stacks."""
ALL_STACKS_SECONDS = 8.0
"""For those of all pods together, however many there are."""
AT_ONCE = 32
"""Pods that are asked at a time, each over a connection of its own."""


async def freeze(connection: Connection, job: TrainingJob, replica: int, pod: Document) -> None:
    """Stop the last rank of this replica, whose pod it is. Raises Invalid, NotReady."""
    if job.spec.world_size < 2:
        raise Invalid(f"freeze: job {job.key} has one rank, so no peer would notice that it hangs")
    rank = (replica + 1) * job.spec.processes_per_replica - 1
    await _asked(connection, pod, "freeze", str(rank))


async def overfill(connection: Connection, job: TrainingJob, pod: Document) -> None:
    """Use up the memory of this pod's container. Raises Invalid, NotReady."""
    memory = job.spec.resources.memory
    if memory is None:
        raise Invalid(f"oom: nothing limits the memory of job {job.key}; give it resources.memory")
    await _asked(connection, pod, "overfill", str(int(quantity(memory))))


async def _asked(connection: Connection, pod: Document, action: str, word: str) -> None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await inside(connection, pod, action, word)
    except TimeoutError:
        raise NotReady(
            f"{pod['metadata']['name']}: its container has not answered for {ANSWER_SECONDS:g} s: is its "
            "node ready? Try again"
        ) from None


async def abort(connection: Connection, pods: Sequence[Document]) -> None:
    """End all ranks of these pods so that they write their stacks to their logs. Never raises; a pod that
    does not answer in time is left alone."""
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(pod: Document) -> None:
        async with free:
            try:
                await inside(connection, pod, "stacks", str(STACKS_SECONDS))
            except HoldfastError as error:
                log.info("its ranks do not say where they stand", pod=_name(pod), error=str(error))

    with suppress(TimeoutError):
        async with asyncio.timeout(ALL_STACKS_SECONDS):
            await asyncio.gather(*(ask(pod) for pod in pods))


def _name(pod: Document) -> str:
    return str(pod["metadata"]["name"])
