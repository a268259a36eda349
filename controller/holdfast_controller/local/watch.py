"""Changes of jobs, handed to any number of watchers in this process.

Level-triggered: a watcher that is slow gets the newest state of a job once, not every state it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from holdfast_controller.cluster import Change
from holdfast_controller.jobs import TrainingJob


class Watchers:
    """All who watch a store; `publish` never waits for them."""

    def __init__(self) -> None:
        self._inboxes: set[_Inbox] = set()

    def publish(self, change: Change) -> None:
        for inbox in self._inboxes:
            inbox.put(change)

    async def follow(self, first: list[TrainingJob] | None = None) -> AsyncGenerator[Change]:
        """Changes from now on, after `first` as ADDED."""
        inbox = _Inbox()
        self._inboxes.add(inbox)
        try:
            for job in first or []:
                inbox.put(Change("ADDED", job))
            while True:
                yield await inbox.get()
        finally:
            self._inboxes.discard(inbox)


class _Inbox:
    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}
        self._arrived = asyncio.Event()

    def put(self, change: Change) -> None:
        uid = change.job.metadata.uid
        waiting = self._changes.pop(uid, None)
        if waiting is not None and waiting.type == "ADDED" and change.type == "MODIFIED":
            change = Change("ADDED", change.job)
        self._changes[uid] = change
        self._arrived.set()

    async def get(self) -> Change:
        while not self._changes:
            self._arrived.clear()
            await self._arrived.wait()
        return self._changes.pop(next(iter(self._changes)))
