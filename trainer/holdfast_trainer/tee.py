"""Where the output of a supervised command goes: to its log as it is, and shown to whoever looks on.

Standard library only, because a rank waits for it to start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

LONGEST_LINE = 64 * 1024
"""Bytes that are kept back while a line has no end."""
Sink = Callable[[bytes], None]


def copy(pipe: int, sinks: list[Sink]) -> bool:
    """Copy what the pipe holds now; False where it is closed."""
    while True:
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        for sink in sinks:
            with suppress(OSError):  # a full disk or a closed terminal must not stop the training
                sink(data)


class MarkedLines:
    """Writes whole lines, with a mark before each that has none of this kind."""

    def __init__(self, fd: int, mark: str):
        self._fd, self._mark, self._rest = fd, mark.encode(), b""

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        write_all(self._fd, b"".join(self._marked(line) for line in lines))

    def end(self) -> None:
        """What was said last, though it is no whole line."""
        if self._rest:
            with suppress(OSError):
                write_all(self._fd, self._marked(self._rest))

    def _marked(self, line: bytes) -> bytes:
        return b"%b%b\n" % (b"" if line.startswith(self._mark) else self._mark, line)


class Newest:
    """Keeps the newest `most` bytes."""

    def __init__(self, most: int):
        self._most, self.data = most, b""

    def __call__(self, data: bytes) -> None:
        self.data = (self.data + data)[-self._most :]


def write_all(sink: int, data: bytes) -> None:
    """Raises OSError; what was written by then stays."""
    while data:
        data = data[os.write(sink, data) :]
