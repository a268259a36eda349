"""What rank 0 of every running attempt says of itself, asked at its pod's address.

About once a second, less often where many attempts run: a hundred are asked each second at most. No
answer is no news, and the last figures stay with the time at which they were true. The run directory is
on storage that the controller does not mount, so the ledger comes the same way: rank 0 serves that of all
attempts, and it is fetched whenever a checkpoint has become durable. Every replica of the controller asks, so
each forgets by itself, after a round: a job that is over (its ledger is kept beside it, last_words.py) or
gone, and what attempts said that others have followed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import structlog

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.gang import uid_of_attempt
from holdfast_controller.heartbeat import Heartbeat, Silence
from holdfast_controller.jobs import Phase, TrainingJob
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_trainer.contract import ATTEMPT_HEADER, DEFAULT_PORT, Progress, parse_lines

from .clocks import Clocks, Key
from .connection import Document
from .pieces import Attempt, Pieces, attempt_of
from .pod_state import index_of, running
from .reflector import Reflector, uid_of

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
BYTES_OF_ONE = 32
"""That an object or a list of an answer has at the least, on average, where it is a trainer's: parsed, each
takes a hundred or two, and an answer of `{}` alone would take that for every three of its own."""
KEPT_OUT_TRIES = 3
"""In a row, each without a connection or an answer, before it is told: a pod's network may be a moment behind
it."""
FINAL = frozenset(phase for phase in Phase if phase.final)
_NO_WAY = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES))


@dataclass
class _Heard:
    """Of one job."""

    key: str
    """`namespace/name`"""
    progress: dict[int, Progress] = field(default_factory=dict)
    """By attempt."""
    beats: dict[int, Heartbeat] = field(default_factory=dict)
    """Likewise."""
    ledger: bytes = b""
    """As it came, compressed: parsed it takes twelve times as much, and few ask for it. Empty: none came."""
    ledger_of: tuple[int, int, str] | None = None
    """When that was: attempt, durable step and training phase."""


class Endpoints:
    """Progress and ledgers of the jobs that `jobs` has and that are not over; `run` keeps them fresh."""

    def __init__(self, pieces: Pieces, jobs: Reflector):
        self._pieces = pieces
        self._jobs = jobs
        self._heard: dict[tuple[str, str], _Heard] = {}
        """By namespace and uid."""
        self._clocks = Clocks()
        self._kept_out: dict[Key, tuple[int, str]] = {}
        """Attempts to whose rank 0 no connection was had: how often in a row, and in words."""

    def kept_out_of(self, job: TrainingJob, attempt: int) -> str:
        """What keeps its figures from being heard; empty where nothing of the network's does."""
        tries, said = self._kept_out.get(_key(job, attempt), (0, ""))
        return said if tries >= KEPT_OUT_TRIES else ""

    def progress_of(self, job: TrainingJob, attempt: int) -> Progress | None:
        heard = self._of(job)
        return None if heard is None else heard.progress.get(attempt)

    def silence_of(self, job: TrainingJob, attempt: int) -> Silence | None:
        heard = self._of(job)
        beat = None if heard is None else heard.beats.get(attempt)
        return None if beat is None else beat.silence

    def by_our_clock(self, job: TrainingJob, seen: AttemptObservation) -> AttemptObservation:
        """What was seen of an attempt, its rank 0's last words with the times that we have."""
        return self._clocks.seen(_key(job, seen.attempt), seen)

    def lines_by_our_clock(self, job: TrainingJob, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of ledger or steps, as rank 0 has them."""
        return self._clocks.lines(job.metadata.namespace, job.metadata.uid, lines)

    async def ledger_of(self, job: TrainingJob) -> list[dict[str, Any]]:
        """What was last read; nothing after a restart until an attempt runs again, and of a job that is over.

        A long one takes a tenth of a second to parse, in a thread.
        """
        heard = self._of(job)
        if heard is None or not heard.ledger:
            return []
        return self.lines_by_our_clock(job, await asyncio.to_thread(_unpacked, heard.ledger))

    def _of(self, job: TrainingJob) -> _Heard | None:
        return self._heard.get((job.metadata.namespace, job.metadata.uid))

    async def run(self) -> None:
        await self._jobs.synced()
        async with pod_client(TIMEOUT_SECONDS) as client:
            while True:
                ends = asyncio.get_running_loop().time() + 1.0
                pods = [pod for pod in self._pieces.pods.all() if index_of(pod) == 0 and running(pod)]
                await self._ask_all(client, pods)
                asked = {(pod["metadata"]["namespace"], attempt_of(pod)) for pod in pods}
                self._kept_out = {key: told for key, told in self._kept_out.items() if key in asked}
                self._forget()
                await asyncio.sleep(max(0.0, ends - asyncio.get_running_loop().time()))

    def _forget(self) -> None:
        """What is of no use any more."""
        for (namespace, uid), heard in list(self._heard.items()):
            job = self._jobs.get(heard.key)
            status = (job or {}).get("status") or {}
            if job is None or uid_of(job) != uid or status.get("phase") in FINAL:
                del self._heard[namespace, uid]
                self._clocks.forget(namespace, uid)
                continue
            for attempt in heard.beats.keys() | heard.progress.keys():
                if attempt < status.get("attempt", 0):
                    heard.progress.pop(attempt, None)
                    heard.beats.pop(attempt, None)

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
        place = f"{f'[{address}]' if ':' in address else address}:{DEFAULT_PORT}"
        why = ""
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                told = await self._hear(client, f"http://{place}", whose, pod["metadata"])
            if not told:
                self._missed(whose, pod["metadata"], taken=False)
        except (aiohttp.ClientError, TimeoutError) as error:
            silence = self._missed(
                whose, pod["metadata"], taken=isinstance(error, aiohttp.SocketTimeoutError)
            )
            why = _kept_out(error, place, stands_still=silence.unanswered > 0)
        except Exception as error:  # whatever a job's own program answers must not end the others'
            log.warning(
                "a pod's progress cannot be read", pod=pod["metadata"]["name"], error=repr(error)[:200]
            )
            self._missed(whose, pod["metadata"], taken=False)
        self._note_kept_out(whose, pod["metadata"], why)

    def _note_kept_out(self, whose: Attempt, meta: Document, why: str) -> None:
        """`why` nothing was heard; empty: something was, or there is nobody who would tell."""
        key = meta["namespace"], whose
        before, _ = self._kept_out.pop(key, (0, ""))
        if why:
            self._kept_out[key] = before + 1, why
        if (before + 1 == KEPT_OUT_TRIES) if why else (before >= KEPT_OUT_TRIES):
            self._pieces.wake(_job_of(meta))

    async def _hear(self, client: aiohttp.ClientSession, base: str, whose: Attempt, meta: Document) -> bool:
        """Whether it was rank 0 that answered, and not something in its place, as its service mesh with an
        error. Raises aiohttp's errors, TimeoutError, and whatever comes of parsing what is no progress."""
        text = await bounded_body(client, f"{base}/progress", PROGRESS_LIMIT, whose)
        if text is None:
            return False
        progress = Progress.from_json(text.decode(errors="replace"))
        namespace, (uid, attempt) = meta["namespace"], whose
        if progress.attempt != attempt:
            return False
        key = _job_of(meta)
        heard = self._heard.setdefault((namespace, uid), _Heard(key))
        before = heard.progress.get(attempt)
        progress = self._clocks.heard((namespace, whose), progress, time.time())
        now = time.monotonic()
        beat = heard.beats.setdefault(attempt, Heartbeat(now))
        again = beat.silence is not None and beat.silence.outdates
        beat.answered(progress, now)
        of = (attempt, progress.durable_step, progress.phase)
        silent = beat.silence is not None and beat.silence.over
        if progress == before and not again and not silent and heard.ledger_of == of:
            return True
        heard.progress[attempt] = progress
        if heard.ledger_of != of:
            with suppress(aiohttp.ClientError):  # then in the next round
                ledger = await bounded_body(client, f"{base}/ledger", LEDGER_LIMIT, whose)
                if ledger is not None:
                    heard.ledger = await asyncio.to_thread(zlib.compress, ledger, 1)
                heard.ledger_of = of
        self._pieces.wake(key)
        return True

    def _missed(self, whose: Attempt, meta: Document, *, taken: bool) -> Silence:
        """What is known of its silence now. Counted also where only a controller before this one has heard
        it."""
        key = _job_of(meta)
        heard = self._heard.setdefault((meta["namespace"], whose[0]), _Heard(key))
        now = time.monotonic()
        beat = heard.beats.setdefault(whose[1], Heartbeat(now))
        before = beat.silence
        after = beat.missed(now, taken=taken)
        if before is not None and (after.over or after.outdates > before.outdates):
            self._pieces.wake(heard.key)
        return after


def _job_of(meta: Document) -> str:
    """`namespace/name`, of a pod's metadata."""
    return f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}"


