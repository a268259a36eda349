"""The controller as a process: its socket, its lock, its end.

The order matters. The lock on the data directory is taken and the port bound before anything starts, so
that a second controller changes nothing. On SIGTERM, SIGINT or SIGHUP streams end, requests finish, the
reconciler stops between two of its steps; running attempts are processes of their own and go on. If the
reconciler ends by itself the process ends too, and says so: an API without it would accept jobs that
nobody runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from .cluster import HoldfastError
from .data_directory import DataDirectory, ServerFile, make_token, read_token
from .listeners import WILDCARDS, hear_ipv4_too, listenable
from .settings import DEFAULT_PORT, Settings

log = structlog.get_logger(__name__)

GRACE_SECONDS = 5
"""For requests that are being answered when the process is asked to end."""

LEAST_OPEN_FILES = 32
"""Twice what it takes to start."""
REQUEST_SECONDS = 30.0
"""For the headers of a connection's next request: who sends none, token or not, holds a file of ours."""
TELL_SECONDS = 30.0
"""Between two words about connections that cannot be taken."""


class StartupError(HoldfastError):
    """The controller cannot start; the message says what is in the way."""


class ReconcilerEnded(HoldfastError):
    """The reconciler ended though nobody asked it to."""


class Background:
    """What works beside the API, all of it or none: if one part ends, the others are cancelled."""

    def __init__(self, **parts: Callable[[], Coroutine[Any, Any, None]]):
        self._parts = parts
        self.fault: str | None = "it has not started"
        """Why nothing works, or None while it does."""

    async def run(self) -> None:
        """Until cancelled. Raises what the first part to end raised, as a group."""
        self.fault = None
        try:
            async with asyncio.TaskGroup() as group:
                for name, part in self._parts.items():
                    group.create_task(part(), name=name)
        finally:
            self.fault = "it has ended"


@dataclass(frozen=True)
class Controller:
    """What the composition root has built and `serve` runs."""

    app: FastAPI
    closing: asyncio.Event
    reconcile: Callable[[], Awaitable[None]]
    """Runs until it is cancelled."""
    before_exit: Callable[[], Awaitable[None]] | None = None
    """Awaited when the process is asked to end, while everything still works."""


@dataclass(frozen=True)
class Listening:
    """Where the controller answers, for whoever announces it."""

    url: str
    directory: DataDirectory
    token: str | None
    socket: socket.socket
    new: bool
    """Whether its directory had no database, as one whose disk is not mounted."""


