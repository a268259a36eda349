"""What a node says of itself is asked for once, and never in the way where it cannot be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from misbehaving_apiserver import Server
from structlog.testing import capture_logs

from holdfast_controller.kube.connection import Connection, connect
from holdfast_controller.kube.nodes import KEPT_SECONDS, UNREAD_SECONDS, Nodes
from holdfast_controller.policy.cost import Node

LABELS = {"karpenter.sh/capacity-type": "spot"}


class World:
    """An apiserver over plain HTTP that has nodes, or refuses them."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.status = 200
        self.asked: list[str] = []

    def put(self, name: str) -> None:
        self.nodes[name] = {
            "metadata": {"name": name, "labels": LABELS},
            "status": {"allocatable": {"cpu": "8"}},
        }


@contextmanager
def apiserver(world: World) -> Iterator[int]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2].partition("?")[0]
            world.asked.append(name)
            status = world.status if world.status != 200 or name in world.nodes else 404
            found = world.nodes[name] if status == 200 else {"kind": "Status", "code": status}
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@asynccontextmanager
async def connected(port: int, directory: Path) -> AsyncIterator[Connection]:
    there = Server()
    there.port = port
    file = directory / "kubeconfig"
    file.write_text(there.kubeconfig())
    connection = await connect(file)
    try:
        yield connection
    finally:
        await connection.close()


def test_a_node_is_read_once_and_what_was_known_of_it_outlives_it(tmp_path: Path) -> None:
    world, now = World(), [0.0]
    world.put("n1")

    async def story(port: int) -> None:
        async with connected(port, tmp_path) as connection:
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
            with capture_logs() as logs:
                assert await nodes.of(["n2", "n3"]) == {"n2": Node("n2", {}, {}), "n3": Node("n3", {}, {})}
            assert [entry["event"] for entry in logs] == ["cannot read a node; its capacity is not known"]
            world.status = 200
            world.put("n2")
            now[0] += UNREAD_SECONDS + 1
            assert (await nodes.of(["n2"]))["n2"].labels == LABELS

    with apiserver(world) as port:
        asyncio.run(story(port))


def test_where_nodes_may_not_be_read_none_is_asked_for(tmp_path: Path) -> None:
    world = World()
    world.put("n1")

    async def story(port: int) -> None:
        async with connected(port, tmp_path) as connection:
            nodes = Nodes(connection, may_read=False)
            with capture_logs() as logs:
                assert await nodes.of(["n1"]) == {"n1": Node("n1", {}, {})}
            assert (world.asked, logs) == ([], [])

    with apiserver(world) as port:
        asyncio.run(story(port))
