"""What the routes stand on, built once by the composition root.

What FastAPI is to call for each request is a coroutine function even where it awaits nothing: a plain one it
calls in a thread, which takes longer than most of them.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Path, Query, Request, Response

from ..cluster import Engine, Invalid, JobStore
from ..jobs import JobName, Namespace, TrainingJob, utcnow
from ..policy.lost_work import shown


def _no_fault() -> str | None:
    return None


def _nothing() -> tuple[str, ...]:
    return ()


class Remembered:
    """An answer that is good for a while; whoever asks meanwhile gets it too."""

    def __init__(self, seconds: float = 1.0):
        self._seconds = seconds
        self._asking = asyncio.Lock()
        self._until = float("-inf")
        self._answer: str | None = None

    async def fresh(self, ask: Callable[[], Awaitable[str | None]]) -> str | None:
        async with self._asking:
            if time.monotonic() >= self._until:
                self._answer = await ask()
                self._until = time.monotonic() + self._seconds
            return self._answer


@dataclass(frozen=True)
class Backend:
    """The ports, and what the process knows about itself."""

    store: JobStore
    engine: Engine
    series: Callable[[], Iterable[bytes]] = tuple
    """What Prometheus is told, in pieces."""
    reconciler_fault: Callable[[], str | None] = _no_fault
    """Why the reconciler does no work, or None while it does."""
    missing: Callable[[], tuple[str, ...]] = _nothing
    """What jobs need and the cluster lacks, a sentence each."""
    readiness: Remembered = field(default_factory=Remembered)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process shuts down: streams end then, so that it need not wait for them."""


async def backend(request: Request) -> Backend:
    found: Backend = request.app.state.backend
    return found


At = Annotated[Backend, Depends(backend)]
InNamespace = Annotated[Namespace, Path(description="The namespace of the job.")]
Named = Annotated[JobName, Path(description="The job's name.")]
AttemptNumber = Annotated[int | None, Query(ge=1, description="By default the newest attempt.")]


async def say_what_is_old(at: At, response: Response) -> None:
    """Jobs that cannot be written any more are shown as they were: an answer with them says so, and why."""
    if at.store.fault is not None:
        said = at.store.fault.encode("ascii", "replace").decode().replace('"', "'")
        response.headers["Warning"] = f'110 holdfast "what is told of jobs may be out of date: {said}"'


async def only_known_query(request: Request) -> None:
    """Refuse a query parameter that the route does not know: `?dryrun=true` must not submit a job."""
    if not request.query_params:
        return  # what routes know is worked out once, and takes longer than most requests
    described = request.app.openapi()["paths"][request.scope["route"].path_format]
    parameters = described[request.method.lower()].get("parameters", [])
    known = [parameter["name"] for parameter in parameters if parameter["in"] == "query"]
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), {key.lower(): key for key in known}, n=1)
            right = next((key for key in known if near and key.lower() == near[0]), None)
            hint = f"did you mean {right!r}?" if right else f"known: {', '.join(known) or 'none'}"
            raise Invalid(f"query: unknown parameter {name!r}; {hint}")


async def find_job(at: At, namespace: InNamespace, name: Named) -> TrainingJob:
    return shown(await at.store.get(namespace, name), utcnow())


Found = Annotated[TrainingJob, Depends(find_job)]
"""The job that the path names; 404 where there is none."""
