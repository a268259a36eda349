"""What rank 0 of every running attempt says of itself, asked at its pod's address.

About once a second, less often where many attempts run: a hundred are asked each second at most. No
answer is no news, and the last figures stay with the time at which they were true. The run directory is
on storage that the controller does not mount, so the ledger comes the same way: rank 0 serves that of all
attempts, and it is fetched whenever a checkpoint has become durable.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Any

import aiohttp
import structlog

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.heartbeat import Heartbeat, Silence
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_trainer.contract import DEFAULT_PORT, Progress, parse_lines

from .clocks import Clocks, Key
from .connection import Document
from .pieces import Attempt, Pieces, attempt_of
from .pod_state import index_of, running

log = structlog.get_logger(__name__)

TIMEOUT_SECONDS = 2.0
"""For an answer to begin, and between two of its parts."""
WHOLE_SECONDS = 10.0
"""For all that is asked of one pod in a round: a slow one must not hold up the others for ever."""
PER_SECOND = 100
AT_ONCE = 64
"""Asked and not answered yet: pods of a lost node must not take the turns of the others."""
PROGRESS_LIMIT = 64 * 1024
"""Bytes of an answer to `/progress`."""
LEDGER_LIMIT = 4 * 1024 * 1024
"""Bytes of a ledger that are read; a longer one is left to those who can mount the run directory."""


class Endpoints:
    """Progress and ledgers, by attempt and job; `run` keeps them fresh."""

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._progress: dict[tuple[str, Attempt], Progress] = {}
        self._beats: dict[tuple[str, Attempt], Heartbeat] = {}
        self._ledgers: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._clocks = Clocks()

    def progress_of(self, job: TrainingJob, attempt: int) -> Progress | None:
        return self._progress.get(_key(job, attempt))

    def silence_of(self, job: TrainingJob, attempt: int) -> Silence | None:
        beat = self._beats.get(_key(job, attempt))
        return None if beat is None else beat.silence

    def by_our_clock(self, job: TrainingJob, seen: AttemptObservation) -> AttemptObservation:
        """What was seen of an attempt, its rank 0's last words with the times that we have."""
        return self._clocks.seen(_key(job, seen.attempt), seen)

    def lines_by_our_clock(self, job: TrainingJob, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of ledger or steps, as rank 0 has them."""
        return self._clocks.lines(job.metadata.namespace, job.metadata.uid, lines)

    def ledger_of(self, job: TrainingJob) -> list[dict[str, Any]]:
        """What was last read; nothing after a restart until an attempt runs again."""
        return self._ledgers.get((job.metadata.namespace, job.metadata.uid), [])

    def forget(self, job: TrainingJob) -> None:
        self._ledgers.pop((job.metadata.namespace, job.metadata.uid), None)
        for attempt in range(1, job.status.attempt + 1):
            key = _key(job, attempt)
            self._progress.pop(key, None)
            self._beats.pop(key, None)
            self._clocks.forget(key)

    async def run(self) -> None:
        async with pod_client(TIMEOUT_SECONDS) as client:
            while True:
                ends = asyncio.get_running_loop().time() + 1.0
                pods = [pod for pod in self._pieces.pods.all() if index_of(pod) == 0 and running(pod)]
                await self._ask_all(client, pods)
                await asyncio.sleep(max(0.0, ends - asyncio.get_running_loop().time()))

    async def _ask_all(self, client: aiohttp.ClientSession, pods: list[Document]) -> None:
        """One after the other at an even pace: a burst would only wait in the client, and time out there."""
        free = asyncio.Semaphore(AT_ONCE)

        async def ask(pod: Document) -> None:
            try:
                await self._ask(client, pod)
            finally:
                free.release()

        async with asyncio.TaskGroup() as group:
            for pod in pods:
                await free.acquire()
                group.create_task(ask(pod))
                await asyncio.sleep(1 / PER_SECOND)

    async def _ask(self, client: aiohttp.ClientSession, pod: Document) -> None:
        whose, address = attempt_of(pod), pod["status"].get("podIP")
        if whose is None or not address:
            return
        host = f"[{address}]" if ":" in address else address
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                await self._hear(client, f"http://{host}:{DEFAULT_PORT}", whose, pod["metadata"])
        except (aiohttp.ClientError, TimeoutError) as error:
            self._missed(whose, pod["metadata"], taken=isinstance(error, aiohttp.SocketTimeoutError))
        except Exception as error:  # whatever a job's own program answers must not end the others'
            log.warning(
                "a pod's progress cannot be read", pod=pod["metadata"]["name"], error=repr(error)[:200]
            )

    async def _hear(self, client: aiohttp.ClientSession, base: str, whose: Attempt, meta: Document) -> None:
        """Raises aiohttp's errors, TimeoutError, and whatever comes of parsing what is no progress."""
        text = await bounded_body(client, f"{base}/progress", PROGRESS_LIMIT)
        if text is None:
            return
        progress = Progress.from_json(text.decode(errors="replace"))
        namespace = meta["namespace"]
        before = self._progress.get((namespace, whose))
        if progress.attempt != whose[1]:
            return
        progress = self._clocks.heard((namespace, whose), progress, time.time())
        now = time.monotonic()
        beat = self._beats.setdefault((namespace, whose), Heartbeat(now))
        beat.answered(progress, now)
        if progress == before and (beat.silence is None or not beat.silence.over):
            return
        self._progress[namespace, whose] = progress
        if before is None or before.durable_step != progress.durable_step or before.phase != progress.phase:
            ledger = await bounded_body(client, f"{base}/ledger", LEDGER_LIMIT)
            if ledger is not None:
                lines = parse_lines(ledger.decode(errors="replace"))
                self._ledgers[namespace, whose[0]] = self._clocks.lines(namespace, whose[0], lines)
        self._pieces.wake(f"{namespace}/{meta['labels'][JOB_LABEL]}")

    def _missed(self, whose: Attempt, meta: Document, *, taken: bool) -> None:
        beat = self._beats.get((meta["namespace"], whose))
        if beat is None:
            return
        beat.missed(time.monotonic(), taken=taken)
        if beat.silence is not None and beat.silence.over:
            self._pieces.wake(f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}")


def _key(job: TrainingJob, attempt: int) -> Key:
    return job.metadata.namespace, (job.metadata.uid, attempt)


def pod_client(seconds: float) -> aiohttp.ClientSession:
    """For what users' own programs answer: `seconds` for it to begin, and between two of its parts.

    Nothing is unpacked, for a little can become a lot, and no cookie is kept.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds),
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


async def bounded_body(client: aiohttp.ClientSession, url: str, limit: int) -> bytes | None:
    """What is there; None for an error, and for more than `limit` bytes."""
    parts, size = [], 0
    async with client.get(url, allow_redirects=False) as answer:
        if answer.status != HTTPStatus.OK:
            return None
        async for part in answer.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > limit:
                return None
    return b"".join(parts)
