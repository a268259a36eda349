"""What a job leaves behind: logs, events, ledger, steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request, Response
from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import StreamingResponse

from holdfast_trainer.contract import is_count

from ..cluster import Event, HoldfastError, Invalid, NotFound, NotReady, Unavailable
from ..jobs import TrainingJob
from .backend import At, AttemptNumber, Backend, Found
from .ledger import LedgerDocument, account
from .shapes import EventDocument, EventList, StepList
from .streams import PING_SECONDS, follow_job, open_stream, pause, until_closing

router = APIRouter(prefix="/v1/namespaces/{namespace}/jobs/{name}", tags=["records"])

PIECE = 65536
"""Characters of a log that are sent at once."""
LINES_AT_ONCE = 500
"""Steps that are put into JSON in a millisecond or two."""
FIRST_SECONDS = 45.0
"""For the first piece of a log, or why there is none: an apiserver tries for 30 s to reach the node that has
it, and the command waits for a minute."""
FOLLOWED_SECONDS = 0.5
"""Likewise of one that is followed, which may be silent for hours."""


@router.get(
    "/logs",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/plain": {}}, "description": "Lines of a rank's output."}},
)
async def logs(
    at: At,
    job: Found,
    attempt: AttemptNumber = None,
    rank: Annotated[int, Query(ge=0)] = 0,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Only the last lines.")] = None,
    follow: Annotated[
        bool, Query(description="Go on until the attempt ends; without `attempt`, until the job does.")
    ] = False,
) -> StreamingResponse:
    """A rank's output as plain text."""
    # What the job asks for now, or what the attempt has: the spec may have been changed since it was opened.
    ranks = max(job.spec.world_size, job.as_of(attempt or job.status.attempt).spec.world_size)
    if rank >= ranks:
        raise Invalid(f"rank {rank}: {job.key} has {ranks}, numbered from 0")
    if attempt is not None and attempt > job.status.attempt:
        raise NotFound(f"{job.key} has had {job.status.attempt} attempts; there is no attempt {attempt}")
    if attempt is None and not follow and not job.status.attempt:
        raise NotFound(f"{job.key} has had no attempt yet: {job.status.message or job.status.phase}")
    if follow and attempt is None:
        source = follow_job(at.store, at.engine, job, rank, tail, at.closing)
    else:
        number = attempt or job.status.attempt
        source = at.engine.logs(job, number, rank, follow=follow, tail=tail)
    pieces = until_closing(text_of(source, 1 if follow else PIECE), at.closing)
    if follow:
        text = await open_stream(pieces, FOLLOWED_SECONDS)
    else:
        late = f"nothing of the log of rank {rank} of {job.key} has come in {FIRST_SECONDS:g} s; try again"
        text = await open_stream(pieces, FIRST_SECONDS, late=late)
    return StreamingResponse(text, media_type="text/plain")


async def text_of(lines: AsyncIterator[str], size: int) -> AsyncIterator[str]:
    """In pieces of `size` characters, whole lines each. To send one costs more than to read a thousand lines,
    but of a log that is followed a line is shown when it is there."""
    held: list[str] = []
    left = size
    async with aclosing(cast("Any", lines)) as each:
        try:
            async for line in each:
                held.append(line if line.endswith("\n") else line + "\n")
                left -= len(held[-1])
                if left <= 0:
                    yield "".join(held)
                    held, left = [], size
        except HoldfastError:
            if held:  # what was read before it broke is told
                yield "".join(held)
            raise
    if held:
        yield "".join(held)


@router.get(
    "/events",
    response_model=EventList,
    responses={200: {"content": {"text/event-stream": {}}, "description": "With Accept: as they happen."}},
)
async def events(at: At, job: Found, request: Request) -> Any:
    """What happened to the job, oldest first, at most 200."""
    found = await at.store.events(job.metadata.namespace, job.metadata.name)
    if "text/event-stream" in request.headers.get("accept", ""):
        return EventSourceResponse(_as_they_happen(at, job, found), ping=PING_SECONDS, send_timeout=30)
    return EventList(items=[_event(event) for event in found])


def _event(event: Event) -> EventDocument:
    return EventDocument(
        time=event.time, type=event.type, reason=event.reason, message=event.message, count=event.count
    )


async def _as_they_happen(
    at: Backend, job: TrainingJob, found: list[Event]
) -> AsyncIterator[ServerSentEvent]:
    told: list[Event] = []
    while True:
        for event in (event for event in found if event not in told):
            yield ServerSentEvent(_event(event).model_dump_json(by_alias=True), event=event.type)
        told = found
        if not await pause(at.closing):
            return
        try:
            current = await at.store.get(job.metadata.namespace, job.metadata.name)
            found = await at.store.events(job.metadata.namespace, job.metadata.name)
        except NotFound:
            return
        except Unavailable:
            continue  # an apiserver that does not answer is asked again
        if current.metadata.uid != job.metadata.uid:
            return


@router.get("/ledger", response_model=LedgerDocument)
async def ledger(at: At, job: Found) -> Any:
    """The account of every attempt, its totals, and the ledger lines they were computed from."""
    lines = await at.engine.ledger(job)
    try:
        steps = await at.engine.ends_of_steps(job)  # last, as no other's may be in memory while these are
    except NotReady:  # they are out of reach: the status remembers what they added up to
        steps = []
    text = await asyncio.to_thread(_account, job, lines, steps, at.engine.run_directory(job))
    return Response(text, media_type="application/json")


def _account(
    job: TrainingJob, lines: list[dict[str, Any]], steps: list[dict[str, Any]], run_directory: str
) -> str:
    """A LedgerDocument. Of thousands of attempts it takes seconds."""
    told = account(job, lines, steps).model_copy(update={"run_directory": run_directory})
    return told.model_dump_json(by_alias=True)


@router.get("/steps", response_model=StepList)
async def steps(
    at: At,
    job: Found,
    attempt: Annotated[int | None, Query(ge=1, description="Only of this attempt.")] = None,
    after: Annotated[int, Query(ge=-1, description="Only steps after this one.")] = -1,
) -> Any:
    """Every step of every attempt: loss, seconds, tokens; for plots and proofs.

    On Kubernetes they are read from rank 0 while it runs; afterwards they are in the run directory alone,
    and the answer is 409 with the file's name, as it is on one machine of more than 128 MiB of them.
    """
    lines = await at.engine.steps(job)
    text = await asyncio.to_thread(_step_list, lines, attempt, after)
    return Response(text, media_type="application/json")


def _step_list(lines: list[dict[str, Any]], attempt: int | None, after: int) -> bytes:
    """A StepList. Of a long run it takes seconds: some lines at a time, between which others have a turn."""
    chosen = [
        line
        for line in lines
        if is_count(line.get("attempt"))
        and is_count(line.get("step"))
        and attempt in (None, line["attempt"])
        and line["step"] > after
    ]
    items = _whole(chosen)
    parts = (items[first : first + LINES_AT_ONCE] for first in range(0, len(items), LINES_AT_ONCE))
    return b'{"items":[' + b",".join(to_json(part, inf_nan_mode="null")[1:-1] for part in parts) + b"]}"


def _whole(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each step of an attempt and each validation: what came a step later is put to the first."""
    found: dict[tuple[int, int, bool], dict[str, Any]] = {}
    for line in lines:
        key = line["attempt"], line["step"], "val_loss" in line
        found[key] = {**line, **found.get(key, {})}
    return list(found.values())
