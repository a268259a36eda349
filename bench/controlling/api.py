"""The apiserver with nothing in between: a path and prepared bytes in, the answer's bytes out.

This is the bare limit that the controller is compared with, so it does no more than HTTP asks for: bodies
are made before the clock starts, answers are read and thrown away.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import yaml
from bench.report import ReportError

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
T = TypeVar("T")


@dataclass(frozen=True)
class Account:
    """What a kubeconfig with a token holds."""

    server: str
    authority: str
    """The file with the certificate that the server's is signed by."""
    token: str


def account(kubeconfig: Path) -> Account:
    """Read it."""
    config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    return Account(cluster["server"], cluster["certificate-authority"], user["token"])


@dataclass(frozen=True)
class Api:
    """One cluster, as its kubeconfig names it. Make it with `api`."""

    session: aiohttp.ClientSession
    server: str

    async def send(self, method: str, path: str, body: bytes | None = None, kind: str = JSON) -> bytes:
        """Raises ReportError where there is no answer, and with the server's words where it is an error."""
        headers = {"Content-Type": kind}
        try:
            async with self.session.request(method, self.server + path, data=body, headers=headers) as answer:
                said = await answer.read()
        except aiohttp.ClientError as error:
            raise ReportError(f"{method} {path}: {error}") from error
        if answer.status >= 400:
            raise ReportError(f"{method} {path}: {answer.status} {said[:500].decode(errors='replace')}")
        return said

    async def watch(self, path: str, *, metadata_only: bool = False) -> AsyncIterator[dict[str, Any]]:
        """Events of everything that is there and that comes, for ever; a watch that ends goes on."""
        accept = METADATA_ONLY if metadata_only else JSON
        version = "0"  # what the server has in its cache, and then all that follows
        while True:
            query = {"watch": "true", "timeoutSeconds": "3600", "resourceVersion": version}
            timeout = aiohttp.ClientTimeout(total=None)
            async with self.session.get(
                self.server + path, params=query, headers={"Accept": accept}, timeout=timeout
            ) as answer:
                if answer.status >= 400:
                    raise ReportError(f"watch {path}: {answer.status} {await answer.text()}")
                rest = b""
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            raise ReportError(f"the watch of {path} ends: {event['object']}")
                        version = event["object"]["metadata"]["resourceVersion"]
                        yield event


@asynccontextmanager
async def api(kubeconfig: Path) -> AsyncIterator[Api]:
    """By a kubeconfig with a token."""
    known = await asyncio.to_thread(account, kubeconfig)
    trust = ssl.create_default_context(cafile=known.authority)
    connector = aiohttp.TCPConnector(ssl=trust, limit=200)
    headers = {"Authorization": f"Bearer {known.token}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=2**21) as session:
        yield Api(session, known.server)


async def side_by_side(work: Iterable[T], act: Callable[[T], Awaitable[None]], clients: int) -> None:
    """Do all of `work`, `clients` at a time; each takes the next piece when it has done one."""
    pieces = iter(work)

    async def client() -> None:
        for piece in pieces:
            await act(piece)

    working = [asyncio.ensure_future(client()) for _ in range(clients)]
    try:
        await asyncio.gather(*working)  # raises the first error as it is, not a group of them
    finally:
        for one in working:
            one.cancel()
