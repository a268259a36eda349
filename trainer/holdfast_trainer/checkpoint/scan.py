"""Read a file once, by several threads, each block verified while it is still in the cache of a core.

Each thread reads pieces into a buffer of its own that stays in the cache, checksums them there and hands
them on. Where the file is read by one process alone, and was not read ahead (prefetch.py), it goes around the
page cache, which saves a copy and leaves other pages where they are; ranks of one machine that read the same
files share the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from .bucket import Location, ObjectPath
from .checksums import BLOCK, Written
from .spread import Spread

PIECE = 4 << 20
"""Bytes read at a time; a divisor of BLOCK, and a multiple of what direct I/O asks for."""
READERS = 4
"""Threads at least: they wait for the disk more than they compute."""
OBJECT_READERS = 16
"""Likewise of an object: each has one request under way."""
_ALIGNMENT = 4096
_SAMPLES = 16

Bytes = NDArray[np.uint8]


class UnreadableFile(Exception):
    """The file's bytes are not what its manifest, or its format, says."""


class Opened(Protocol):
    """A file that is read from several threads."""

    @property
    def readers(self) -> int:
        """Threads at least that read it."""

    @property
    def looks(self) -> int:
        """How often a block is read before it is called damaged."""

    def read(self, buffer: memoryview, offset: int, count: int) -> None:
        """`count` bytes at `offset` into `buffer`, whose rest up to the alignment may be overwritten."""


@dataclass(frozen=True)
class _File:
    fd: int
    readers: int = READERS
    looks: int = 1

    def read(self, buffer: memoryview, offset: int, count: int) -> None:
        room, done = buffer[: -(-count // _ALIGNMENT) * _ALIGNMENT], 0
        while done < count:  # signals and network file systems give less than asked for
            got = os.preadv(self.fd, [room[done:]], offset + done)
            if not got:
                raise _shorter()
            done += got


@dataclass(frozen=True)
class _Object:
    path: ObjectPath
    readers: int = OBJECT_READERS
    looks: int = 2
    """The object may be sound, and its bytes have come otherwise."""

    def read(self, buffer: memoryview, offset: int, count: int) -> None:
        data = self.path.bucket.read(self.path.key, offset, offset + count)
        if len(data) != count:
            raise _shorter()
        buffer[:count] = data


def _shorter() -> OSError:
    return OSError(errno.EBADMSG, "the file became shorter while it was read")


@contextmanager
def opened(path: Location, *, direct: bool = False) -> Iterator[Opened]:
    """`path`, to be read; `direct` goes around the page cache where that is possible. Raises OSError."""
    if isinstance(path, ObjectPath):
        yield _Object(path)
        return
    fd = _open(path, direct=direct and not cached(path))
    try:
        yield _File(fd)
    finally:
        os.close(fd)


def size_of(path: Location) -> int:
    """Bytes. Raises OSError."""
    return path.bucket.size(path.key) if isinstance(path, ObjectPath) else path.stat().st_size


def scan(
    path: Location, size: int, expected: Written | None, take: Callable[[int, Bytes], None], *, alone: bool
) -> None:
    """Give all `size` bytes to `take(offset, bytes)`, in pieces, from several threads, in any order.

    The bytes are the taker's only during the call; those that come twice count as they come then. Raises
    UnreadableFile naming the block that differs from `expected`, by then some of it was taken; OSError.
    `alone`: nobody else reads this file now.
    """
    buffers = threading.local()

    def block(number: int) -> None:
        if not hasattr(buffers, "mine"):
            buffers.mine = memoryview(mmap.mmap(-1, PIECE))
        for _ in range(file.looks):
            found = once(number * BLOCK, min((number + 1) * BLOCK, size))
            wanted = found if expected is None else expected.sum_of_block(number)
            if found == wanted:
                return
        raise UnreadableFile(f"{path.name}: checksum {found} of block {number}, its manifest says {wanted}")

    def once(begin: int, end: int) -> str:
        sums = xxhash.xxh3_128()
        for start in range(begin, end, PIECE):
            piece = buffers.mine[: min(PIECE, end - start)]
            file.read(buffers.mine, start, len(piece))
            sums.update(piece)
            take(start, np.frombuffer(piece, dtype=np.uint8))
        return sums.hexdigest()

    with opened(path, direct=alone and size >= BLOCK) as file:
        Spread(block, -(-size // BLOCK), name="read", least=file.readers).finish()


def cached(path: Path) -> bool:
    """Whether the file is in the page cache, as samples of it tell, its last page among them.

    False also where the file system cannot say. Raises OSError where it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        last, room = max(0, os.fstat(fd).st_size - 1), bytearray(1)
        places = (last * number // (_SAMPLES - 1) for number in range(_SAMPLES))
        return all(os.preadv(fd, [room], place, os.RWF_NOWAIT) for place in places)
    except OSError:
        return False  # one that is elsewhere (EAGAIN), or a file system without such reads (EOPNOTSUPP)
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
