"""What keeps pods from starting that have their node: their Events say, their status does not.

A pod that starts as it should costs nothing here: only of one that has taken longer than `SLOW_SECONDS` of
our own clock are the Events listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast_controller.policy.slow_start import SlowStart, slow_start

from .connection import Connection, Document
from .events import EventLog
from .inquiry import Inquiry
from .pending import creating
from .pieces import Pieces
from .reflector import uid_of

SLOW_SECONDS = 20.0


def slow_starts(
    connection: Connection, pieces: Pieces, clock: Callable[[], float] = time.monotonic
) -> Inquiry[SlowStart]:
    """About pods."""
    return Inquiry(
        connection,
        pieces,
        lambda pieces: [pieces.pods],
        concerns=creating,
        ask=_told,
        first_seconds=SLOW_SECONDS,
        clock=clock,
    )


async def _told(connection: Connection, pod: Document) -> SlowStart | None:
    return slow_start(await EventLog(connection).of(pod["metadata"]["namespace"], uid_of(pod)))
