"""Read a log file's last lines, and follow it while it grows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from holdfast_controller.lines import Lines

BLOCK = 65536
FOLLOW_SECONDS = 0.1


def tail_offset(path: Path, lines: int) -> int:
    """Where the last `lines` lines of a file begin, in bytes; 0 where there is none."""
    if not path.exists():
        return 0
    if lines <= 0:
        return path.stat().st_size
    with open(path, "rb") as file:
        position = end = file.seek(0, os.SEEK_END)
        found = 0
        while position > 0:
            size = min(BLOCK, position)
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
            offset += len(block)
            for line in lines.take(block):
                yield line
            await asyncio.sleep(0)
        if ended:
            break
        await asyncio.sleep(FOLLOW_SECONDS)
    for line in lines.end():
        yield line


def _read(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(BLOCK)
    except FileNotFoundError:
        return b""
