"""The application: routes, and the layers around them, outermost first:

    request log -> HEAD as GET -> access (token) -> body limit -> errors as problems -> routes

A request that may not pass is answered before its body is read; a body too large before it is kept.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from ..cluster import Engine, JobStore
from . import lifecycle, operations, problems, records
from .access import RECHECK_SECONDS, Access, Gate, TokenGate
from .backend import Backend, only_known_query, say_what_is_old
from .heads import Heads
from .limits import BODY_LIMIT, BodyLimit
from .requests import RequestLog
from .shapes import DrillRequest

_DESCRIPTION = """Train PyTorch models on interruptible GPUs and lose no work.

Every error is a problem document (RFC 9457): `type` is for programs, `detail` and `errors` for people."""


def create_app(
    store: JobStore,
    engine: Engine,
    *,
    token: str | None = None,
    gate: Gate | None = None,
    series: Callable[[], Iterable[bytes]] = tuple,
    reconciler_fault: Callable[[], str | None] = lambda: None,
    missing: Callable[[], tuple[str, ...]] = lambda: (),
    closing: asyncio.Event | None = None,
    body_limit: int = BODY_LIMIT,
    recheck_seconds: float = RECHECK_SECONDS,
) -> FastAPI:
    """The ASGI application over a job store and an engine.

    `gate` decides who may call; without one it is `token`, and where that is None too, nobody is asked for
    one (and loopback names alone are answered); of streams it is asked again every `recheck_seconds`.
    `series` is what Prometheus is told, in pieces (`Metrics.text`).
    `reconciler_fault` says why the reconciler does no work, None while it does; `missing` names what jobs
    still wait for. Setting `closing` ends all streams.
    """
    app = FastAPI(
        title="Holdfast",
        description=_DESCRIPTION,
        version=version("holdfast"),
        separate_input_output_schemas=False,
        redoc_url=None,
    )
    app.state.backend = Backend(
        store, engine, series, reconciler_fault, missing, closing=closing or asyncio.Event()
    )
    # Declares the scheme in OpenAPI; `Access` is what enforces it, in front of every route.
    bearer = HTTPBearer(auto_error=False, description="The controller's token.")
    app.include_router(operations.probes)
    for router in (lifecycle.router, records.router, operations.operations):
        app.include_router(
            router,
            dependencies=[Depends(bearer), Depends(only_known_query), Depends(say_what_is_old)],
            responses=problems.RESPONSES,
        )
    problems.install(app)
    described = app.openapi
    app.openapi = functools.cache(lambda: _with_schemas(described()))  # type: ignore[method-assign]
    app.add_middleware(BodyLimit, limit=body_limit)
    app.add_middleware(Access, gate=gate or TokenGate(token), recheck_seconds=recheck_seconds)
    app.add_middleware(Heads)
    app.add_middleware(RequestLog)
    return app


def _with_schemas(openapi: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with what routes refer to besides the models that FastAPI knows of."""
    schemas = openapi["components"]["schemas"]
    for model in (problems.Problem, DrillRequest):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    return openapi
