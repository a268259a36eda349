"""/metrics, /jobs, /healthz over HTTP. A request looks anew; the process's health is not that of NVML."""

from __future__ import annotations

import gzip
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as PrometheusCollector
from pydantic import TypeAdapter

from holdfast_controller.cluster import GpuUse
from holdfast_controller.listeners import hear_ipv4_too, listenable

from .collector import Snapshot
from .job_uses import uses_of_jobs
from .series import families

REQUEST_SECONDS = 10
_USES = TypeAdapter(list[GpuUse])


class _Looks(PrometheusCollector):
    def __init__(self, look: Callable[[], Snapshot]):
        self._look = look

    def describe(self) -> list[Metric]:
        return []  # registering must not look

    def collect(self) -> Iterator[Metric]:
        return families(self._look())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    registry: CollectorRegistry
    look: Callable[[], Snapshot]

    def server_bind(self) -> None:
        hear_ipv4_too(self.socket)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else who asked did not wait for the answer
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, encode(self.server.registry))
        elif path == "/jobs":
            self._answer(200, "application/json", _USES.dump_json(uses_of_jobs(self.server.look())))
        elif path == "/healthz":
            self._answer(200, "text/plain", b"ok\n")
        else:
            self._answer(404, "text/plain", f"there is no {path}: /metrics, /jobs, /healthz\n".encode())

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1024:
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line a scrape helps nobody."""


@contextmanager
def served(look: Callable[[], Snapshot], host: str, port: int) -> Iterator[int]:
    """Serve what `look` finds on `host`; yields the port. Raises OSError where it cannot listen there."""
    host = listenable(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server_class = type("_Bound", (_Server,), {"address_family": family})
    server = server_class((host, port), _Request)
    server.look = look
    server.registry = CollectorRegistry()
    server.registry.register(_Looks(look))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
