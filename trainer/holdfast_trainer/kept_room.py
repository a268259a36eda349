"""Room on a disk, kept while there is some for what has to be said at the end, however full it is by then.

Standard library only, because a rank waits for it to start. Linux: fallocate(2).
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from .contract import fsync_directory
from .tee import write_all

BYTES = 4096
"""What Kubernetes reads of a termination message; an exit file has far less."""
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def keep_room(path: Path) -> None:
    """Have the file itself hold room for `BYTES`; it is made where it is not there, and reads as it did.

    A file system that cannot, as btrfs or some NFS, keeps none, which is no error: it was so without.
    """
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _keep(file)
        finally:
            os.close(file)


class KeptFile:
    """Holds room for `path` beside it. Where that is not possible, `write` says why, and not before."""

    def __init__(self, path: Path):
        self.path = path
        self._held = path.with_name(f".{path.name}.tmp")
        keep_room(self._held)

    def write(self, text: str) -> None:
        """After a crash `path` holds all of it, or is not there. Raises OSError."""
        file = os.open(self._held, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            data = text.encode()
            write_all(file, data)
            os.ftruncate(file, len(data))  # a crash before the new name may have left a longer one
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(self._held, self.path)
        fsync_directory(self.path.parent)


def _keep(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate(file, _KEEP_SIZE, 0, BYTES) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
