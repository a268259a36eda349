"""What becomes of the jobs when the controller ends: they run on, or are suspended first."""

from __future__ import annotations

import asyncio

import structlog

from .cluster import Conflict, JobStore, NotFound
from .jobs import Phase, TrainingJob

log = structlog.get_logger(__name__)

ACTIVE = (Phase.STARTING, Phase.RUNNING, Phase.RECOVERING, Phase.SUSPENDING)
MARGIN_SECONDS = 30.0
"""For the reconciler to see and write that an attempt ended, beyond the job's own grace."""


async def active_jobs(store: JobStore) -> list[TrainingJob]:
    """Jobs with an attempt that runs or is about to."""
    return [job for job in await store.list_jobs() if job.status.phase in ACTIVE]


async def suspend_all(store: JobStore) -> list[TrainingJob]:
    """Suspend every job that is not final, and wait until none is active.

    Gives up after the longest grace of them plus a margin; returns the jobs that are active still. The
    reconciler must be running.
    """
    jobs = [job for job in await store.list_jobs() if not job.status.phase.final]
    for job in jobs:
        await suspend(store, job)
    longest = max((job.spec.grace_seconds for job in jobs), default=0.0)
    try:
        async with asyncio.timeout(longest + MARGIN_SECONDS):
            await _until_none_active(store)
    except TimeoutError:
        pass
    return await active_jobs(store)


async def _until_none_active(store: JobStore) -> None:
    if await active_jobs(store):
        async for _ in store.watch():
            if not await active_jobs(store):
                return


async def suspend(store: JobStore, job: TrainingJob) -> None:
    """Set `spec.suspend`, whoever else writes the job meanwhile."""
    while not job.spec.suspend:
        try:
            spec = job.spec.model_copy(update={"suspend": True})
            await store.replace_spec(job.model_copy(update={"spec": spec}))
            return
        except Conflict:
            try:
                job = await store.get(job.metadata.namespace, job.metadata.name)
            except NotFound:
                return
        except NotFound:
            return
