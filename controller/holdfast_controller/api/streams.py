"""Streams that end: with their source, when the reader leaves, or when the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from ..cluster import Engine, HoldfastError, JobStore, NotFound, Unavailable
from ..jobs import TrainingJob
from ..lines import head_of

T = TypeVar("T")

PING_SECONDS = 5
"""Between two signs of life on a quiet stream."""
POLL_SECONDS = 0.3
"""Between two looks at a job for what has no watch of its own."""


async def until_closing(source: AsyncIterator[T], closing: asyncio.Event) -> AsyncIterator[T]:
    """What `source` gives, until `closing` is set. The source is closed in every case."""
    closed = asyncio.ensure_future(closing.wait())
    following: asyncio.Future[T] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(source))
            await asyncio.wait((following, closed), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        closed.cancel()
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait((following,))
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def pause(closing: asyncio.Event, seconds: float = POLL_SECONDS) -> bool:
    """Sleep; False at once when the server closes."""
    try:
        await asyncio.wait_for(closing.wait(), seconds)
    except TimeoutError:
        return True
    return False


async def open_stream(source: AsyncIterator[T], seconds: float, *, late: str = "") -> AsyncIterator[T]:
    """Begin to read `source`, so that what it raises at first becomes an answer, not a torn stream.

    Waits `seconds` for the first item and no longer. Then `late` is raised as Unavailable; where that is
    empty it may be silent for hours.
    """
    first = asyncio.ensure_future(anext(source))
    await asyncio.wait((first,), timeout=seconds)
    if late and not first.done():
        first.cancel()
        await asyncio.wait((first,))
        raise Unavailable(late)
    if first.done() and (error := first.exception()) and not isinstance(error, StopAsyncIteration):
        raise error

    async def rest() -> AsyncIterator[T]:
        try:
            yield await first
            async for item in source:
                yield item
        except StopAsyncIteration:
            return
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait((first,))
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    return rest()


async def follow_job(
    store: JobStore, engine: Engine, job: TrainingJob, rank: int, tail: int | None, closing: asyncio.Event
) -> AsyncIterator[str]:
    """A rank's lines through all attempts from the newest on, until the job is final or gone.

    A line `==> attempt N <==` stands before each attempt. `tail` counts for the first one alone.
    """
    attempt = job.status.attempt
    shown = 0
    while True:
        if attempt > shown:
            yield head_of(attempt)
            async for line in _lines_once_there(store, engine, job, attempt, rank, tail, closing):
                yield line
            shown, tail = attempt, None
        elif job.status.phase.final or not await pause(closing):
            return
        try:
            current = await store.get(job.metadata.namespace, job.metadata.name)
        except NotFound:
            return
        except Unavailable:
            continue  # an apiserver that does not answer is asked again
        if current.metadata.uid != job.metadata.uid:
            return
        job = current
        # Attempts that began and ended unseen are told too, each in its turn.
        attempt = min(job.status.attempt, shown + 1) if shown else job.status.attempt


async def _lines_once_there(
    store: JobStore,
    engine: Engine,
    job: TrainingJob,
    attempt: int,
    rank: int,
    tail: int | None,
    closing: asyncio.Event,
) -> AsyncIterator[str]:
    """Follow one attempt; its rank may not have begun to write yet."""
    while True:
        try:
            async for line in engine.logs(job, attempt, rank, follow=True, tail=tail):
                yield line
            return
        except NotFound:
            try:
                now = await store.get(job.metadata.namespace, job.metadata.name)
            except NotFound:
                return
            except HoldfastError:
                over = False  # an apiserver that does not answer is asked again, and lines may yet come
            else:
                over = (
                    now.status.phase.final
                    or now.status.attempt != attempt
                    or now.metadata.uid != job.metadata.uid
                )
            if over or not await pause(closing):
                return
