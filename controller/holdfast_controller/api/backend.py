"""What the routes stand on, built once by the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Path, Query, Request
from prometheus_client import REGISTRY, CollectorRegistry

from ..cluster import Engine, JobStore
from ..jobs import JobName, Namespace, TrainingJob


def _no_fault() -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """The ports, and what the process knows about itself."""

    store: JobStore
    engine: Engine
    registry: CollectorRegistry = REGISTRY
    reconciler_fault: Callable[[], str | None] = _no_fault
    """Why the reconciler does no work, or None while it does."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process shuts down: streams end then, so that it need not wait for them."""


def backend(request: Request) -> Backend:
    found: Backend = request.app.state.backend
    return found


At = Annotated[Backend, Depends(backend)]
InNamespace = Annotated[Namespace, Path(description="The namespace of the job.")]
Named = Annotated[JobName, Path(description="The job's name.")]
AttemptNumber = Annotated[int | None, Query(ge=1, description="By default the newest attempt.")]


async def find_job(at: At, namespace: InNamespace, name: Named) -> TrainingJob:
    return await at.store.get(namespace, name)


Found = Annotated[TrainingJob, Depends(find_job)]
"""The job that the path names; 404 where there is none."""
