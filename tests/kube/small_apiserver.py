"""An apiserver of a test's own: the few routes that a story needs, behind the controller's own connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from holdfast_controller.kube.connection import Connection, connect


@asynccontextmanager
async def connected_to(port: int, directory: Path) -> AsyncIterator[Connection]:
    """A server on this machine that takes any token; its kubeconfig lies in `directory`."""
    file = directory / "kubeconfig"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "test", "user": {"token": "a-token"}}],
            }
        )
    )
    connection = await connect(file)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def connected(
    routes: Iterable[web.RouteDef], directory: Path, ahead: timedelta = timedelta(0)
) -> AsyncIterator[Connection]:
    """To a server with these routes (see `connected_to`), whose clock is so much ahead."""

    async def tell_time(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Date"] = format_datetime(datetime.now(UTC) + ahead, usegmt=True)

    app = web.Application()
    app.on_response_prepare.append(tell_time)
    app.add_routes(list(routes))
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with connected_to(runner.addresses[0][1], directory) as connection:
            yield connection
    finally:
        await runner.cleanup()


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """What is within goes on beside `work`, which ends with it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
