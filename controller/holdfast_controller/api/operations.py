"""What operators and machines ask: alive, ready, metrics."""

from __future__ import annotations

import asyncio

import structlog
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..cluster import HoldfastError, NotFound
from .backend import At, Backend
from .shapes import Readiness

log = structlog.get_logger(__name__)

STORE_SECONDS = 2.0
"""A store that takes longer to answer a read is not ready."""
ASKED_FOR = ("default", "holdfast-readiness")
"""A job that need not be there: that it is not is an answer too, at the same price for any number of jobs."""

probes = APIRouter(tags=["operations"])
operations = APIRouter(tags=["operations"])


@probes.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """The process answers."""
    return "ok\n"


@probes.get(
    "/readyz",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Not ready; `checks` says which part."}},
)
async def readyz(at: At) -> JSONResponse:
    """The store can be read, and as far as is known written, and the reconciler works. Anybody may ask, so
    causes are in the log alone.
    """
    checks = {"store": "ok", "reconciler": "ok"}
    # Asked at most once at a time and then not for a second: no stranger sets the pace of our reads.
    if await at.readiness.fresh(lambda: _store_fault(at)) is not None:
        checks["store"] = "failed"
    if (fault := at.reconciler_fault()) is not None:
        log.warning("not ready: the reconciler does no work", error=fault)
        checks["reconciler"] = "failed"
    if at.closing.is_set():
        checks["shutdown"] = "under way"
    ready = set(checks.values()) == {"ok"}
    answer = Readiness(ready=ready, checks=checks, missing=list(at.missing()))
    return JSONResponse(answer.model_dump(by_alias=True), 200 if ready else 503)


async def _store_fault(at: Backend) -> str | None:
    try:
        async with asyncio.timeout(STORE_SECONDS):
            await at.store.get(*ASKED_FOR)
    except NotFound:
        if (fault := at.store.fault) is not None:
            log.warning("not ready: the store takes no writes", error=fault)
        return fault
    except (HoldfastError, TimeoutError, OSError) as error:
        fault = str(error) or "timeout"
        log.warning("not ready: the store does not answer", error=fault)
        return fault
    return None


@operations.get("/metrics", response_class=PlainTextResponse)
async def metrics(at: At) -> Response:
    """All series of the controller, in the Prometheus text format."""
    parts = []
    for part in at.series():
        parts.append(part)
        await asyncio.sleep(0)  # of ten thousand jobs the whole takes a moment in which others have to wait
    return Response(b"".join(parts), headers={"Content-Type": CONTENT_TYPE_LATEST})
