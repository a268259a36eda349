"""Read a file once, by several threads, each block verified while it is still in the cache of a core.

Each thread reads pieces into a buffer of its own that stays in the cache, checksums them there and hands
them on. Where the file is read by one process alone it goes around the page cache, which saves a copy and
leaves other pages where they are; ranks of one machine that read the same files share the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from .checksums import BLOCK, Written
from .spread import Spread

PIECE = 4 << 20
"""Bytes read at a time; a divisor of BLOCK, and a multiple of what direct I/O asks for."""
READERS = 4
"""Threads at least: they wait for the disk more than they compute."""
_ALIGNMENT = 4096

Bytes = NDArray[np.uint8]


class UnreadableFile(Exception):
    """The file's bytes are not what its manifest, or its format, says."""


def scan(
    path: Path, size: int, expected: Written | None, take: Callable[[int, Bytes], None], *, alone: bool
) -> None:
    """Give all `size` bytes to `take(offset, bytes)`, in pieces, from several threads, in any order.

    The bytes are the taker's only during the call. Raises UnreadableFile naming the block that differs from
    `expected`, by then some of it was taken; OSError. `alone`: nobody else reads this file now.
    """
    fd = _open(path, direct=alone and size >= BLOCK)
    buffers = threading.local()

    def block(number: int) -> None:
        if not hasattr(buffers, "mine"):
            buffers.mine = memoryview(mmap.mmap(-1, PIECE))
        begin, end = number * BLOCK, min((number + 1) * BLOCK, size)
        sums = xxhash.xxh3_128()
        for start in range(begin, end, PIECE):
            piece = buffers.mine[: min(PIECE, end - start)]
            _read(fd, buffers.mine, start, len(piece))
            sums.update(piece)
            take(start, np.frombuffer(piece, dtype=np.uint8))
        wanted = sums.hexdigest() if expected is None else expected.sum_of_block(number)
        if sums.hexdigest() != wanted:
            raise UnreadableFile(
                f"{path.name}: checksum {sums.hexdigest()} of block {number}, its manifest says {wanted}"
            )

    try:
        Spread(block, -(-size // BLOCK), name="read", least=READERS).finish()
    finally:
        os.close(fd)


def _open(path: Path, *, direct: bool) -> int:
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without direct I/O
                raise
    return os.open(path, os.O_RDONLY)


def _read(fd: int, buffer: memoryview, offset: int, count: int) -> None:
    """`count` bytes at `offset` into `buffer`, whose rest up to the alignment may be written to as well."""
    room, done = buffer[: -(-count // _ALIGNMENT) * _ALIGNMENT], 0
    while done < count:  # signals and network file systems give less than asked for
        got = os.preadv(fd, [room[done:]], offset + done)
        if not got:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        done += got
