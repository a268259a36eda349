"""Standard output and standard error that end no training.

What reads a training's output may go first: `| tee log` ends by the Ctrl-C that asks the training to save, a
terminal is closed, the disk of a log is full. A loop's next `print` raised then, in the middle of a step, and
all since the newest checkpoint was lost. What standard output does not take goes to standard error instead,
and what that does not take is dropped.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from .tee import write_all

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lasting(io.FileIO):
    def __init__(self, stream: io.TextIOWrapper, instead: int | None):
        super().__init__(stream.fileno(), "w", closefd=False)
        self.name = stream.name
        self._instead = instead

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            taken = bytes(data)
            if self._instead is not None:
                with suppress(OSError):
                    write_all(self._instead, taken)
            return len(taken)


def outlast_readers() -> None:
    """Put such streams in the place of Python's own. Those that a program has put there stay; one that was
    closed, by `2>&-` or by the program, leads nowhere, where it had no place to tell an error at all."""
    beside = None if _is_closed(sys.__stderr__) else 2  # of a closed one another file has got the number
    for name, instead in (("stdout", beside), ("stderr", None)):
        stream = getattr(sys, name)
        own = getattr(sys, f"__{name}__")
        if stream is None or (stream is own and _is_closed(own)):
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # stays open
            continue
        if stream is not own or not isinstance(stream, io.TextIOWrapper):
            continue
        with suppress(OSError):
            stream.flush()
        raw = _Lasting(stream, instead)
        unbuffered = isinstance(stream.buffer, io.RawIOBase)
        lasting = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)


def _is_closed(own: TextIO | None) -> bool:
    return own is None or own.closed
