"""Whether the disk has room for what is about to be put on it, said before it is begun.

Nothing says it well afterwards: BuildKit empties its own cache first, then tests fail one by one, each in the
words of whatever it was that could not write.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster.errors import NoRoom

GB = 1_000_000_000
CLUSTER = 4 * GB
"""Of a cluster that is started: its logs, its pods' files, layers of images that change."""
TRAINER = 24 * GB
"""Of the trainer's image where nothing of it is there yet, measured: its packages in uv's cache, in the stage
that installs them, in the image's layer and in that layer unpacked."""


def need_room(path: Path, size: int, what: str) -> None:
    """Raises NoRoom where the disk of `path`, which may not exist yet, has less than `size` bytes free."""
    there = next(part for part in (path, *path.parents) if part.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise NoRoom(
            f"{what} takes {size / GB:.0f} GB and the disk of {path} has {free / GB:.1f} GB free: make room "
            "(`make cluster-down ARGS=--purge` removes built images), or let HOLDFAST_CACHE name a directory "
            "of another disk"
        )