@contextlib.contextmanager
def claim(settings: Settings) -> Iterator[Listening]:
    """Lock the data directory, make or read the token, bind the port; give all back at the end.

    Raises StartupError (port, open files), DataDirectoryError (directory, lock, token).
    """
    _need_open_files()
    directory = settings.directory
    _need_letters(directory)
    directory.create()
    lock = directory.lock()
    try:
        new = not directory.has_database()
        token = None
        if not settings.no_token:
            make_token(directory.token)
            token = read_token(directory.token)
        with contextlib.closing(bind(settings.listen_host, settings.listen_port)) as bound:
            host, port = bound.getsockname()[:2]
            url, near = (_url(one, port) for one in (host, WILDCARDS.get(host, host)))
            directory.write_server_file(
                ServerFile(near, str(directory.token) if token else None, os.getpid())
            )
            try:
                yield Listening(url, directory, token, bound, new)
            finally:
                directory.remove_server_file(os.getpid())
    finally:
        os.close(lock)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _need_letters(directory: DataDirectory) -> None:
    """Raises StartupError where this process cannot tell anybody its own directories: in a locale that has no
    characters for them they are bytes that no JSON takes, as are names of another encoding in any."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise StartupError(
            "this terminal's directory was removed, and jobs are to start in it: `cd` to one that is there"
        ) from None
    for path in (str(directory.path), here):
        try:
            path.encode()
        except UnicodeEncodeError:
            if sys.getfilesystemencoding() == "utf-8":
                raise StartupError(
                    f"{path!a} has a name that is not UTF-8, which no JSON takes: rename it, or start in "
                    "another directory, with another --data-dir"
                ) from None
            raise StartupError(
                f"this process's locale ({sys.getfilesystemencoding()}) has no characters for "
                f"{path!a}: start in one that has, as with LC_ALL=C.UTF-8 and without PYTHONUTF8=0"
            ) from None


def _need_open_files() -> None:
    """Raises StartupError where a process may open so few that it would fail at whatever it opens last, and
    blame that."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_OPEN_FILES:
        raise StartupError(
            f"a process may have {soft} files open here, which is too few to start: `ulimit -n 1024`, or "
            "LimitNOFILE= of its systemd unit"
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartupError, naming the address and the remedy."""
    host = listenable(host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError(f"cannot listen on {host!r}: {error.strerror}; give another --host") from error
    except UnicodeError as error:  # the name of a machine has rules of its own
        raise StartupError(f"cannot listen on {host!r}: {error}; give another --host") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hear_ipv4_too(bound)
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is in use: stop what listens there, or choose another with "
                f"`holdfast up --port {port + 1 if port < 65535 else DEFAULT_PORT}` (0: any free port)"
            ) from error
        if error.errno == errno.EACCES:
            raise StartupError(f"port {port} needs privileges: choose one above 1023 with --port") from error
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return bound


async def serve(
    controller: Controller, bound: socket.socket, announce: Callable[[], None], asked_to_end: asyncio.Event
) -> None:
    """Answer and reconcile until `asked_to_end` is set. Calls `announce` once requests are answered.

    Raises ReconcilerEnded where the reconciler ends first, and what ends the API or `announce` raises.
    """
    asyncio.get_running_loop().set_exception_handler(_Told())
    server = _Server(
        uvicorn.Config(
            controller.app,
            http=_Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        ),
        announce,
    )
    answering = asyncio.create_task(server.serve(sockets=[bound]), name="api")
    reconciling = asyncio.ensure_future(controller.reconcile())
    waiting = asyncio.create_task(asked_to_end.wait(), name="signals")
    try:
        await asyncio.wait((answering, reconciling, waiting), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()  # that it cannot answer, or nobody be told of it, is no end as any other
        if waiting.done() and controller.before_exit is not None:
            asked_to_end.clear()
            await _unless_asked_again(controller.before_exit(), asked_to_end)
        if reconciling.done() and not reconciling.cancelled():
            log.error("the reconciler ended", exc_info=reconciling.exception())
            raise ReconcilerEnded(
                "the reconciler ended, its log says why; running attempts go on, start the controller again"
            ) from reconciling.exception()
    finally:
        controller.closing.set()
        server.should_exit = True
        reconciling.cancel()
        waiting.cancel()
        await asyncio.gather(answering, reconciling, waiting, return_exceptions=True)


class _Connection(H11Protocol):
    """Of which each request has to come in time. uvicorn waits a few seconds for the next one to begin, and
    for ever for the rest of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._next = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._next.cancel()
        self._next = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        if not self.cycle or self.cycle.response_complete:
            self.transport.close()


class _Told:
    """An exception handler of the loop. For a process that has all the files open that it may, asyncio would
    tell of each connection that waits two thousand times a second, with a traceback, and do nothing else."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + TELL_SECONDS
            log.warning(
                "no connection is taken until another ends: no more files can be opened (ulimit -n)",
                error=error.strerror,
            )


class _Server(uvicorn.Server):
    """Leaves signals to us (the API is one of several parts that they end) and says when it answers."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]):
        super().__init__(config)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()


async def _unless_asked_again(work: Awaitable[None], asked: asyncio.Event) -> None:
    """Do the work; a second signal means at once."""
    working = asyncio.ensure_future(work)
    again = asyncio.create_task(asked.wait())
    await asyncio.wait((working, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if working.done():
        working.result()
    else:
        working.cancel()
        await asyncio.wait((working,))


@contextlib.asynccontextmanager
async def signals_set(asked: asyncio.Event) -> AsyncIterator[None]:
    """Within the block SIGINT, SIGTERM and SIGHUP (its terminal was closed) set `asked` and do nothing else;
    SIGHUP not where nohup has it ignored."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, asked.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
