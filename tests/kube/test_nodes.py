"""What a node says of itself is asked for once, and never in the way where it cannot be read."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from aiohttp import web
from small_apiserver import connected
from structlog.testing import capture_logs

from holdfast_controller.kube.connection import Connection
from holdfast_controller.kube.nodes import CUT_SECONDS, KEPT_SECONDS, UNREAD_SECONDS, Nodes
from holdfast_controller.policy.cost import Node

LABELS = {"karpenter.sh/capacity-type": "spot"}


class World:
    """An apiserver that has nodes, or refuses them."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.status = 200
        self.asked: list[str] = []

    def put(self, name: str) -> None:
        self.nodes[name] = {
            "metadata": {"name": name, "labels": LABELS},
            "status": {"allocatable": {"cpu": "8"}},
        }

    async def answer(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.asked.append(name)
        status = self.status if self.status != 200 or name in self.nodes else 404
        return web.json_response(
            self.nodes[name] if status == 200 else {"kind": "Status", "code": status}, status=status
        )

    def connected(self, directory: Path) -> AbstractAsyncContextManager[Connection]:
        return connected([web.get("/api/v1/nodes/{name}", self.answer)], directory)


def test_a_node_is_read_once_and_what_was_known_of_it_outlives_it(tmp_path: Path) -> None:
    world, now = World(), [0.0]
    world.put("n1")

    async def story() -> None:
        async with world.connected(tmp_path) as connection:
            nodes = Nodes(connection, clock=lambda: now[0])
            known = Node("n1", LABELS, {"cpu": "8"})
            for _ in range(3):
                assert await nodes.of(["n1", "n1"]) == {"n1": known}
            assert world.asked == ["n1"]

            # Reclaimed, and its pods' record is written only now.
            del world.nodes["n1"]
            now[0] += KEPT_SECONDS + 1
            assert await nodes.of(["n1"]) == {"n1": known}

            # A right that somebody took away: said once, and asked for again later.
            world.status = 403
            now[0] += KEPT_SECONDS + 1
            with capture_logs() as logs:
                assert await nodes.of(["n1"]) == {"n1": known}
                assert await nodes.of(["n2", "n3"]) == {"n2": Node("n2", {}, {}), "n3": Node("n3", {}, {})}
            assert [entry["event"] for entry in logs] == ["cannot read a node; its capacity is not known"]
            world.status = 200
            world.put("n2")
            now[0] += UNREAD_SECONDS + 1
            assert (await nodes.of(["n2"]))["n2"].labels == LABELS

    asyncio.run(story())


def test_a_node_that_the_apiserver_could_not_tell_of_is_asked_for_again(tmp_path: Path) -> None:
    world, now = World(), [0.0]
    world.put("n1")

    async def story() -> None:
        async with world.connected(tmp_path) as connection:
            nodes = Nodes(connection, clock=lambda: now[0])
            world.status = 500
            for _ in range(3):
                assert await nodes.of(["n1"]) == {}, "not that it has neither capacity nor price"
            assert world.asked == ["n1"]
            world.status = 200
            now[0] += UNREAD_SECONDS + 1
            assert (await nodes.of(["n1"]))["n1"].labels == LABELS
            world.status = 500
            now[0] += KEPT_SECONDS + 1
            assert (await nodes.of(["n1"]))["n1"].labels == LABELS, "what was known of it holds"

    asyncio.run(story())


def test_a_node_with_parts_of_gpus_is_read_anew_as_they_may_be_cut_otherwise(tmp_path: Path) -> None:
    """A replica there cost the share that one part had been before, for as long as its attempt ran."""
    world, now = World(), [0.0]
    world.put("n1")
    part = "nvidia.com/mig-1g.10gb"

    async def story() -> None:
        async with world.connected(tmp_path) as connection:
            nodes = Nodes(connection, clock=lambda: now[0])
            for count in ("7", "4"):
                world.nodes["n1"]["status"]["allocatable"] = {part: count}
                assert (await nodes.of(["n1"], part))["n1"].allocatable == {part: count}
                assert (await nodes.of(["n1"], part))["n1"].allocatable == {part: count}
                now[0] += CUT_SECONDS
            assert world.asked == ["n1", "n1"]

    asyncio.run(story())


def test_a_node_whose_gpus_came_after_it_was_read_is_read_anew(tmp_path: Path) -> None:
    """A pod without GPUs lands on it before its device plugin has told of them, then one with; or its GPUs
    are cut anew. The attempt, and its job for ever, had no price."""
    world, now = World(), [0.0]
    world.put("n1")
    gpu, part = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"

    async def story() -> None:
        async with world.connected(tmp_path) as connection:
            nodes = Nodes(connection, clock=lambda: now[0])
            assert (await nodes.of(["n1"], ""))["n1"].allocatable == {"cpu": "8"}
            for resource, there in ((gpu, {gpu: "8"}), (part, {gpu: "0", part: "7"}), (gpu, {gpu: "4"})):
                world.nodes["n1"]["status"]["allocatable"] = {"cpu": "8", **there}
                world.asked.clear()
                for _ in range(3):
                    assert (await nodes.of(["n1"], resource))["n1"].allocatable == {"cpu": "8", **there}
                assert (await nodes.of(["n1"], ""))["n1"].allocatable == {"cpu": "8", **there}
                assert world.asked == ["n1"]

            # Until it can be read it is not known, rather than without a price; and its labels outlive it.
            world.status = 500
            assert await nodes.of(["n1"], part) == {}
            now[0] += UNREAD_SECONDS + 1
            world.status = 200
            assert (await nodes.of(["n1"], gpu))["n1"].labels == LABELS
            del world.nodes["n1"]
            assert (await nodes.of(["n1"], part))["n1"].labels == LABELS

    asyncio.run(story())


def test_where_nodes_may_not_be_read_none_is_asked_for(tmp_path: Path) -> None:
    world = World()
    world.put("n1")

    async def story() -> None:
        async with world.connected(tmp_path) as connection:
            nodes = Nodes(connection, may_read=False)
            with capture_logs() as logs:
                assert await nodes.of(["n1"]) == {"n1": Node("n1", {}, {})}
            assert (world.asked, logs) == ([], [])

    asyncio.run(story())
