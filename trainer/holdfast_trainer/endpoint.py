"""Rank 0's one port: `/metrics` for Prometheus, `/progress` for the controller.

A controller that does not mount the run directory reads the rest here: `/ledger` has the newest ledger
lines of all attempts, `/steps?attempt=N&offset=B` whole lines of an attempt's steps.jsonl from a byte on. The
next ones begin as many bytes later as were sent, and an answer without lines is the end for now.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from .contract import ATTEMPT_HEADER, ENV_ATTEMPT_UID, Progress, RunDir

log = logging.getLogger(__name__)

STEPS_BYTES = 1 << 20
LEDGER_BYTES = 3 << 20
"""Some ten thousand checkpoints. A controller reads 4 MiB at most: of more it would know nothing new."""
EVERYWHERE = "0.0.0.0"
AT_ONCE = 64
"""Requests, each of which has a thread. In a pod any other may send some, and threads without end would leave
none for a save."""
_Request = socket.socket | tuple[bytes, socket.socket]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, answer: type[BaseHTTPRequestHandler]) -> None:
        if host == EVERYWHERE and socket.has_dualstack_ipv6():
            host = "::"  # takes IPv4 as well: pods may have either, or both
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.Semaphore(AT_ONCE)
        super().__init__((host, port), answer)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer's own asks the name service for a name that nobody needs; that can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: _Request, client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no thread for it
            self._free.release()
            raise

    def process_request_thread(self, request: _Request, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a client of the metrics port went away: %s", client_address)


class Endpoint:
    """An HTTP server in daemon threads; answers from memory, never waits for the training loop."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: Callable[[], CollectorRegistry],
        progress: Callable[[], Progress],
        run: RunDir | None = None,
    ) -> None:
        """Listens at once; `registry` and `progress` are asked for whenever somebody asks here. Where `port`
        is taken, says so and takes a free one: telemetry that moves is better than training that does not
        start."""

        class Answer(BaseHTTPRequestHandler):
            timeout = 10  # seconds: a client that says nothing holds no thread for ever

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                if path == "/metrics":
                    self._send(CONTENT_TYPE_LATEST, generate_latest(registry()))
                elif path == "/progress":
                    self._send("application/json", progress().to_json().encode())
                elif path == "/ledger" and run is not None:
                    self._send("application/jsonl", newest_ledger(run))
                elif path == "/steps" and run is not None:
                    self._send_steps(run, parse_qs(query))
                else:
                    self.send_error(404, "only /metrics, /progress, /ledger and /steps are served here")

            def _send_steps(self, run: RunDir, query: dict[str, list[str]]) -> None:
                asked = [query.get(name, [""])[-1] for name in ("attempt", "offset")]
                if not all(word.isdecimal() for word in asked):
                    self.send_error(400, "/steps wants ?attempt=NUMBER&offset=BYTES, both from 0 on")
                    return
                attempt, offset = map(int, asked)
                self._send("application/jsonl", some_steps(run, attempt, offset))

            def _send(self, content_type: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                if whose := os.environ.get(ENV_ATTEMPT_UID):
                    self.send_header(ATTEMPT_HEADER, whose)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # a line a scrape would drown the run's own log

        try:
            self._server = _Server(host, port, Answer)
        except OSError as error:
            self._server = _elsewhere(host, Answer)
            log.warning(
                "cannot serve metrics on %s:%d (%s): they are on %s", host, port, _say(error), self.address
            )
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port` to reach it on this machine."""
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else host
        if name in (EVERYWHERE, "::"):
            return f"127.0.0.1:{port}"
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def newest_ledger(run: RunDir, limit: int = LEDGER_BYTES) -> bytes:
    """The ledgers of all attempts, one after the other; of more than `limit` bytes the newest whole lines."""
    parts: list[bytes] = []
    for attempt in reversed(run.attempt_numbers()):
        try:
            part = run.ledger(attempt).read_bytes()
        except OSError:
            continue  # an attempt that ended before its first line
        part += b"" if part.endswith(b"\n") or not part else b"\n"
        if len(part) > limit:
            cut = part.find(b"\n", len(part) - limit - 1) + 1
            parts.append(part[cut:])
            break
        limit -= len(part)
        parts.append(part)
    return b"".join(reversed(parts))


def some_steps(run: RunDir, attempt: int, offset: int) -> bytes:
    """Whole lines of an attempt's steps from byte `offset` on, at most `STEPS_BYTES`; b"" at the end."""
    try:
        with open(run.steps(attempt), "rb") as file:
            file.seek(offset)
            data = file.read(STEPS_BYTES)
    except OSError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _elsewhere(host: str, answer: type[BaseHTTPRequestHandler]) -> _Server:
    try:
        return _Server(host, 0, answer)
    except OSError:  # the address itself is none of this machine's
        return _Server("127.0.0.1", 0, answer)


def _say(error: OSError) -> str:
    return "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
