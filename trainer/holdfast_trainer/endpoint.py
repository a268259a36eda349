"""Rank 0's one port: `/metrics` for Prometheus, `/progress` for the controller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from .contract import Progress

log = logging.getLogger(__name__)


class Endpoint:
    """An HTTP server in daemon threads; answers from memory, never waits for the training loop."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, progress: Callable[[], Progress]
    ) -> None:
        """Listens at once. Where `port` is taken, says so and takes a free one: telemetry that moves is
        better than training that does not start."""

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._send(CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/progress":
                    self._send("application/json", progress().to_json().encode())
                else:
                    self.send_error(404, "only /metrics and /progress are served here")

            def _send(self, content_type: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # a line a scrape would drown the run's own log

        try:
            self._server = ThreadingHTTPServer((host, port), Answer)
        except OSError as error:
            if port == 0:
                raise
            log.warning("port %d is taken (%s): metrics are served on another one", port, error.strerror)
            self._server = ThreadingHTTPServer((host, 0), Answer)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port` to reach it on this machine."""
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else host
        return f"{'127.0.0.1' if name == '0.0.0.0' else name}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
