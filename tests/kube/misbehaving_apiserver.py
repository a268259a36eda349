"""An apiserver that does to a watch what networks and servers do: an HTTP server over plain sockets.

It holds one kind of object with versions of its own. Each watch is served by the next step of a script:
a coroutine function that gets the open response and does with it what it likes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/apis/holdfast.dev/v1alpha1/trainingjobs"


def thing(name: str, version: int, uid: str = "", **spec: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "team", "uid": uid or name, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": spec}


class Response:
    """One answer to a watch, written by hand."""

    def __init__(self, writer: asyncio.StreamWriter, query: dict[str, str]):
        self._writer = writer
        self.query = query

    async def start(self, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *headers]
        if status.startswith("200"):
            lines.append("Transfer-Encoding: chunked")
        self._writer.write("\r\n".join([*lines, "", ""]).encode())
        await self._writer.drain()

    async def send(self, text: str) -> None:
        data = text.encode()
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self._writer.drain()

    async def event(self, kind: str, document: dict[str, Any]) -> None:
        await self.send(json.dumps({"type": kind, "object": document}) + "\n")

    async def end(self) -> None:
        """The end of a well-formed answer; returning without it cuts the connection."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()


Step = Callable[[Response], Awaitable[None]]


async def for_ever(_: Response) -> None:
    await asyncio.Event().wait()


class Server:
    def __init__(self) -> None:
        self.things: dict[str, dict[str, Any]] = {}
        self.version = 10
        self.script: list[Step] = []
        self.lists = 0
        self.watches: list[dict[str, str]] = []
        self.refusals: list[tuple[str, tuple[str, ...]]] = []
        """Answers to the next lists, in place of the true one: status and headers."""
        self.port = 0

    def put(self, *things: dict[str, Any]) -> None:
        """Let them be there, and the version be the newest of theirs."""
        for one in things:
            self.things[one["metadata"]["name"]] = one
            self.version = max(self.version, int(one["metadata"]["resourceVersion"]))

    def remove(self, name: str) -> None:
        del self.things[name]
        self.version += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            target = urlsplit(head.split(" ")[1])
            query = {name: values[0] for name, values in parse_qs(target.query).items()}
            if "watch" in query:
                self.watches.append(query)
                step = self.script.pop(0) if self.script else for_ever
                await step(Response(writer, query))
            else:
                self.lists += 1
                await self._list(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _list(self, writer: asyncio.StreamWriter) -> None:
        status, headers, body = "200 OK", (), self._items()
        if self.refusals:
            status, headers = self.refusals.pop(0)
            body = {"kind": "Status", "code": int(status[:3]), "message": status[4:]}
        data = json.dumps(body).encode()
        head = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close", *headers, "", ""]
        writer.write("\r\n".join(head).encode() + data)
        await writer.drain()

    def _items(self) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.things.values())}


@asynccontextmanager
async def misbehaving() -> AsyncIterator[Server]:
    self = Server()
    running: set[asyncio.Task[Any]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        task.add_done_callback(running.discard)
        with suppress(asyncio.CancelledError):  # asyncio would report it as an error of the server's
            await self.serve(reader, writer)

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    self.port = server.sockets[0].getsockname()[1]
    try:
        yield self
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
