"""Read the newest checkpoint ahead into the page cache, while PyTorch is imported and the model is built.

What loads it later finds it there, which helps the more the slower the disk or the network file system is.
It takes no memory from anybody, for the kernel drops such pages where they are in the way, and at most half
of what is free. A run directory in a bucket is not read ahead. Standard library only: it begins before all
else is imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from .contract import RunDir, checkpoint_steps
from .memory import free_memory

PIECE = 8 << 20
"""Bytes asked for at a time: who stops waits for no more than that."""
PATIENCE = 1.0
"""Seconds that who stops waits for a file system which does not answer."""


class Prefetch:
    """Reads ahead in a thread, from the moment it is made until it is done or stopped."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns once the thread is gone: a process should have none when it forks."""
        self._stop.set()
        self._thread.join(PATIENCE)

    def _read(self) -> None:
        try:
            for path in files_to_read(self._run, (free_memory() or 0) // 2):
                for _ in read_ahead(path):
                    if self._stop.is_set():
                        return
        except OSError:
            return  # pruned meanwhile, or not readable: the load will say which


def files_to_read(run: RunDir, room: int) -> list[Path]:
    """Files of the newest checkpoint that is whole, as many as have `room` (bytes). Raises OSError."""
    steps = [] if run.objects else checkpoint_steps(run)
    files = []
    for path in sorted(run.checkpoint(steps[0]).iterdir()) if steps else ():
        room -= path.stat().st_size
        if room < 0:
            break
        files.append(path)
    return files


def read_ahead(path: Path) -> Iterator[int]:
    """Ask for a piece of the file each time; yields how much was asked for, in bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        for start in range(0, os.fstat(fd).st_size, PIECE):
            os.posix_fadvise(fd, start, PIECE, os.POSIX_FADV_WILLNEED)
            yield start + PIECE
    finally:
        os.close(fd)
