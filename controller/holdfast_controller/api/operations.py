"""What operators and machines ask: alive, ready, metrics."""

from __future__ import annotations

import asyncio

import structlog
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..cluster import HoldfastError
from .backend import At

log = structlog.get_logger(__name__)

STORE_SECONDS = 2.0
"""A store that takes longer to answer a read is not ready."""

probes = APIRouter(tags=["operations"])
operations = APIRouter(tags=["operations"])


@probes.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """The process answers."""
    return "ok\n"


@probes.get("/readyz", responses={503: {"description": "Not ready; `checks` says which part."}})
async def readyz(at: At) -> JSONResponse:
    """The store can be read and the reconciler works. Anybody may ask, so causes are in the log alone."""
    checks = {"store": "ok", "reconciler": "ok"}
    try:
        async with asyncio.timeout(STORE_SECONDS):
            await at.store.list_jobs("default")
    except (HoldfastError, TimeoutError, OSError) as error:
        log.warning("not ready: the store does not answer", error=str(error) or "timeout")
        checks["store"] = "failed"
    if (fault := at.reconciler_fault()) is not None:
        log.warning("not ready: the reconciler does no work", error=fault)
        checks["reconciler"] = "failed"
    if at.closing.is_set():
        checks["shutdown"] = "under way"
    ready = set(checks.values()) == {"ok"}
    return JSONResponse({"ready": ready, "checks": checks}, 200 if ready else 503)


@operations.get("/metrics", response_class=PlainTextResponse)
async def metrics(at: At) -> Response:
    """All series of the controller, in the Prometheus text format."""
    body = await asyncio.to_thread(generate_latest, at.registry)
    return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST})
