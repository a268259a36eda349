"""Who leads, where the apiserver or the controller is under load. A server over HTTP plays the apiserver, and
keeps one lease."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web
from small_apiserver import connected, meanwhile
from waiting import wait_until_async

from holdfast_controller.kube.connection import CONNECTIONS, MERGE_PATCH
from holdfast_controller.kube.leader import Leadership, LeaseTiming

LEASES = "/apis/coordination.k8s.io/v1/namespaces/holdfast/leases"
OFTEN = LeaseTiming(retry=0.2)


class Lease:
    """So many writes of it are refused as `busy` says."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.busy = 0

    @property
    def version(self) -> int:
        return int(self.kept["metadata"]["resourceVersion"])

    def routes(self) -> list[web.RouteDef]:
        one = f"{LEASES}/holdfast"
        return [web.post(LEASES, self.make), web.get(one, self.get), web.put(one, self.put)]

    async def make(self, request: web.Request) -> web.Response:
        self.kept = await request.json()
        self.kept["metadata"]["resourceVersion"] = "1"
        return web.json_response(self.kept, status=201)

    async def get(self, _: web.Request) -> web.Response:
        return web.json_response(self.kept or {"message": "not found"}, status=200 if self.kept else 404)

    async def put(self, request: web.Request) -> web.Response:
        if self.busy:
            self.busy -= 1
            return web.json_response({"message": "try later"}, status=429, headers={"Retry-After": "32"})
        before = self.version
        self.kept = await request.json()
        self.kept["metadata"]["resourceVersion"] = str(before + 1)
        return web.json_response(self.kept)


class Work:
    """What is done while one leads."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def test_an_apiserver_that_is_too_busy_now_and_then_ends_no_leadership(tmp_path: Path) -> None:
    """It wants to be asked again in half a minute: who did as it asks led no more by then, and what was under
    way for all jobs broke off."""

    async def story() -> None:
        lease, work = Lease(), Work()
        async with connected(lease.routes(), tmp_path) as connection:
            leadership = Leadership(connection, "holdfast", "holdfast", "one", timing=OFTEN)
            async with meanwhile(leadership.run(work.run)):
                await work.began.wait()
                lease.busy, version = 3, lease.version
                await wait_until_async(lambda: lease.version > version + 2, "further renewals")
                assert (lease.busy, work.ended.is_set(), leadership.leads) == (0, False, True)

    asyncio.run(story())


def test_a_lease_is_renewed_before_all_else_that_waits_its_turn(tmp_path: Path) -> None:
    """As where a zone goes, and the logs of thousands of pods are read and noted: a lease that waited behind
    them was lost, and the next leader had as much to do."""

    async def nodes(_: web.Request) -> web.Response:
        return web.json_response({})

    async def story() -> None:
        lease, work = Lease(), Work()
        routes = [*lease.routes(), web.get("/api/v1/nodes", nodes)]
        async with connected(routes, tmp_path) as everybody:
            connection = everybody.apart(per_second=20, burst=1)
            others = [asyncio.create_task(connection.get("/api/v1/nodes")) for _ in range(100)]
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            leadership = Leadership(connection, "holdfast", "holdfast", "one", timing=OFTEN)
            async with meanwhile(leadership.run(work.run)):
                await work.began.wait()
                assert not all(one.done() for one in others)
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(story())


def test_requests_that_hang_leave_a_connection_for_the_lease(tmp_path: Path) -> None:
    """As where the last lines of a wide gang are noted on its pods, and an admission webhook, which is
    asked about each, does not answer: the lease waited behind them, and the next leader had as much to do."""
    asked = []

    async def hang(request: web.Request) -> web.Response:
        asked.append(request.path)
        await asyncio.Event().wait()
        raise AssertionError

    async def story() -> None:
        lease, work = Lease(), Work()
        pods = "/api/v1/namespaces/team-a/pods"
        async with connected([*lease.routes(), web.patch(f"{pods}/{{name}}", hang)], tmp_path) as connection:
            leadership = Leadership(connection, "holdfast", "holdfast", "one", timing=OFTEN)
            others = [
                asyncio.create_task(connection.patch(f"{pods}/gpt-1-worker-{index}", {}, MERGE_PATCH))
                for index in range(CONNECTIONS + 1)
            ]
            await wait_until_async(lambda: len(asked) == CONNECTIONS, "as many as there may be to be sent")
            async with meanwhile(leadership.run(work.run)):
                async with asyncio.timeout(LeaseTiming().duration / 3):
                    await work.began.wait()
                    version = lease.version
                    await wait_until_async(lambda: lease.version > version, "a renewal")
                assert leadership.leads
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(story())
