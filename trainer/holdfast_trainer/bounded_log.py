"""A rank's log that takes no more of the disk than it may: its beginning stays, and its newest end.

The rank writes into the file itself, and is neither held up nor asked. What lies between the first half of
the limit and the newest one is given back to the disk as a hole (fallocate(2), FALLOC_FL_PUNCH_HOLE), which
grows with the log: offsets stay, so whoever follows it goes on where they are. Before the hole stands how
many bytes were left out. `ls -l` shows the file with its hole, `du` what it takes.

A file system that makes no holes (NFS before 4.2) keeps the first half. Then the rank writes into a pipe;
the newest `NEWEST` bytes are in memory and are written when it has ended.

Standard library only, because a rank waits for it to start. Linux.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .tee import write_all

BLOCK = 64 * 1024
"""A hole begins and ends at such: whole blocks of any file system, or its rest would read as zeros."""
LEAST = 4 * BLOCK
NOTE = 256
"""Bytes, the same however many were left out, so that the note can be written anew in its place."""
NEWEST = 1 << 20
SECONDS = 1.0
"""Between two looks at a log that the rank writes itself."""
_PUNCH_HOLE = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE, without which it is refused
_FAR = 1 << 40


class Log:
    """The log behind `file`, which grows as it will."""

    piped = False
    """Whether all that a rank says has to come through here."""

    def __init__(self, file: int):
        self._log = file
        self.tend: Callable[[], None] | None = None
        """To be done now and again while the rank writes the file itself."""

    def __call__(self, data: bytes) -> None:
        """Take what a rank says. Raises OSError."""
        write_all(self._log, data)

    def end(self) -> None:
        """The rank has ended."""


class HoledLog(Log):
    """Kept to `limit` bytes, whoever writes it."""

    def __init__(self, file: int, limit: int):
        """Raises OSError where its file system makes no holes."""
        super().__init__(file)
        self.tend = self.cut
        self._limit = limit
        self._start = max(limit // 2 // BLOCK, 1) * BLOCK
        self._end = self._start
        # Not O_APPEND, with which Linux appends whatever offset is given.
        self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            _punch(self._file, _FAR, BLOCK)
        except OSError:
            os.close(self._file)
            raise

    def __call__(self, data: bytes) -> None:
        super().__call__(data)
        self.cut()

    def cut(self) -> None:
        """Give back what is too much by now; nothing may keep a rank from going on."""
        with suppress(OSError):
            size = os.fstat(self._file).st_size
            end = (size - (self._limit - self._start)) // BLOCK * BLOCK + BLOCK
            if size <= self._limit or end <= self._end:
                return
            note = _note(f"{end - self._start + NOTE} bytes are left out here", self._limit)
            os.pwrite(self._file, note, self._start - NOTE)
            _punch(self._file, self._end, end - self._end)
            self._end = end


class HalfLog(Log):
    """Keeps the beginning of what a rank says and, until `end`, the newest of it in memory."""

    piped = True

    def __init__(self, file: int, limit: int):
        super().__init__(file)
        self._limit = limit
        self._room = limit // 2 - os.fstat(file).st_size
        self._newest: deque[bytes] = deque()
        self._held = self._left_out = 0

    def __call__(self, data: bytes) -> None:
        if self._room > 0:
            written, data = data[: self._room], data[self._room :]
            self._room -= len(written)
            super().__call__(written)
            if self._room <= 0:
                why = "its file system makes no holes, so what follows is left out, but for its end"
                super().__call__(_note(why, self._limit))
        if data:
            self._newest.append(data)
            self._held += len(data)
            while self._held - len(self._newest[0]) >= NEWEST:
                oldest = self._newest.popleft()
                self._held -= len(oldest)
                self._left_out += len(oldest)

    def end(self) -> None:
        with suppress(OSError):
            if self._left_out:
                super().__call__(_note(f"{self._left_out} bytes were left out here", self._limit))
            super().__call__(b"".join(self._newest))


def kept_to(limit: int, file: int) -> Log:
    """Of bytes, at least `LEAST`; 0: no limit."""
    if limit <= 0:
        return Log(file)
    limit = max(limit, LEAST)
    try:
        return HoledLog(file, limit)
    except OSError:
        return HalfLog(file, limit)


def _note(what: str, limit: int) -> bytes:
    text = f"\n[holdfast] {what}: this log may take {limit} bytes (HOLDFAST_LOG_LIMIT, jobs.logLimit)"
    return text.encode().ljust(NOTE - 1)[: NOTE - 1] + b"\n"


def _punch(file: int, start: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate(file, _PUNCH_HOLE, start, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
