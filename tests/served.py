"""A real server on a loopback port over a real SQLite store; only the engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import logging
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx
import structlog
from scripted_engine import ScriptedEngine
from waiting import wait_until

from holdfast_controller.api import create_app
from holdfast_controller.jobs import Status, TrainingJob
from holdfast_controller.local.store import LocalStore
from holdfast_controller.server import Controller, bind, serve

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

TOKEN = "test-token-0123456789"
T = TypeVar("T")


@dataclass
class Served:
    """The running server, and what a test may do behind its back."""

    url: str
    store: LocalStore
    engine: ScriptedEngine
    loop: asyncio.AbstractEventLoop
    fault: list[str] = field(default_factory=list)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something with the store, in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def job(self, name: str, namespace: str = "default") -> TrainingJob:
        return self.run(self.store.get(namespace, name))

    def set_status(self, name: str, namespace: str = "default", **changes: Any) -> TrainingJob:
        """Write into a job's status, as the reconciler would."""
        job = self.job(name, namespace)
        status = Status.model_validate({**job.status.model_dump(), **changes})
        return self.run(self.store.replace_status(job, status))

    def http(self, token: str | None = TOKEN, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(
            base_url=self.url, headers=headers, trust_env=False, verify=False, timeout=300, **options
        )


@contextlib.contextmanager
def served(
    directory: Path,
    *,
    token: str | None = TOKEN,
    port: int = 0,
    body_limit: int = 1024 * 1024,
    engine: ScriptedEngine | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Run the server in a thread of its own until the block ends, on `engine` where one is there already;
    `options` are create_app's."""
    engine = engine or ScriptedEngine()
    ready: list[Served] = []
    failed: list[BaseException] = []
    end: list[Callable[[], None]] = []

    async def main() -> None:
        store = await LocalStore.open(directory / "holdfast.db")
        closing = asyncio.Event()
        loop = asyncio.get_running_loop()
        with contextlib.closing(bind("127.0.0.1", port)) as bound:
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            self = Served(url, store, engine, loop)
            app = create_app(
                store,
                engine,
                token=token,
                reconciler_fault=lambda: self.fault[0] if self.fault else None,
                closing=closing,
                body_limit=body_limit,
                **options,
            )
            asked = asyncio.Event()
            end.append(lambda: loop.call_soon_threadsafe(asked.set))
            controller = Controller(app, closing, reconcile=asyncio.Event().wait)
            try:
                await serve(controller, bound, lambda: ready.append(self), asked)
            finally:
                await store.close()

    def thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)

    running = threading.Thread(target=thread, name="served", daemon=True)
    running.start()
    try:
        wait_until(lambda: ready or failed, "the server to answer")
        if failed:
            raise failed[0]
        yield ready[0]
    finally:
        if end:
            end[0]()
        running.join(300)
    if failed:
        raise failed[0]
    assert not running.is_alive(), "the server did not end when asked to"


JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: NAME}
spec:
  command: [python, train.py]
  replicas: 2
"""


def job_yaml(name: str = "gpt-small") -> str:
    return JOB.replace("NAME", name)


@contextlib.contextmanager
def ingress(
    port: int,
    status: int,
    body: bytes = b"<html>Bad Gateway</html>",
    *,
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Iterator[list[str]]:
    """What stands before a controller that is being replaced, and the requests that it answered itself."""
    asked: list[str] = []

    class Refusal(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Retry-After", "1")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Refusal) as standing:
        if tls is not None:
            standing.socket = tls.wrap_socket(standing.socket, server_side=True)
        serving = threading.Thread(target=standing.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        serving.start()
        try:
            yield asked
        finally:
            standing.shutdown()
            serving.join(300)


def history(server: Served) -> None:
    """A job that was killed once and has gone on."""
    now = datetime.now(UTC)
    server.set_status(
        "gpt-small", phase="Running", attempt=2, disruptions=1, lost_steps=12, goodput=0.934,
        first_started_at=now - timedelta(seconds=100), message="attempt 2 trains",
        progress={"step": 50, "total_steps": 200, "durable_step": 40, "loss": 2.345678, "loss_ema": 2.4,
                  "grad_norm": 0.75, "epoch": 1.25, "memory_bytes": 3_210_000_000,
                  "tokens_per_second": 12345.6, "eta_seconds": 192.0,
                  "save_fault": "step 45 could not be saved: No space left on device",
                  "verdict": "a step takes 9.0 ms, of which 40% waits for data: tokenise beforehand"},
        attempts=[
            {"number": 1, "started_at": now - timedelta(seconds=100), "ended_at": now - timedelta(seconds=60),
             "verdict": "Disrupted", "reason": "replica 1 was killed", "goodput": 0.55,
             "log_tail": {"0": "one\nlast words"}},
            {"number": 2, "started_at": now - timedelta(seconds=50), "resumed_step": 20,
             "resume_differences": ["ranks: 4 -> 2"], "passed_over": ["step-00000025: torn"]},
        ],
    )  # fmt: skip
    zero = now.timestamp() - 100
    key = "default/gpt-small"
    server.engine.ledger_lines[key] = [
        {"event": "attempt_start", "time": zero, "attempt": 1, "resumed_step": 0, "world_size": 2},
        {"event": "first_step", "time": zero + 5, "attempt": 1, "step": 1, "seconds": 1.0},
        {"event": "checkpoint", "time": zero + 30, "attempt": 1, "step": 20},
        {"event": "attempt_start", "time": zero + 50, "attempt": 2, "resumed_step": 20, "world_size": 2},
        {"event": "first_step", "time": zero + 54, "attempt": 2, "step": 21, "seconds": 1.0},
    ]
    server.engine.step_lines[key] = [
        *({"attempt": 1, "step": step, "time": zero + 5 + step, "loss": 3.0} for step in range(1, 33)),
        *({"attempt": 2, "step": step, "time": zero + 33 + step, "loss": 2.0} for step in range(21, 51)),
    ]
