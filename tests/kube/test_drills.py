"""What a drill cannot do on a cluster is refused with the reason and with what can be done; what it began and
could not do leaves no mark."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile
from tests.kube.documents import RUNNING, of_attempt, pod

from holdfast_controller.cluster import Invalid, Unavailable
from holdfast_controller.drills import DrillKind
from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube.observation import DRILLED
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.taking import refuse, take
from holdfast_controller.pod_settings import PodSettings
from holdfast_controller.problem import Forbidden

JOB = TrainingJob(
    metadata=Metadata(name="gpt", namespace="team", uid="job-1"), spec=Spec(command=["python"], replicas=3)
)


@pytest.mark.parametrize("kind", [DrillKind.FREEZE, DrillKind.OOM])
def test_what_runs_a_program_in_a_pod(kind: DrillKind) -> None:
    said = rf"{kind.value}: it runs a program .* \(jobs.execInPods in the chart's values\): try kill, notice"
    with pytest.raises(Invalid, match=said):
        refuse(kind, PodSettings(drill_nodes=True))
    refuse(kind, PodSettings(exec_in_pods=True))


def test_a_node_that_others_use_too() -> None:
    with pytest.raises(Invalid, match=r"node: it cordons .* \(jobs.drillNodes in the chart's values\): try"):
        refuse(DrillKind.NODE, PodSettings(exec_in_pods=True))
    refuse(DrillKind.NODE, PodSettings(drill_nodes=True))


@pytest.mark.parametrize("kind", [DrillKind.EVICT, DrillKind.NOTICE, DrillKind.KILL])
def test_what_can_always_be_done(kind: DrillKind) -> None:
    refuse(kind, PodSettings())


class Refusing:
    """Has three replicas on one node, and lets one of them go: a PodDisruptionBudget wants the others."""

    def __init__(self) -> None:
        self.pods = {f"gpt-1-worker-{index}": self._pod(index) for index in range(3)}
        self.taken: list[str] = []

    @staticmethod
    def _pod(index: int) -> dict[str, Any]:
        one = of_attempt(JOB, pod(index, state=RUNNING))
        one["spec"] = {"nodeName": "n1"}
        return one

    def drilled(self) -> dict[str, str]:
        marks = {name: one["metadata"]["annotations"].get(DRILLED) for name, one in self.pods.items()}
        return {name: mark for name, mark in marks.items() if mark}

    async def list_or_watch(self, request: web.Request) -> web.Response:
        if "watch" in request.query:
            await asyncio.Event().wait()
        items = list(self.pods.values()) if request.path == PODS else []
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def cordon(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def patch(self, request: web.Request) -> web.Response:
        one = self.pods[request.match_info["pod"]]
        one["metadata"]["annotations"] |= (await request.json())["metadata"]["annotations"]
        return web.json_response(one)

    async def end(self, request: web.Request) -> web.Response:
        if self.taken:
            refusal = {"code": 429, "message": "Cannot evict pod: it would violate the disruption budget"}
            return web.json_response(refusal, status=429, headers={"Retry-After": "0"})
        self.taken.append(request.match_info["pod"])
        return web.json_response({}, status=201)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([DrillKind.NODE], id="a node of which one goes"),
        pytest.param([DrillKind.EVICT, DrillKind.EVICT], id="an eviction"),
        pytest.param([DrillKind.KILL, DrillKind.KILL], id="a kill"),
    ],
)
def test_a_replica_that_no_drill_could_take_does_not_pass_for_drilled(
    kinds: list[DrillKind], tmp_path: Path
) -> None:
    """What ends it later is its own failure, and counts as one; and it can be drilled again."""

    async def story() -> None:
        server, one = Refusing(), "/api/v1/namespaces/team/pods/{pod}"
        routes = [
            web.get(PODS, server.list_or_watch),
            web.patch("/api/v1/nodes/n1", server.cordon),
            web.patch(one, server.patch),
            web.delete(one, server.end),
            web.post(f"{one}/eviction", server.end),
        ]
        async with connected(routes, tmp_path) as connection:
            pieces = Pieces(connection)
            async with meanwhile(pieces.run()):
                await pieces.synced()
                *first, last = enumerate(kinds)
                for replica, kind in first:
                    await take(connection, pieces, JOB, 1, replica, kind)
                with pytest.raises(Unavailable, match="disruption budget"):
                    await take(connection, pieces, JOB, 1, *last)
        assert server.taken == ["gpt-1-worker-0"]
        assert sorted(server.drilled()) == server.taken

    asyncio.run(story())


def test_what_a_policy_of_the_cluster_forbids_is_not_told_to_be_tried_again(tmp_path: Path) -> None:
    """A drill was answered 503, as if the same could be had a second later."""
    why = 'admission webhook "evictions.example.org" denied the request: not in working hours'

    async def forbid(_: web.Request) -> web.Response:
        return web.json_response({"code": 403, "reason": "Forbidden", "message": why}, status=403)

    async def story() -> None:
        server, one = Refusing(), "/api/v1/namespaces/team/pods/{pod}"
        routes = [
            web.get(PODS, server.list_or_watch),
            web.patch(one, server.patch),
            web.post(f"{one}/eviction", forbid),
        ]
        async with connected(routes, tmp_path) as connection:
            pieces = Pieces(connection)
            async with meanwhile(pieces.run()):
                await pieces.synced()
                with pytest.raises(Forbidden, match="not in working hours"):
                    await take(connection, pieces, JOB, 1, 0, DrillKind.EVICT)
        assert server.drilled() == {}

    asyncio.run(story())
