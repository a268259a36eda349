"""Requests to the apiserver: a path and plain documents in, plain documents and our own errors out.

The vendor's client finds the server and the credentials (credentials.py keeps them fresh) and speaks TLS;
its thousands of model classes are left out, because a dict costs a tenth of the time and memory. It has no
read timeout by itself: here every request has one. `guarded` gives a second view whose writes are refused
from the moment in which its holder may not write any more (a lost lease), however late that is noticed
elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.stream import WsApiClient

from holdfast_controller.cluster import HoldfastError, Unavailable
from holdfast_controller.keepalive import PROBED
from holdfast_controller.metrics import WatchMetrics
from holdfast_trainer.contract import exists

from .credentials import keep_fresh, why_none
from .deep_json import parsed
from .errors import NotLeader, Throttled, error_of
from .rate import RateLimit
from .server_clock import ServerClock

Document = dict[str, Any]
Query = Mapping[str, str | int | bool]

FIELD_MANAGER = "holdfast-controller"
"""Whose fields they are that we write, in managedFields. Not by server-side apply: it makes what is not there
and changes what is, while an attempt's objects must be new or refused, and a status is written over the one
version that it was decided on."""
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

TIMEOUT_SECONDS = 30.0
CONNECT_SECONDS = 10.0
THROTTLED_TRIES = 3
PATIENCE_SECONDS = 3.0
"""Of who answers somebody that waits himself, for ten seconds: an apiserver under load asks for up to 32."""
REQUESTS_PER_SECOND = 500.0
BURST = 1000
CONNECTIONS = 100
LOG_CONNECTIONS = 400
"""Beside these, for anybody may follow logs, and a lost node never answers."""
LEASE_CONNECTIONS = 1
"""Beside all these: where an admission webhook does not answer, writes may hold all of them for as long."""
FAREWELL_SECONDS = 1.0
"""For the other side of a websocket to say that it has closed it too."""


class Connection:
    """One apiserver. Make it with `connect`, end it with `close`."""

    def __init__(
        self,
        api: client.ApiClient,
        logs: client.ApiClient,
        lease: client.ApiClient,
        sockets: WsApiClient,
        limit: RateLimit,
        may_write: Callable[[], bool] = lambda: True,
        metrics: WatchMetrics | None = None,
        renewal: asyncio.Task[None] | None = None,
        clock: ServerClock | None = None,
        patience: float = math.inf,
    ):
        """`renewal` keeps the credentials fresh, and ends with the connection that has it. A busy server that
        wants to be asked again later than `patience` seconds is asked no more."""
        self._api = api
        self._logs = logs
        self._lease = lease
        self._sockets = sockets
        self._limit = limit
        self._may_write = may_write
        self._metrics = metrics
        self._renewal = renewal
        self._patience = patience
        self.clock = clock or ServerClock()

    @property
    def server(self) -> str:
        return str(self._api.configuration.host)

    def guarded(self, may_write: Callable[[], bool]) -> Connection:
        """The same connection, for one who may write only while `may_write` says so."""
        return self._view(self._api, self._limit, may_write, self._patience)

    def impatient(self) -> Connection:
        """The same connection, for one who has to answer soon himself."""
        return self._view(self._api, self._limit, self._may_write, PATIENCE_SECONDS)

    def apart(self, per_second: float, burst: int) -> Connection:
        """The same connection with a budget of its own, for requests that others can make us send."""
        return self._view(self._api, RateLimit(per_second, burst), self._may_write, self._patience)

    def for_lease(self, per_second: float, burst: int) -> Connection:
        """Likewise, and waits for no answer that others wait for."""
        return self._view(self._lease, RateLimit(per_second, burst), self._may_write, PATIENCE_SECONDS)

    def _view(
        self, api: client.ApiClient, limit: RateLimit, may_write: Callable[[], bool], patience: float
    ) -> Connection:
        return Connection(
            api,
            self._logs,
            self._lease,
            self._sockets,
            limit,
            may_write,
            self._metrics,
            clock=self.clock,
            patience=patience,
        )

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        await self._sockets.close()
        await self._logs.close()
        await self._lease.close()
        await self._api.close()

    # ------------------------------------------------------------ requests

    async def get(self, path: str, **query: str | int | bool) -> Document:
        return await self.request("GET", path, query=query)

    async def post(self, path: str, body: Document) -> Document:
        return await self.request("POST", path, body=body, query={"fieldManager": FIELD_MANAGER})

    async def put(self, path: str, body: Document) -> Document:
        return await self.request("PUT", path, body=body, query={"fieldManager": FIELD_MANAGER})

    async def patch(self, path: str, body: Document | Sequence[Document], kind: str) -> Document:
        return await self.request(
            "PATCH", path, body=body, content_type=kind, query={"fieldManager": FIELD_MANAGER}
        )

    async def delete(self, path: str, options: Document | None = None) -> Document:
        return await self.request("DELETE", path, body=options or {})

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Document | Sequence[Document] | None = None,
        content_type: str = JSON,
        seconds: float = TIMEOUT_SECONDS,
    ) -> Document:
        """One request and its answer. Raises what errors.py lists; a busy server is asked again."""
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        for left in reversed(range(THROTTLED_TRIES)):
            response = await self._send(self._api, method, path, query, body, content_type, limit)
            try:
                return await self._document(response, f"{method} {path}")
            except Throttled as error:
                if not left or error.retry_after > self._patience:
                    raise
                await asyncio.sleep(error.retry_after)
        raise AssertionError("unreachable: the last try returns or raises")

    def stream(
        self, path: str, query: Query, *, silence_seconds: float, opened: Callable[[], None]
    ) -> AsyncGenerator[bytes]:
        """The body of an answer as it comes; `opened` is called once the server has said that there is one.

        Raises Unavailable also where it is silent for too long.
        """
        return self._stream(self._api, path, query, silence_seconds, opened)

    def log(self, path: str, query: Query) -> AsyncGenerator[bytes]:
        """Likewise a container's, by its pod's `log` at this path, silent for as long as that is."""
        return self._stream(self._logs, path, query, None, lambda: None)

    async def _stream(
        self,
        api: client.ApiClient,
        path: str,
        query: Query,
        silence_seconds: float | None,
        opened: Callable[[], None],
    ) -> AsyncGenerator[bytes]:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        response = await self._send(api, "GET", path, query, None, JSON, limit)
        try:
            if response.status >= 400:
                await self._document(response, f"GET {path}")
            _probe(response)
            opened()
            async for chunk in response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.server, f"GET {path}", error) from error
        finally:
            response.close()

    @asynccontextmanager
    async def command(
        self, path: str, container: str, words: Sequence[str]
    ) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
        """A command in a container, by its pod's `exec` at this path: its streams, as messages whose first
        byte is the channel. Raises what errors.py lists. It has no bound of its own.
        """
        query: list[tuple[str, str]] = [
            ("container", container),
            *((stream, "true") for stream in ("stdin", "stdout", "stderr")),
            *(("command", word) for word in words),
        ]
        url, headers = await self._prepare("POST", path, query, accept="*/*")
        try:
            socket = await (await self._sockets.request("GET", url, headers=headers, _preload_content=False))
        except aiohttp.WSServerHandshakeError as error:  # its body, which would say more, is not read
            raise error_of(f"POST {path}", error.status, {}, None) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.server, f"POST {path}", error) from error
        try:
            yield socket
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await socket.close()

    async def _send(
        self,
        api: client.ApiClient,
        method: str,
        path: str,
        query: Query | None,
        body: Document | Sequence[Document] | None,
        content_type: str,
        limit: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        parameters = [
            (name, str(value).lower() if value is True else value) for name, value in (query or {}).items()
        ]
        url, headers = await self._prepare(method, path, parameters, content_type=content_type)
        sent = time.time()
        try:
            answer = await api.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=limit
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.server, f"{method} {path}", error) from error
        response = cast("aiohttp.ClientResponse", answer.response)
        self.clock.answered(response.headers.get("Date"), sent, time.time())
        return response

    async def _prepare(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str | int]],
        *,
        accept: str = JSON,
        content_type: str = JSON,
    ) -> tuple[str, dict[str, str]]:
        """URL and headers of a request that may be sent now. Raises NotLeader where it may not."""
        await self._limit.wait()
        _, url, headers, _, _ = await self._api.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": accept, "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        if method != "GET" and not self._may_write():  # last: whoever has waited may lead no more
            raise NotLeader(f"{method} {path}: not sent, this controller does not lead any more")
        if self._metrics is not None:
            self._metrics.requested(method, resource_of(path))
        return url, headers

    async def _document(self, response: aiohttp.ClientResponse, what: str) -> Document:
        try:
            text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.server, what, error) from error
        try:
            document = parsed(text or b"{}")
        except ValueError:
            document = None
        if response.status >= 400:
            status = document if isinstance(document, dict) else {}
            raise error_of(what, response.status, status, response.headers.get("Retry-After"))
        if not isinstance(document, dict):
            raise Unavailable(f"{what}: {self.server} answers {text[:80]!r}, which is no JSON object")
        return document


class _Answer(aiohttp.ClientResponse):
    """One that is given up ends its connection at once: whoever stops listening owes nobody a TLS farewell,
    which can take half a minute, and is never said where the event loop ends first."""

    def close(self) -> None:
        if self.connection is not None and self.connection.transport is not None:
            self.connection.transport.abort()
        super().close()


def _probe(response: aiohttp.ClientResponse) -> None:
    """Have the kernel look after the connection of an answer that may be silent for hours."""
    transport = None if response.connection is None else response.connection.transport
    tcp = None if transport is None else transport.get_extra_info("socket")
    if tcp is not None:
        with suppress(OSError):  # all of it has come, and the connection is closed
            for level, option, value in PROBED:
                tcp.setsockopt(level, option, value)


async def connect(
    kubeconfig: Path | str | None = None,
    *,
    context: str | None = None,
    per_second: float = REQUESTS_PER_SECOND,
    burst: int = BURST,
    metrics: WatchMetrics | None = None,
) -> Connection:
    """By the kubeconfig, else by the service account of the pod this runs in.

    Raises KubeconfigError; the server itself is not asked yet.
    """
    if kubeconfig is not None and not _exists(kubeconfig):
        raise KubeconfigError(f"kubeconfig {kubeconfig} cannot be used: there is no such file")
    configuration = client.Configuration()
    loader = None
    try:
        if kubeconfig is not None:
            loader = await config.load_kube_config(
                config_file=str(kubeconfig), context=context, client_configuration=configuration
            )
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        if kubeconfig is None:
            raise KubeconfigError(
                f"no Kubernetes to talk to: this is no pod with a service account ({error}); "
                "name a kubeconfig with --kubeconfig or KUBECONFIG"
            ) from error
        said = error if isinstance(error, config.ConfigException | OSError) else "it is no kubeconfig"
        raise KubeconfigError(f"kubeconfig {kubeconfig} cannot be used: {said}") from error
    if loader is not None and (unknown := why_none(loader, configuration)) is not None:
        raise KubeconfigError(f"kubeconfig {kubeconfig} cannot be used: {unknown}")
    configuration.proxy = configuration.proxy or _proxy(configuration.host)
    configuration.client_session_kwargs = {
        "trust_env": False,
        "response_class": _Answer,
        "proxy": configuration.proxy,  # the client's own requests name it, its websockets do not
    }
    renewal = None if loader is None else asyncio.create_task(keep_fresh(loader, configuration))
    logs, lease = _pool(configuration, LOG_CONNECTIONS), _pool(configuration, LEASE_CONNECTIONS)
    return Connection(
        _pool(configuration, CONNECTIONS),
        logs,
        lease,
        WsApiClient(configuration),
        RateLimit(per_second, burst),
        metrics=metrics,
        renewal=renewal,
    )


def _pool(configuration: client.Configuration, size: int) -> client.ApiClient:
    """So many connections at most, with the credentials that `configuration` has at any moment."""
    configuration.connection_pool_maxsize = size
    return client.ApiClient(configuration)


def _proxy(server: str) -> str | None:
    """As HTTPS_PROXY, HTTP_PROXY and NO_PROXY say. The client would ask a thread for it before every request,
    and another one whether ~/.netrc has a password: a third of what a request costs."""
    where = urlsplit(server)
    return None if proxy_bypass(where.hostname or "") else getproxies().get(where.scheme)


def _exists(kubeconfig: Path | str) -> bool:
    """Whether any of the files is there: KUBECONFIG may name several."""
    return any(exists(Path(part)) for part in str(kubeconfig).split(os.pathsep))


def resource_of(path: str) -> str:
    """What a path is about, such as `pods` or `trainingjobs/status`, for any name and namespace."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join([*parts[:1], *parts[2:3]])


class KubeconfigError(HoldfastError):
    """There is no usable configuration of a cluster; the message says what was tried."""


def _unreachable(server: str, what: str, error: Exception) -> Unavailable:
    said = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return Unavailable(f"{what}: the apiserver at {server} cannot be reached: {said}")
