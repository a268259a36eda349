"""How much a request may send, enforced while it is read.

A body is at most `BODY_LIMIT` bytes, whether its length was declared or it came in chunks, and comes within
`BODY_SECONDS`. What is too much is counted and thrown away, never kept: the client can then finish sending
and read the answer, instead of finding its connection reset. After `DISCARD_LIMIT` bytes more we stop being
polite.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..cluster import Invalid
from ..problem import TooLarge
from .problems import problem_response

BODY_LIMIT = 1024 * 1024
DISCARD_LIMIT = 64 * BODY_LIMIT
DISCARD_SECONDS = 10.0
BODY_SECONDS = 60.0
"""For a whole body: of who never sends it the connection is a file that we hold open."""


class BodyLimit:
    """Hands `app` the whole body, already read and small enough, or answers 413."""

    def __init__(self, app: ASGIApp, limit: int = BODY_LIMIT):
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        too_large = declared.isdecimal() and int(declared) > self._limit
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = None if too_large else await self._read(receive)
        except TimeoutError:
            late = Invalid(f"the body has not come whole in {BODY_SECONDS:g} s: send it again")
            await problem_response(late, scope["path"])(scope, receive, send)
            return
        if body is not None and body["type"] == "http.disconnect":
            return  # the client left in the middle of it: nobody is there to be answered
        if body is None:
            # A client that waits for "100 Continue" has sent nothing and never will.
            if headers.get("expect", "").lower() != "100-continue":
                await discard(receive)
            error = TooLarge(f"a body may have at most {self._limit} bytes: a job is a page of text")
            await problem_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, replay(body, receive), send)

    async def _read(self, receive: Receive) -> Message | None:
        """One message with the whole body; None where it is too large, keeping nothing."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            size += len(message.get("body", b""))
            if size > self._limit:
                return None
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                return {"type": "http.request", "body": b"".join(chunks), "more_body": False}


def replay(first: Message, receive: Receive) -> Receive:
    """A receive channel that gives `first` and then whatever the real one gives."""
    waiting = [first]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


async def discard(receive: Receive) -> None:
    """Read and drop what the client still sends, within `DISCARD_LIMIT` and `DISCARD_SECONDS`."""
    dropped = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while dropped < DISCARD_LIMIT:
                message = await receive()
                dropped += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        pass
