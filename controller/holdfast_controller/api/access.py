"""Who may call: every route but the probes asks a gate.

`TokenGate` knows one token, the controller's own; on a cluster kube/access.py asks the apiserver who the
caller is and what he may do.

Plain ASGI, in front of everything: a request without the token reaches no route and its body is never
read. A server without a token (loopback only) has another enemy, the browser of its own user: a page
can send requests to 127.0.0.1, also under a name of its own (DNS rebinding). So it answers only to
names and addresses of loopback, and to no request that a page of another origin made.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..cluster import HoldfastError
from ..listeners import is_loopback
from ..problem import Forbidden, Unauthorized
from .problems import problem_response

log = structlog.get_logger(__name__)

OPEN_PATHS = ("/healthz", "/readyz")
"""What a kubelet or a load balancer asks before anybody has a token."""
RECHECK_SECONDS = 30.0


class Gate(Protocol):
    """Decides about each request before anything of it is read."""

    async def refuse(
        self, method: str, path: str, query: str, headers: Mapping[str, str]
    ) -> HoldfastError | None:
        """Why the request may not pass, or None where it may. `query` is what stands after the `?`."""


class TokenGate:
    """Lets through who shows the token; without a token, who is on this machine."""

    def __init__(self, token: str | None):
        self._token = token

    async def refuse(
        self, method: str, path: str, query: str, headers: Mapping[str, str]
    ) -> HoldfastError | None:
        return refuse_token(headers, self._token) if self._token else refuse_foreign(headers)


class _RightEnded(Exception):
    """Ends a stream whose reader may not read it any more."""


class Access:
    """Lets a request through to `app`, or answers it with a problem."""

    def __init__(self, app: ASGIApp, gate: Gate, recheck_seconds: float = RECHECK_SECONDS):
        self._app = app
        self._gate = gate
        self._recheck_seconds = recheck_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = await self._refusal(scope)
        if refusal is not None:
            await problem_response(refusal, scope["path"])(scope, receive, send)
            return
        checked = time.monotonic()

        async def send_while_allowed(message: Message) -> None:
            nonlocal checked
            if message.get("more_body") and time.monotonic() - checked >= self._recheck_seconds:
                refusal = await self._refusal(scope)
                # A gate that cannot be asked right now has taken nothing back.
                if isinstance(refusal, Unauthorized | Forbidden):
                    log.info("a stream ends with its reader's right", path=scope["path"], error=str(refusal))
                    raise _RightEnded
                checked = time.monotonic()
            await send(message)

        try:
            await self._app(scope, receive, send_while_allowed)
        except* _RightEnded:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _refusal(self, scope: Scope) -> HoldfastError | None:
        headers = Headers(scope=scope)
        given = len(headers.getlist("authorization"))
        if given > 1:
            # What stands in front of us may have looked at another one than we would.
            return Unauthorized(f"the header Authorization is given {given} times: send it once")
        query = scope.get("query_string", b"").decode("latin-1")
        return await self._gate.refuse(scope["method"], scope["path"], query, headers)


def refuse_token(headers: Mapping[str, str], token: str) -> HoldfastError | None:
    """Why these headers do not show the token, or None where they do."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not given:
        return Unauthorized(
            "send the header `Authorization: Bearer TOKEN`, as `holdfast` does with --token-file or "
            "HOLDFAST_TOKEN; `holdfast up` prints where it is"
        )
    # compare_digest takes as long for a near miss as for a far one.
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        return Unauthorized(
            "this token is not the controller's; `holdfast up` prints where the right one is, and reads it "
            "when it starts"
        )
    return None


def refuse_foreign(headers: Mapping[str, str]) -> HoldfastError | None:
    """Why a server without a token refuses these headers, or None."""
    named, origin = headers.get("host", ""), headers.get("origin")
    host = _parts(f"//{named}").hostname or ""
    if not is_loopback(host):
        return Forbidden(f"a controller without a token answers on this machine only, not as {host!r}")
    if origin is not None and _parts(origin).netloc != named:
        return Forbidden(f"a controller without a token takes no requests from the web page {origin!r}")
    return None


def _parts(url: str) -> SplitResult:
    """Of what is no URL, as one with half of the brackets of an address, none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
