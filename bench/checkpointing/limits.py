"""What the machine allows: copying, writing durably and reading as many bytes as the state has.

Each is done the plainest way, from and into memory that was touched before, without checksums, formats
or files in parallel; where the page cache can be gone around, both ways are tried and the faster counts.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

BLOCK = 16 << 20


def forget(path: Path) -> None:
    """Out of the page cache, so that the next read is the disk's."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # only clean pages can be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class Limits:
    """Plain copies, writes and reads of `size` bytes below `folder`; seconds each.

    Sizes are rounded up to whole blocks, and the time is scaled back. Use as a context manager.
    """

    def __init__(self, folder: Path, size: int) -> None:
        whole = -(-size // BLOCK) * BLOCK
        self._memory = mmap.mmap(-1, whole)
        self._source = torch.frombuffer(self._memory, dtype=torch.uint8).fill_(7)
        self._view = memoryview(self._memory)
        self._path, self._scale = folder / "limit", size / whole
        self._flags: tuple[int, ...] = (0, os.O_DIRECT)

    def __enter__(self) -> Limits:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._view.release()

    def copy(self) -> float:
        """From one place in memory to another; from a GPU to page-locked memory where there is one."""
        source, target = self._source, torch.empty_like(self._source).fill_(0)
        if torch.cuda.is_available():
            source, target = source.cuda(), target.pin_memory()
            torch.cuda.synchronize()
        return _seconds(lambda: target.copy_(source)) * self._scale

    def write(self) -> float:
        """Into a new file, until it is synced."""
        return self._faster(self._write)

    def read(self) -> float:
        """What `write` left, the page cache dropped before."""
        return self._faster(self._read)

    def _faster(self, work: Callable[[int], float]) -> float:
        """The first time both ways are tried, from then on the faster alone."""
        found = {}
        for flags in self._flags:
            try:
                found[flags] = work(flags)
            except OSError:
                continue  # a file system without direct I/O
        self._flags = (min(found, key=lambda flags: found[flags]),)
        return min(found.values()) * self._scale

    def _write(self, flags: int) -> float:
        self._path.unlink(missing_ok=True)

        def work() -> None:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
            try:
                for start in range(0, len(self._view), BLOCK):
                    os.pwrite(fd, self._view[start : start + BLOCK], start)
                os.fsync(fd)
            finally:
                os.close(fd)

        return _seconds(work)

    def _read(self, flags: int) -> float:
        forget(self._path)

        def work() -> None:
            fd = os.open(self._path, os.O_RDONLY | flags)
            try:
                for start in range(0, len(self._view), BLOCK):
                    os.preadv(fd, [self._view[start : start + BLOCK]], start)
            finally:
                os.close(fd)

        return _seconds(work)


def measure_limits(folder: Path, size: int) -> Mapping[str, float]:
    """Seconds for `size` bytes by limit."""
    with Limits(folder, size) as limits:
        return {"copy": limits.copy(), "durable write": limits.write(), "cold read": limits.read()}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
