"""Questions about objects that wait, asked again and again until they do not wait any more.

What would cost a watch of its own, of things that mostly nobody needs, is listed for the few objects that it
concerns. An apiserver reads all Events of a namespace to find those of one object, so what a question costs
is seen by how long its answer takes, and questions of one kind are asked a small share of the time. Of an
attempt with many objects the first few are asked about, and when an answer is a new one its job is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import dropwhile, groupby, islice
from typing import Generic, TypeVar

import structlog

from holdfast_controller.cluster import HoldfastError
from holdfast_controller.pod_template import JOB_LABEL

from .connection import Connection, Document
from .pieces import Attempt, Pieces, attempt_of
from .pod_state import index_of
from .reflector import Notice, Reflector, uid_of

log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
AGAIN_SECONDS = 30.0
"""Between two questions about one object."""
SPEAKERS = 3
"""Replicas of an attempt that are asked about."""
SHARE = 0.05
"""Of the time, in which an answer is awaited."""
PER_SECOND = 20.0
BURST = 20
"""Requests, of which a long answer takes several: what jobs need has a budget of its own."""

Answer = TypeVar("Answer")


@dataclass
class _Waiting:
    """`since`: when it was first heard of; `due`: when it is to be asked about next."""

    document: Document
    attempt: Attempt
    since: float
    due: float


class Inquiry(Generic[Answer]):
    """About objects of some kinds of `pieces`."""

    def __init__(
        self,
        connection: Connection,
        pieces: Pieces,
        kinds: Callable[[Pieces], Iterable[Reflector]],
        *,
        concerns: Callable[[Document], bool],
        ask: Callable[[Connection, Document], Awaitable[Answer | None]],
        first_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """`concerns` says which objects wait, of those that nobody has deleted; each is asked about once it
        has for `first_seconds`. `pause` rests between two questions."""
        self._connection = connection
        self._pieces = pieces
        self._kinds = kinds
        self._concerns = concerns
        self._ask = ask
        self._first_seconds = first_seconds
        self._clock = clock
        self._pause = pause
        self._waiting: dict[str, _Waiting] = {}
        self._known: dict[str, Answer] = {}
        self._warned = False

    @property
    def known(self) -> Mapping[str, Answer]:
        """The newest answers by uid, while `run` or whoever is within `followed` looks."""
        return self._known

    def newest(self, count: int, seconds: float) -> list[Document]:
        """Of those that have waited for so long, the last few."""
        before = self._clock() - seconds
        long = dropwhile(lambda one: one.since > before, reversed(self._waiting.values()))
        return [one.document for one in islice(long, count)]

    async def run(self) -> None:
        """Until cancelled."""
        with self.followed() as connection:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self.look(connection)

    @contextmanager
    def followed(self) -> Iterator[Connection]:
        """Know which objects wait; gives the connection to ask over."""
        with ExitStack() as listening:
            listening.callback(self._forget)
            for reflector in self._kinds(self._pieces):
                listening.callback(reflector.listen(self._take))
                for document in reflector.all():
                    self._take(Notice("ADDED", document))
            yield self._connection.apart(PER_SECOND, BURST)

    async def look(self, connection: Connection) -> None:
        """Ask about those that are due, and have their jobs looked at where the answer is a new one."""
        now = self._clock()
        for uid, waiting in _speakers(self._waiting.items()):
            if waiting.due > now or uid not in self._waiting:
                continue
            waiting.due = now + AGAIN_SECONDS
            meta, asked = waiting.document["metadata"], self._clock()
            try:
                found = await self._ask(connection, waiting.document)
            except HoldfastError as error:
                if not self._warned:
                    log.warning("cannot read why it waits", object=meta["name"], error=str(error))
                self._warned = True
            else:
                self._warned = False
                self._note(uid, waiting.document, found)
            await self._pause(min(AGAIN_SECONDS, (self._clock() - asked) * (1 / SHARE - 1)))

    def _note(self, uid: str, document: Document, found: Answer | None) -> None:
        if uid in self._waiting and found != self._known.get(uid):
            self._known.pop(uid, None)
            if found is not None:
                self._known[uid] = found
            meta = document["metadata"]
            self._pieces.wake(f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}")

    def _forget(self) -> None:
        self._waiting.clear()
        self._known.clear()

    def _take(self, notice: Notice) -> None:
        document = notice.object
        uid, attempt = uid_of(document), attempt_of(document)
        going = notice.type == "DELETED" or "deletionTimestamp" in document["metadata"]
        if going or attempt is None or not self._concerns(document):
            self._waiting.pop(uid, None)
            self._known.pop(uid, None)
        elif (waiting := self._waiting.get(uid)) is not None:
            waiting.document = document  # which the reflector keeps anyway, and not the older one as well
        else:
            now = self._clock()
            self._waiting[uid] = _Waiting(document, attempt, now, now + self._first_seconds)


def _speakers(waiting: Iterable[tuple[str, _Waiting]]) -> list[tuple[str, _Waiting]]:
    """The first few replicas of each attempt."""
    in_order = sorted(waiting, key=lambda one: (one[1].attempt, index_of(one[1].document)))
    attempts = groupby(in_order, key=lambda one: one[1].attempt)
    return [one for _, objects in attempts for one in list(objects)[:SPEAKERS]]
