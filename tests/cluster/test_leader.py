"""Of several controllers one acts, and whoever may have lost the lease writes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.cluster.control_plane import ControlPlane
from waiting import wait_until_async

from holdfast_controller.kube.connection import MERGE_PATCH, Connection, connect
from holdfast_controller.kube.errors import NotLeader
from holdfast_controller.kube.leader import Leadership, LeaseTiming

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
QUICK = LeaseTiming(duration=60, retry=0.05)
"""Quick to see a change; what a slow machine takes to renew it loses no lease."""
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/holdfast"


class Candidate:
    """One that would lead, and whether its work goes on."""

    def __init__(self, connection: Connection, identity: str, **options: Any):
        self.leadership = Leadership(connection, "default", "holdfast", identity, timing=QUICK, **options)
        self.works = False
        self.task = asyncio.create_task(self.leadership.run(self._work))

    async def _work(self) -> None:
        self.works = True
        try:
            await asyncio.Event().wait()
        finally:
            self.works = False

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def leads(self) -> None:
        await wait_until_async(lambda: self.works and self.leadership.leads, "it to lead")


def told(control_plane: ControlPlane, story: Callable[[Connection], Coroutine[Any, Any, None]]) -> None:
    control_plane.kubectl.attempt("delete", "lease", "holdfast", "--ignore-not-found")

    async def run() -> None:
        connection = await connect(control_plane.kubectl.kubeconfig)
        try:
            await story(connection)
        finally:
            await connection.close()

    asyncio.run(run())


@asynccontextmanager
async def candidate(connection: Connection, identity: str, **options: Any) -> AsyncIterator[Candidate]:
    one = Candidate(connection, identity, **options)
    try:
        yield one
    finally:
        await one.end()


def test_one_leads_and_the_next_follows_at_once_when_it_ends(control_plane: ControlPlane) -> None:
    async def story(connection: Connection) -> None:
        async with candidate(connection, "one") as one:
            await one.leads()
            async with candidate(connection, "two") as two:
                assert not two.works
                assert (await connection.get(LEASE))["spec"]["leaseTransitions"] == 0
                await one.end()
                assert not one.leadership.leads
                await two.leads()
                lease = await connection.get(LEASE)
                assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("two", 1)

    told(control_plane, story)


def test_a_dead_leaders_lease_runs_out(control_plane: ControlPlane) -> None:
    dead = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "holdfast"},
        # Its renewal lies in the future: clocks of other machines are not believed.
        "spec": {
            "holderIdentity": "dead",
            "leaseDurationSeconds": 1,
            "renewTime": "2999-01-01T00:00:00.000000Z",
        },
    }

    async def story(connection: Connection) -> None:
        control_plane.kubectl.run("apply", "-f", "-", document=json.dumps(dead))
        async with candidate(connection, "heir") as heir:
            await heir.leads()

    told(control_plane, story)


def test_who_loses_the_lease_stops_and_writes_nothing(control_plane: ControlPlane) -> None:
    async def story(connection: Connection) -> None:
        async with candidate(connection, "one") as one:
            await one.leads()
            guarded = connection.guarded(lambda: one.leadership.leads)
            change = {"metadata": {"annotations": {"written-by": "one"}}}
            await guarded.patch(LEASE, change, MERGE_PATCH)
            taken = {"spec": {"holderIdentity": "usurper", "leaseDurationSeconds": 3600}}
            await connection.patch(LEASE, taken, MERGE_PATCH)
            await wait_until_async(lambda: not one.works, "its work to stop")
            with pytest.raises(NotLeader, match="not sent, this controller does not lead any more"):
                await guarded.patch(LEASE, change, MERGE_PATCH)
            assert (await guarded.get(LEASE))["spec"]["holderIdentity"] == "usurper"  # it may still look

    told(control_plane, story)


def test_who_was_paused_may_not_write_before_he_knows(control_plane: ControlPlane) -> None:
    async def story(connection: Connection) -> None:
        paused = [0.0]
        loop = asyncio.get_running_loop()
        async with candidate(connection, "one", clock=lambda: loop.time() + paused[0]) as one:
            await one.leads()
            paused[0] = 41  # of 60 s; two thirds are his
            assert not one.leadership.leads

    told(control_plane, story)


def test_work_that_ends_by_itself_is_told(control_plane: ControlPlane) -> None:
    async def story(connection: Connection) -> None:
        async def work() -> None:
            raise ValueError("out of ideas")

        leadership = Leadership(connection, "default", "holdfast", "one", timing=QUICK)
        with pytest.raises(ValueError, match="out of ideas"):
            await leadership.run(work)
        assert (await connection.get(LEASE))["spec"]["holderIdentity"] == ""

    told(control_plane, story)
