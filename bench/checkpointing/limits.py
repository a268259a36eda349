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


def measure_limits(folder: Path, size: int) -> Mapping[str, float]:
    """Seconds for `size` bytes, rounded up to whole blocks and scaled back."""
    whole = -(-size // BLOCK) * BLOCK
    memory = mmap.mmap(-1, whole)
    source = torch.frombuffer(memory, dtype=torch.uint8)
    source.fill_(7)
    target = torch.empty(whole, dtype=torch.uint8).fill_(0)
    view = memoryview(memory)
    path = folder / "limit"
    scale = size / whole

    def write(flags: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
        try:
            for start in range(0, whole, BLOCK):
                os.pwrite(fd, view[start : start + BLOCK], start)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(flags: int) -> None:
        fd = os.open(path, os.O_RDONLY | flags)
        try:
            for start in range(0, whole, BLOCK):
                os.preadv(fd, [view[start : start + BLOCK]], start)
        finally:
            os.close(fd)

    figures = {"copy": _seconds(lambda: target.copy_(source)) * scale}
    writes, reads = [], []
    for flags in (0, os.O_DIRECT):
        try:
            writes.append(_seconds(lambda flags=flags: write(flags)))  # type: ignore[misc]
            forget(path)
            reads.append(_seconds(lambda flags=flags: read(flags)))  # type: ignore[misc]
        except OSError:
            continue  # a file system without direct I/O
        finally:
            path.unlink(missing_ok=True)
    figures |= {"durable write": min(writes) * scale, "cold read": min(reads) * scale}
    view.release()
    return figures


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
