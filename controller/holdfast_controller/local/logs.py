"""Read a log file's last lines, and follow it while it grows.

What was left out of a long log is a hole in its file (holdfast_trainer/bounded_log.py): it is passed over,
or it would read as so many zeros. It only grows, at its end, so what was read is judged by what it is
afterwards.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast_controller.lines import Lines
from holdfast_trainer.contract import exists

BLOCK = 65536
FOLLOW_SECONDS = 0.1
_PASSED = b"\n[holdfast] %d bytes were left out before they were shown: they came too fast for that\n"


def tail_offset(path: Path, lines: int) -> int:
    """Where the last `lines` lines of a file begin, in bytes; 0 where there is none."""
    if not exists(path):
        return 0
    if lines <= 0:
        return path.stat().st_size
    with open(path, "rb") as file:
        position = end = file.seek(0, os.SEEK_END)
        hole = _hole(file.fileno())
        found = 0
        while position > 0:
            if hole.start < position <= hole.stop:
                position = hole.start
            size = min(BLOCK, position - hole.stop if position > hole.stop else position)
            position -= size
            file.seek(position)
            block = file.read(size)
            if position + size == end and block.endswith(b"\n"):
                block = block[:-1]  # the end of the last line starts no new one
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                found += 1
                if found == lines:
                    return position + at + 1
    return 0


async def read(path: Path, *, tail: int | None, over: Callable[[], bool] | None) -> AsyncGenerator[str]:
    """Lines without their ends; with `over` it waits for more until that says true.

    A file that is not there yet is empty. What follows the last line's end comes last.
    """
    offset = tail_offset(path, tail) if tail is not None else 0
    lines = Lines()
    while True:
        ended = over is None or over()  # asked before reading: what was written before the end is read
        while block := _read(path, offset):
            offset = block.end
            for line in lines.take(block.data):
                yield line
            await asyncio.sleep(0)
        if ended:
            break
        await asyncio.sleep(FOLLOW_SECONDS)
    for line in lines.end():
        yield line


@dataclass(frozen=True)
class _Block:
    data: bytes
    end: int
    """Where the next one begins."""


def _read(path: Path, offset: int) -> _Block | None:
    """None where there is no more so far."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(BLOCK)
            hole = _hole(file.fileno())
            if offset not in hole:
                # What was read of a hole that lies further on is no more than zeros.
                data = data[: hole.start - offset] if offset < hole.start else data
                return _Block(data, offset + len(data)) if data else None
            told = b"" if offset == hole.start else _PASSED % (hole.stop - offset)  # before a hole it says so
            return _Block(told, hole.stop)
    except FileNotFoundError:
        return None


def _hole(file: int) -> range:
    """Where it lies; an empty one at the end of the file where it has none."""
    size = os.fstat(file).st_size
    try:
        start = os.lseek(file, 0, os.SEEK_HOLE)
        return range(start, os.lseek(file, start, os.SEEK_DATA))
    except OSError:  # nothing lies behind it, or its file system cannot tell
        return range(size, size)
