"""A log line for every request, with an id that the answer carries too."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"[-A-Za-z0-9_.]{1,64}")


class RequestLog:
    """Binds `request_id` to every log line of a request: the caller's X-Request-ID, or a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                # Somebody always looks on, several times a second; what changes something is news.
                looks = scope["method"] in ("GET", "HEAD")
                tell = log.debug if looks and 0 < status < 500 else log.info
                tell(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.perf_counter() - started, 4),
                )