def _key(job: TrainingJob, attempt: int) -> Key:
    return job.metadata.namespace, (job.metadata.uid, attempt)


def _kept_out(error: Exception, place: str, *, stands_still: bool) -> str:
    """Why rank 0 at `place` was not heard, where the network or its rules are to blame; else empty. Of a
    program that serves nothing there, as one without `Run`, the connection is refused; of one that
    `stands_still` none is taken any more once the queue of them is full."""
    why = ""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        why = "" if stands_still else "no answer in time"
    elif isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        why = os.strerror(number) if number in _NO_WAY else ""
    elif isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return (
            f"what listens for rank 0 at {place} ends the controller's connections without an answer: see "
            "whether a service mesh of the namespace takes none but its own (strict mTLS)"
        )
    elif isinstance(error, aiohttp.ClientResponseError):
        return (
            f"what listens for rank 0 at {place} answers the controller {error.status} {error.message}: see "
            "whether a policy of the namespace's service mesh keeps it out"
        )
    return why and (
        f"the controller gets no connection to rank 0 at {place} ({why}): see whether a NetworkPolicy of the "
        "namespace keeps it out"
    )


def _unpacked(ledger: bytes) -> list[dict[str, Any]]:
    return parse_lines(zlib.decompress(ledger).decode(errors="replace"))


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


async def bounded_body(client: aiohttp.ClientSession, url: str, limit: int, whose: Attempt) -> bytes | None:
    """What is there of that attempt; None for an error, for more than `limit` bytes or more objects than have
    room in these, and where another one says that it is asked: it may have the address by now. Raises
    aiohttp's error for a 403, not a rank's."""
    parts, size, objects, uid = [], 0, 0, uid_of_attempt(*whose)
    async with client.get(url, allow_redirects=False) as answer:
        if answer.status == HTTPStatus.FORBIDDEN:
            answer.raise_for_status()
        if answer.status != HTTPStatus.OK or answer.headers.get(ATTEMPT_HEADER, uid) != uid:
            return None
        async for part in answer.content.iter_any():
            parts.append(part)
            size, objects = size + len(part), objects + objects_in(part)
            if size > limit or objects > limit // BYTES_OF_ONE:
                return None
    return b"".join(parts)


def objects_in(part: bytes) -> int:
    """How many objects and lists begin in a part of an answer, or more where texts hold such signs."""
    return part.count(b"{") + part.count(b"[")
