"""What rank 0 of every running attempt says of itself, asked at its pod's address.

About once a second, less often where many attempts run: a hundred are asked each second at most. No
answer is no news, and the last figures stay with the time at which they were true. The run directory is
on storage that the controller does not mount, so the ledger comes the same way: rank 0 serves that of all
attempts, and it is fetched whenever a checkpoint has become durable.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_trainer.contract import DEFAULT_PORT, Progress, parse_lines

from .connection import Document
from .observation import index_of, running
from .pieces import Attempt, Pieces, attempt_of

TIMEOUT_SECONDS = 2.0
PER_SECOND = 100
LEDGER_LIMIT = 4 * 1024 * 1024
"""Bytes of a ledger that are read; a longer one is left to those who can mount the run directory."""


class Endpoints:
    """Progress and ledgers, by attempt and job; `run` keeps them fresh."""

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._progress: dict[Attempt, Progress] = {}
        self._ledgers: dict[str, list[dict[str, Any]]] = {}

    def progress_of(self, job: TrainingJob, attempt: int) -> Progress | None:
        return self._progress.get((job.metadata.uid, attempt))

    def ledger_of(self, job: TrainingJob) -> list[dict[str, Any]]:
        """What was last read; nothing after a restart until an attempt runs again."""
        return self._ledgers.get(job.metadata.uid, [])

    def forget(self, job: TrainingJob) -> None:
        self._ledgers.pop(job.metadata.uid, None)
        for attempt in [attempt for attempt in self._progress if attempt[0] == job.metadata.uid]:
            del self._progress[attempt]

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
            while True:
                pods = [pod for pod in self._pieces.pods.all() if index_of(pod) == 0 and running(pod)]
                await asyncio.gather(*(self._ask(client, pod) for pod in pods))
                await asyncio.sleep(max(1.0, len(pods) / PER_SECOND))

    async def _ask(self, client: httpx.AsyncClient, pod: Document) -> None:
        whose, address = attempt_of(pod), pod["status"].get("podIP")
        if whose is None or not address:
            return
        host = f"[{address}]" if ":" in address else address
        base = f"http://{host}:{DEFAULT_PORT}"
        try:
            answer = await client.get(f"{base}/progress")
            progress = Progress.from_json(answer.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return
        before = self._progress.get(whose)
        if progress.attempt != whose[1] or progress == before:
            return
        self._progress[whose] = progress
        if before is None or before.durable_step != progress.durable_step or before.phase != progress.phase:
            await self._read_ledger(client, base, whose[0])
        meta = pod["metadata"]
        self._pieces.wake(f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}")

    async def _read_ledger(self, client: httpx.AsyncClient, base: str, uid: str) -> None:
        try:
            answer = await client.get(f"{base}/ledger")
        except (httpx.HTTPError, httpx.InvalidURL):
            return
        if answer.status_code == httpx.codes.OK and len(answer.content) <= LEDGER_LIMIT:
            self._ledgers[uid] = parse_lines(answer.text)
