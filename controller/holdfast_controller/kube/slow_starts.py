"""What keeps pods from starting that have their node: read from their Events, and only of those.

A pod that starts as it should costs nothing here. One that has taken longer than `SLOW_SECONDS` of our own
clock has its Events listed, again and again until it starts or goes; of a large gang that waits the first
few replicas speak for all, and all of it has a budget of requests of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import structlog

from holdfast_controller.cluster import HoldfastError
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_controller.policy.slow_start import SlowStart, slow_start

from .connection import Connection, Document
from .events import EventLog
from .pending import creating
from .pieces import Attempt, Pieces, attempt_of
from .pod_state import index_of
from .reflector import Notice, uid_of

log = structlog.get_logger(__name__)

SLOW_SECONDS = 20.0
LOOK_SECONDS = 5.0
AGAIN_SECONDS = 30.0
"""Between two lists of one pod's Events."""
SPEAKERS = 3
"""Replicas of an attempt that are asked about."""
PER_SECOND = 5.0
BURST = 10


@dataclass
class _Start:
    """Of one pod; `due`: when its Events are to be read next."""

    pod: Document
    attempt: Attempt
    due: float


class SlowStarts:
    """`known` has what was found, by the pod's uid, while `run` or whoever is within `followed` looks."""

    def __init__(self, connection: Connection, pieces: Pieces, clock: Callable[[], float] = time.monotonic):
        self._connection = connection
        self._pieces = pieces
        self._clock = clock
        self._starts: dict[str, _Start] = {}
        self.known: dict[str, SlowStart] = {}
        self._warned = False

    async def run(self) -> None:
        """Until cancelled."""
        with self.followed() as events:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self.look(events)

    @contextmanager
    def followed(self) -> Iterator[EventLog]:
        """Know which pods are slow; gives what their Events are to be read with."""
        stop = self._pieces.pods.listen(self._take)
        for pod in self._pieces.pods.all():
            self._take(Notice("ADDED", pod))
        try:
            yield EventLog(self._connection.apart(PER_SECOND, BURST))
        finally:
            stop()
            self._starts.clear()
            self.known.clear()

    async def look(self, events: EventLog) -> None:
        """Read the Events of those that are due, and have their jobs looked at where the reason is new."""
        now = self._clock()
        for uid, start in _speakers(self._starts.items()):
            if start.due > now:
                continue
            start.due = now + AGAIN_SECONDS
            meta = start.pod["metadata"]
            try:
                found = slow_start(await events.of(meta["namespace"], uid))
            except HoldfastError as error:
                if not self._warned:
                    log.warning("cannot read why a pod does not start", pod=meta["name"], error=str(error))
                self._warned = True
                continue
            self._warned = False
            if uid in self._starts and found != self.known.get(uid):
                self.known.pop(uid, None)
                if found is not None:
                    self.known[uid] = found
                self._pieces.wake(f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}")

    def _take(self, notice: Notice) -> None:
        pod = notice.object
        uid, attempt = uid_of(pod), attempt_of(pod)
        if notice.type == "DELETED" or attempt is None or not creating(pod):
            self._starts.pop(uid, None)
            self.known.pop(uid, None)
        elif uid not in self._starts:
            self._starts[uid] = _Start(pod, attempt, self._clock() + SLOW_SECONDS)


def _speakers(starts: Iterable[tuple[str, _Start]]) -> list[tuple[str, _Start]]:
    """The first few replicas of each attempt."""
    in_order = sorted(starts, key=lambda one: (one[1].attempt, index_of(one[1].pod)))
    attempts = groupby(in_order, key=lambda one: one[1].attempt)
    return [one for _, replicas in attempts for one in list(replicas)[:SPEAKERS]]
