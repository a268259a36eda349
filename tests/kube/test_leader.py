"""Who leads, where the apiserver is under load. A server over HTTP plays it, and keeps one lease."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web
from small_apiserver import connected, meanwhile
from waiting import wait_until_async

from holdfast_controller.kube.leader import Leadership, LeaseTiming

LEASES = "/apis/coordination.k8s.io/v1/namespaces/holdfast/leases"


def test_an_apiserver_that_is_too_busy_now_and_then_ends_no_leadership(tmp_path: Path) -> None:
    """It wants to be asked again in half a minute: who did as it asks led no more by then, and what was under
    way for all jobs broke off."""
    lease: dict[str, Any] = {}
    busy = 0

    async def make(request: web.Request) -> web.Response:
        lease.update(await request.json())
        lease["metadata"]["resourceVersion"] = "1"
        return web.json_response(lease, status=201)

    async def get(_: web.Request) -> web.Response:
        return web.json_response(lease or {"message": "not found"}, status=200 if lease else 404)

    async def put(request: web.Request) -> web.Response:
        nonlocal busy
        if busy:
            busy -= 1
            return web.json_response({"message": "try later"}, status=429, headers={"Retry-After": "32"})
        lease.update(await request.json())
        lease["metadata"]["resourceVersion"] = str(int(lease["metadata"]["resourceVersion"]) + 1)
        return web.json_response(lease)

    async def story() -> None:
        nonlocal busy
        routes = [
            web.post(LEASES, make),
            web.get(f"{LEASES}/holdfast", get),
            web.put(f"{LEASES}/holdfast", put),
        ]
        began = asyncio.Event()
        ended = asyncio.Event()

        async def work() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with connected(routes, tmp_path) as connection:
            timing = LeaseTiming(retry=0.2)
            leadership = Leadership(connection, "holdfast", "holdfast", "one", timing=timing)
            async with meanwhile(leadership.run(work)):
                await began.wait()
                busy = 3
                version = int(lease["metadata"]["resourceVersion"])
                await wait_until_async(
                    lambda: int(lease["metadata"]["resourceVersion"]) > version + 2, "further renewals"
                )
                assert (busy, ended.is_set(), leadership.leads) == (0, False, True)

    asyncio.run(story())
