"""A disk that stands still, as a mount whose server is gone, and whoever must go on all the same.

A call that waits for such a disk cannot be broken off, so it is made in a thread that is left to itself where
it takes too long. Standard library only, because a rank waits for it to start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .tee import Sink
from .within import start_thread

STILL_SECONDS = 10.0
"""So long a log is waited for that takes nothing."""
MOST = 1 << 20
"""Bytes that wait for a disk."""


class Apart:
    """What a sink is to take, in its order. Of a disk that is slow whoever says more waits for it; where it
    stands still he goes on, and what finds no room in memory is left out, with a note of how much."""

    def __init__(self, sink: Sink, end: Callable[[], None]):
        """`end` is called once the sink has all."""
        self._sink, self._end = sink, end
        self._waiting: deque[bytes] = deque()
        self._held = self._left_out = 0
        self._over = False
        self._moved = time.monotonic()
        self._turn = threading.Condition()
        self._thread = start_thread(self._run, "disk")

    def __call__(self, data: bytes) -> None:
        if self._thread is None:
            self._sink(data)
            return
        with self._turn:
            if not self._waiting:
                self._moved = time.monotonic()
            while self._held >= MOST and (patience := self._patience()) > 0:
                self._turn.wait(patience)
            if self._held >= MOST:
                self._left_out += len(data)
                return
            self._note()
            self._add(data)

    def end(self) -> bool:
        """Wait until the sink has all; False where it stands still."""
        if self._thread is None:
            self._end()
            return True
        with self._turn:
            self._note()
            self._over = True
            if not self._waiting:
                self._moved = time.monotonic()
            self._turn.notify_all()
        while self._thread.is_alive() and (patience := self._patience()) > 0:
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _patience(self) -> float:
        return self._moved + STILL_SECONDS - time.monotonic()

    def _note(self) -> None:
        if self._left_out:
            why = "the disk of this log stood still"
            self._add(f"\n[holdfast] {self._left_out} bytes are left out here: {why}\n".encode())
            self._left_out = 0

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._held += len(data)
        self._turn.notify_all()

    def _run(self) -> None:
        while data := self._next():
            with suppress(OSError):  # as in tee.copy
                self._sink(data)
            with self._turn:
                self._waiting.popleft()
                self._held -= len(data)
                self._moved = time.monotonic()
                self._turn.notify_all()
        self._end()

    def _next(self) -> bytes:
        """b"" where nothing more will come."""
        with self._turn:
            while not self._waiting and not self._over:
                self._turn.wait()
            return self._waiting[0] if self._waiting else b""
