"""The steps of a job, page by page from rank 0 of the attempt that runs, which mounts the run directory.

Read when somebody asks, never kept: there is a line for every step of every attempt.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from holdfast_controller.cluster import NotReady
from holdfast_controller.gang import run_name
from holdfast_controller.jobs import TrainingJob
from holdfast_trainer.contract import DEFAULT_PORT, parse_lines

from .connection import Document
from .endpoint import BYTES_OF_ONE, bounded_body, objects_in, pod_client
from .pod_state import forced, index_of, running

TIMEOUT_SECONDS = 10.0
"""For an answer to begin, and between two of its parts."""
WHOLE_SECONDS = 60.0
GOING_SECONDS = 1.0
"""For all of it where the pod is being taken without grace, perhaps with its node: the next attempt waits."""
LIMIT = 8 * 1024 * 1024
"""Bytes that are read for one answer: parsed they are ten times as large."""


async def read_steps(job: TrainingJob, pods: list[Document], parsing: asyncio.Lock) -> list[dict[str, Any]]:
    """All lines of all attempts, each with its "attempt". `pods` are the newest attempt's. Of many who ask at
    once one has `parsing`, and with it the memory that lines take: all of them would have all there is.

    Raises NotReady where rank 0 does not run or answer, and where there is more than `LIMIT`, or more lines
    than have room in that.
    """
    rank_0 = next((pod for pod in pods if index_of(pod) == 0 and running(pod)), None)
    address = rank_0["status"].get("podIP") if rank_0 is not None else None
    if rank_0 is None or address is None:
        raise NotReady(f"no rank 0 of {job.key} runs that could tell its steps; {_where(job)}")
    host = f"[{address}]" if ":" in address else address
    try:
        async with (
            asyncio.timeout(GOING_SECONDS if forced(rank_0) else WHOLE_SECONDS),
            pod_client(TIMEOUT_SECONDS) as client,
        ):
            pages = await _all_pages(client, f"http://{host}:{DEFAULT_PORT}/steps", job)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NotReady(f"rank 0 of {job.key} does not tell its steps ({error!r}); {_where(job)}") from error
    async with parsing:
        return await asyncio.to_thread(_lines, pages)


async def _all_pages(client: aiohttp.ClientSession, url: str, job: TrainingJob) -> list[tuple[int, bytes]]:
    """Each with its attempt."""
    found: list[tuple[int, bytes]] = []
    size, objects, asked = 0, 0, (job.metadata.uid, job.status.attempt)
    for attempt in range(1, job.status.attempt + 1):
        offset = 0
        while page := await bounded_body(client, f"{url}?attempt={attempt}&offset={offset}", LIMIT, asked):
            offset += len(page)
            size, objects = size + len(page), objects + objects_in(page)
            if size > LIMIT:
                raise NotReady(f"{job.key} has more than {LIMIT >> 20} MiB of steps; {_where(job)}")
            if objects > (most := LIMIT // BYTES_OF_ONE):
                raise NotReady(f"{job.key} has more than {most} lines of steps; {_where(job)}")
            found.append((attempt, page))
        if page is None:
            raise NotReady(f"rank 0 of {job.key} serves no steps; {_where(job)}")
    return found


def _lines(pages: list[tuple[int, bytes]]) -> list[dict[str, Any]]:
    """In a thread: a page may take seconds, and the lease is to be renewed meanwhile."""
    return [
        {**line, "attempt": attempt}
        for attempt, page in pages
        for line in parse_lines(page.decode(errors="replace"))
    ]


def run_directory(job: TrainingJob) -> str:
    """As people find it."""
    return f"{run_name(job)} on {_claim(job)}"


def _where(job: TrainingJob) -> str:
    return f"they are on {_claim(job)}, in {run_name(job)}/attempts/*/steps.jsonl"


def _claim(job: TrainingJob) -> str:
    return f"claim {job.spec.storage.claim}" if job.spec.storage else "the cluster's default claim"
