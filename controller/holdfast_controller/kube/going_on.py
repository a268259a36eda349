"""What is done beside the jobs goes on, whatever one of them has brought it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

AGAIN_SECONDS = 10.0

log = structlog.get_logger(__name__)


async def going_on(what: str, work: Callable[[], Awaitable[None]], again: float = AGAIN_SECONDS) -> None:
    """Until cancelled. An error that nobody has foreseen is told with its traceback, and the work begun anew
    after `again` seconds: let through it would end the controller, and each that is started after it, as the
    pod or job that it came of is still there."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("it broke off and begins anew", work=what, after=again)
        await asyncio.sleep(again)
