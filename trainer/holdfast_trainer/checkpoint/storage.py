"""The file operations that a checkpoint is made of, and nothing else of the file system.

Everything that changes `checkpoints/` goes through here, one method an operation, so that tests can record
what a save did, replay what a crash may leave of it, and let any single operation fail.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

from ..contract import exists, fsync_directory

_ALIGNMENT = 4096
"""What direct I/O wants of memory, offset and length; a page, which all common disks divide."""


class PartFiles(Protocol):
    """What a rank's file is written with, from several threads; a path is a location of that store."""

    def create(self, path: Any, *, direct: bool = False) -> int:
        """A descriptor to write an empty file with."""

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """All of `data`."""

    def truncate(self, fd: int, size: int) -> None:
        """What was written beyond `size` does not count."""

    def sync(self, fd: int) -> None:
        """Make it durable, whole."""

    def close(self, fd: int) -> None:
        """What was not synced may be lost."""


class Storage:
    """A POSIX file system; every method raises OSError as that does."""

    def make_directory(self, path: Path) -> None:
        """One that may exist already; missing parents are made too, and made durable."""
        try:
            os.mkdir(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            self.make_directory(path.parent)
            self.sync_directory(path.parent.parent)
            self.make_directory(path)

    def create(self, path: Path, *, direct: bool = False) -> int:
        """A descriptor to write an empty file; `direct` goes around the page cache where that is possible."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if direct and hasattr(os, "O_DIRECT"):
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system without direct I/O
                    raise
        return os.open(path, flags, 0o644)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """All of `data`; for a direct descriptor it is a multiple of a page, in memory as in the file."""
        while data:
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done
            if data and done % _ALIGNMENT:  # a direct write cannot go on from here; what is missing is told
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def hold(self, path: Path) -> int:
        """A descriptor of the directory that `path` names now, whatever has that name later."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def unlink(self, path: Path, held: int | None = None) -> None:
        """Nothing where it is gone already. With `held`, from that directory alone."""
        try:
            os.unlink(path if held is None else path.name, dir_fd=held)
        except FileNotFoundError:
            pass

    def sync_directory(self, path: Path, held: int | None = None) -> None:
        """With `held`, of that directory, whatever `path` names by now."""
        if held is None:
            fsync_directory(path)
        else:
            os.fsync(held)

    def remove_held(self, path: Path, held: int) -> None:
        """The directory of files that `held` is; another one that has its name by now stays."""
        for name in os.listdir(held):
            try:
                os.unlink(name, dir_fd=held)
            except IsADirectoryError:
                shutil.rmtree(name, dir_fd=held)
            except FileNotFoundError:
                pass
        try:
            os.rmdir(path)  # of the other one it does nothing, as that holds files
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise

    def remove_tree(self, path: Path) -> None:
        """Nothing where it is gone already; what appears in it meanwhile goes too."""
        for attempt in range(5):
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                if not exists(path):
                    return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or attempt == 4:
                    raise
                time.sleep(0.01)
            else:
                return

    def replace_durably(self, path: Path, text: str) -> None:
        """Write `text` so that after a crash `path` holds all of it or what it held before."""
        self.replace(path, text)
        self.sync_directory(path.parent)

    def replace(self, path: Path, text: str) -> None:
        """As `replace_durably`, with the new name still to be synced; where it raises, it is not there."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        fd = self.create(temporary)
        try:
            self.write(fd, memoryview(text.encode()), 0)
            self.sync(fd)
        finally:
            self.close(fd)
        self.rename(temporary, path)
