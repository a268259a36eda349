"""Submit, list, watch, get, delete, suspend, resume, drill: all that changes a job or shows one.

REST does nothing that a write to the job store could not do: the reconciler acts on what it finds
there. A drill is the exception; it goes to the engine, as a spot reclaim would.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.datastructures import Headers

from ..cluster import (
    Conflict,
    Event,
    HoldfastError,
    Idempotency,
    Invalid,
    NotFound,
    NotReady,
    ReplicaState,
)
from ..documents import parse, to_job, validate
from ..jobs import KIND, Phase, TrainingJob, utcnow
from ..policy.lost_work import shown
from ..problem import UnsupportedMedia
from .backend import At, Backend, Found, InNamespace, Named
from .selection import Selection, WatchFilter, page, parse_selector, select
from .shapes import DrillRequest, DrillResult, ListMetadata, PlanDocument, TrainingJobList
from .streams import PING_SECONDS, until_closing

T = TypeVar("T")

router = APIRouter(tags=["jobs"])

WRITE_TRIES = 5
"""A write that meets another one is decided again from what that one left."""

SMALL_BODY = 4096
"""Bytes that are parsed in less than 10 ms whatever is in them, and mostly in less than a thread takes."""

_YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
_JOB_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media: {"schema": {"$ref": "#/components/schemas/TrainingJob"}}
            for media in ("application/json", "application/yaml")
        },
    }
}


def _document(body: bytes, headers: Headers, holds: str) -> dict[str, Any]:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise UnsupportedMedia(f"Content-Encoding is {encoding}: send the body as it is, not packed")
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media == "application/json" or media.endswith("+json"):
        return parse(body, "the body", "json", holds=holds)
    if media in _YAML_TYPES:
        return parse(body, "the body", "yaml", holds=holds)
    raise UnsupportedMedia(
        f"Content-Type is {media or 'missing'}: send application/json or application/yaml "
        "(curl: -H 'Content-Type: application/yaml' --data-binary @job.yaml)"
    )


def _job(body: bytes, headers: Headers, namespace: str) -> TrainingJob:
    return to_job(_document(body, headers, KIND), namespace)


def _drill(body: bytes, headers: Headers) -> DrillRequest:
    return validate(DrillRequest, _document(body, headers, "drill") if body.strip() else {})


async def _read(read: Callable[..., T], body: bytes, *others: object) -> T:
    """A megabyte of YAML takes seconds to parse: the other requests need not wait for it."""
    if len(body) <= SMALL_BODY:
        return read(body, *others)
    return await asyncio.to_thread(read, body, *others)


@router.post(
    "/v1/namespaces/{namespace}/jobs",
    status_code=201,
    response_model=TrainingJob,
    openapi_extra=_JOB_BODY,
    responses={200: {"model": PlanDocument, "description": "With dryRun: the plan; nothing was submitted."}},
)
async def submit(
    at: At,
    namespace: InNamespace,
    request: Request,
    response: Response,
    dry_run: Annotated[bool, Query(alias="dryRun", description="Answer the plan and do nothing.")] = False,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1, max_length=255, description="Sent again with the same body, answers the same job."
        ),
    ] = None,
) -> Any:
    """Submit a job. It is refused where it could never run on this engine, with every reason."""
    body = await request.body()
    job = await _read(_job, body, request.headers, namespace)
    plan = at.engine.plan(job)
    if not plan.reasons:
        plan = replace(plan, reasons=await at.engine.objections(job))
    if dry_run:
        taken = await _taken(at, job)
        return Response(
            PlanDocument.of(plan, taken).model_dump_json(by_alias=True), media_type="application/json"
        )
    if plan.reasons:
        raise Invalid(f"{job.key} cannot run here: {'; '.join(plan.reasons)}", list(plan.reasons))
    idempotency = Idempotency(idempotency_key, fingerprint(job)) if idempotency_key else None
    created = await at.store.create(job, idempotency=idempotency)
    response.headers["Location"] = f"/v1/namespaces/{namespace}/jobs/{created.metadata.name}"
    return created


def fingerprint(job: TrainingJob) -> str:
    """A digest of what the user asked for: equal for two bodies that mean the same job, and for controllers
    of two versions, of which one knows more keys: a request sent twice may meet both during an upgrade."""
    meta = job.metadata
    asked = {
        "spec": job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "metadata": meta.model_dump(include={"name", "namespace", "labels", "annotations"}),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


async def _taken(at: Backend, job: TrainingJob) -> list[str]:
    try:
        await at.store.get(job.metadata.namespace, job.metadata.name)
    except NotFound:
        return []
    return [f"the name is taken: {job.key} exists"]


@dataclass(frozen=True)
class Listing:
    """The query of a list or a watch."""

    selection: Selection
    limit: int
    token: str
    watch: bool


async def listing(
    phase: Annotated[list[Phase] | None, Query(description="Only jobs in one of these phases.")] = None,
    label_selector: Annotated[str, Query(alias="labelSelector", description="`a=b,c!=d,e,!f`")] = "",
    name: Annotated[str | None, Query(description="Only the job of this name.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    continue_: Annotated[str, Query(alias="continue", description="From the page before.")] = "",
    watch: Annotated[bool, Query(description="Server-sent events ADDED, MODIFIED, DELETED.")] = False,
) -> Listing:
    selection = Selection(None, frozenset(phase or ()), parse_selector(label_selector), name)
    return Listing(selection, limit, continue_, watch)


Listed = Annotated[Listing, Depends(listing)]
_WATCHED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {}},
        "description": "A page of jobs; with watch, changes as they come.",
    }
}


@router.get("/v1/jobs", response_model=TrainingJobList, responses=_WATCHED)
async def list_everywhere(at: At, asked: Listed) -> Any:
    """Jobs of all namespaces, oldest first."""
    return await _list_or_watch(at, asked)


@router.get("/v1/namespaces/{namespace}/jobs", response_model=TrainingJobList, responses=_WATCHED)
async def list_in_namespace(at: At, namespace: InNamespace, asked: Listed) -> Any:
    """Jobs of a namespace, oldest first."""
    return await _list_or_watch(at, replace(asked, selection=replace(asked.selection, namespace=namespace)))


async def _list_or_watch(at: Backend, asked: Listing) -> Any:
    selection = asked.selection
    if asked.watch:
        return EventSourceResponse(_changes(at, selection), ping=PING_SECONDS, send_timeout=30)
    jobs = await at.store.list_jobs(selection.namespace)
    found = page(select(jobs, selection), asked.limit, asked.token)
    return TrainingJobList(
        metadata=ListMetadata(continue_=found.next_token, remaining_item_count=found.remaining),
        items=[shown(job, utcnow()) for job in found.items],
    )


async def _changes(at: Backend, selection: Selection) -> AsyncIterator[ServerSentEvent]:
    watched = WatchFilter(selection)
    async for change in until_closing(at.store.watch(selection.namespace), at.closing):
        told = watched.apply(change)
        if told is not None:
            body = shown(told.job, utcnow()).model_dump_json(by_alias=True)
            yield ServerSentEvent(body, event=told.type)


@router.get("/v1/namespaces/{namespace}/jobs/{name}", response_model=TrainingJob)
async def get(job: Found) -> Any:
    """One job, with all that is known about it."""
    return job


@router.delete("/v1/namespaces/{namespace}/jobs/{name}", status_code=202, response_model=TrainingJob)
async def delete(at: At, namespace: InNamespace, name: Named) -> Any:
    """Delete a job. It is gone once a GET answers 404.

    Its run directory goes with it on one machine; one on a PersistentVolumeClaim stays there.
    """
    return shown(await at.store.mark_deleted(namespace, name), utcnow())


@router.post("/v1/namespaces/{namespace}/jobs/{name}/suspend", response_model=TrainingJob)
async def suspend(at: At, namespace: InNamespace, name: Named) -> Any:
    """Stop the job after a checkpoint and keep everything."""
    return shown(await _set_suspend(at, namespace, name, True), utcnow())


@router.post("/v1/namespaces/{namespace}/jobs/{name}/resume", response_model=TrainingJob)
async def resume(at: At, namespace: InNamespace, name: Named) -> Any:
    """Let a suspended job go on from its last checkpoint."""
    return shown(await _set_suspend(at, namespace, name, False), utcnow())


async def _set_suspend(at: Backend, namespace: str, name: str, value: bool) -> TrainingJob:
    for _ in range(WRITE_TRIES):
        job = await at.store.get(namespace, name)
        if job.status.phase.final:
            verb = "suspend" if value else "resume"
            raise NotReady(f"{job.key} is {job.status.phase}: there is nothing to {verb}")
        if job.metadata.deletion_timestamp is not None:
            raise NotReady(f"{job.key} is being deleted")
        if job.faults:
            raise Invalid(
                f"{job.key}: its spec cannot be read, so it cannot be written back whole; correct it with "
                f"`kubectl edit tj {name} -n {namespace}`: {'; '.join(job.faults)}",
                list(job.faults),
            )
        if job.spec.suspend == value:
            return job
        changed = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": value})})
        try:
            return await at.store.replace_spec(changed)
        except Conflict:
            continue
    raise Conflict(f"{namespace}/{name} changed {WRITE_TRIES} times while it was being written; try again")


@router.post(
    "/v1/namespaces/{namespace}/jobs/{name}/drill",
    status_code=202,
    response_model=DrillResult,
    openapi_extra={
        "requestBody": {
            "content": {
                media: {"schema": {"$ref": "#/components/schemas/DrillRequest"}}
                for media in ("application/json", "application/yaml")
            }
        }
    },
)
async def drill(at: At, job: Found, request: Request) -> Any:
    """Disrupt a replica of the running attempt; without a body a random one, without notice."""
    body = await request.body()
    asked = await _read(_drill, body, request.headers)
    attempt = job.status.attempt
    there = job.as_of(attempt).spec.replicas
    if asked.replica is not None and asked.replica >= there:
        raise Invalid(f"replica {asked.replica}: {job.key} has {there}, numbered from 0 to {there - 1}")
    if not attempt or job.status.phase.final:
        raise NotReady(f"{job.key} is {job.status.phase}: nothing of it runs that could be disrupted")
    if job.status.phase is Phase.SUSPENDED:
        raise NotReady(f"{job.key} is Suspended: nothing of it runs; `holdfast resume {job.key}` first")
    replica = asked.replica if asked.replica is not None else await _random_replica(at, job, attempt)
    await at.engine.drill(job, attempt, replica, asked.kind)
    told = Event(
        datetime.now(UTC), "Warning", "Drilled", f"replica {replica} of attempt {attempt}: {asked.kind.value}"
    )
    try:
        await at.store.record_event(job, told)
    except HoldfastError:
        pass  # The drill was done, and that is what the answer must say.
    return DrillResult(attempt=attempt, replica=replica, kind=asked.kind)


async def _random_replica(at: Backend, job: TrainingJob, attempt: int) -> int:
    seen = await at.engine.observe(job, attempt)
    # Not one that is being taken already: the engine would refuse it, though others run.
    running = [
        replica.index
        for replica in seen.replicas
        if replica.state == ReplicaState.RUNNING and not replica.disrupted
    ]
    if not running:
        raise NotReady(f"no replica of attempt {attempt} of {job.key} runs now; try again when it does")
    return random.choice(running)
