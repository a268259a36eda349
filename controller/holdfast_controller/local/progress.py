"""Ask rank 0 of every running attempt how far it is, about once a second.

Its address is in the attempt's directory once it listens, and is remembered. No answer is no news: the last
known figures stay, with the time at which they were true. Prometheus is told of the same addresses
(targets.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import httpx
import structlog

from holdfast_trainer.contract import ATTEMPT_HEADER, Progress

from .active import ActiveAttempt
from .targets import TargetsFile

EVERY_SECONDS = 1.0
TIMEOUT_SECONDS = 1.0
"""For an answer to begin, and between two of its parts."""
WHOLE_SECONDS = 5.0
LIMIT = 64 * 1024
"""Bytes of an answer."""

log = structlog.get_logger(__name__)


async def poll(
    attempts: Callable[[], Iterable[ActiveAttempt]], changed: Callable[[str], None], found: TargetsFile
) -> None:
    """For ever: update `progress` of the attempts, and tell the keys of those that moved."""
    # For https alone it would read the world's certificates, a twentieth of a second.
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, verify=False) as client:
        while True:
            found.write(attempts())
            await asyncio.gather(*(_ask(client, attempt, changed) for attempt in attempts()))
            await asyncio.sleep(EVERY_SECONDS)


async def _ask(client: httpx.AsyncClient, attempt: ActiveAttempt, changed: Callable[[str], None]) -> None:
    address = attempt.address
    if address is None or attempt.gone:
        return
    try:
        async with asyncio.timeout(WHOLE_SECONDS):
            answer = await _bounded(client, f"http://{address}/progress", attempt.launch.uid)
        progress = Progress.from_json(answer)
        # Its port may have been taken over, by another job's rank 0 or a process that is none of ours.
        if progress.attempt != attempt.launch.attempt:
            raise ValueError(f"{address} is of attempt {progress.attempt}")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
        before = attempt.beat.silence
        attempt.beat.missed(time.monotonic(), taken=isinstance(error, httpx.ReadTimeout))
        after = attempt.beat.silence
        if before is not None and after is not None and after.outdates > before.outdates:
            changed(attempt.key)
    except Exception as error:  # whatever a job's own program answers must not end the others'
        log.warning("progress cannot be read", job=attempt.key, error=repr(error)[:200])
    else:
        again = attempt.beat.silence is not None and attempt.beat.silence.outdates
        attempt.beat.answered(progress, time.monotonic())
        if again or progress != attempt.progress:
            attempt.progress = progress
            changed(attempt.key)
    if attempt.beat.silence is not None and attempt.beat.silence.over:
        changed(attempt.key)


async def _bounded(client: httpx.AsyncClient, url: str, uid: str) -> str:
    """What is there. Raises ValueError where another attempt than this one answers, or with more than `LIMIT`
    bytes."""
    body = b""
    async with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer:
        if answer.headers.get(ATTEMPT_HEADER, uid) != uid:
            raise ValueError(f"{url} is another attempt's")
        async for part in answer.aiter_raw():
            body += part
            if len(body) > LIMIT:
                raise ValueError(f"{url} answers more than {LIMIT} bytes")
    return body.decode(errors="replace")
