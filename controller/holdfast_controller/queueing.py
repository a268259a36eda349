"""A queue of keys for workers that look at one thing at a time.

A key that waits already is not added twice; a key that a worker holds is handed out again only after
`done`, so no two workers ever look at one job. Adding is the whole message: what changed is read afresh.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator


class WorkQueue:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._held: set[str] = set()
        self._again: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait for a worker now; not those that come back later."""
        return len(self._waiting) + len(self._again)

    def add(self, key: str) -> None:
        """Look at this key as soon as a worker is free."""
        if key in self._held:
            self._again.add(key)
        else:
            self._waiting[key] = None
            self._arrived.set()

    def add_after(self, key: str, seconds: float) -> None:
        """Look at this key in so many seconds; of several timers of a key the earliest counts."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(max(0.0, seconds), self._due, key)

    def _due(self, key: str) -> None:
        del self._timers[key]
        self.add(key)

    async def get(self) -> str:
        """The next key; give it back with `done`."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._held.add(key)
        return key

    def done(self, key: str) -> None:
        self._held.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        """Forget every key that waits, now or for its time."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._waiting.clear()
        self._again.clear()


class Keys:
    """Keys of jobs to look at again, for any number of readers; a key that waits is not added twice."""

    def __init__(self) -> None:
        self._readers: set[_KeyBox] = set()

    def publish(self, key: str) -> None:
        for reader in self._readers:
            reader.put(key)

    async def follow(self) -> AsyncGenerator[str]:
        box = _KeyBox()
        self._readers.add(box)
        try:
            while True:
                yield await box.get()
        finally:
            self._readers.discard(box)


class _KeyBox:
    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._arrived = asyncio.Event()

    def put(self, key: str) -> None:
        self._keys[key] = None
        self._arrived.set()

    async def get(self) -> str:
        while not self._keys:
            self._arrived.clear()
            await self._arrived.wait()
        key = next(iter(self._keys))
        del self._keys[key]
        return key
