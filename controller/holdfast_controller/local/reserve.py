"""Room on the disk that is kept while there is some, and given up for what makes more."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

BYTES = 1 << 20
"""Some dozens of writes of the store, until the files of a deleted job are gone."""


class Reserve:
    """A file that is there for its size alone."""

    def __init__(self, path: Path):
        self._path = path

    def keep(self) -> None:
        """Where the disk has no room for it there is none, which is no error."""
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:  # also where it is there
            return
        try:
            os.posix_fallocate(file, 0, BYTES)
        except OSError:
            self.give()
        finally:
            os.close(file)

    def give(self) -> bool:
        """Whether there was one."""
        with suppress(OSError):
            self._path.unlink()
            return True
        return False
