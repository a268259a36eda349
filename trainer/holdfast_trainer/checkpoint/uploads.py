"""Files as objects: parts of an upload from several threads at once, no object before the last is there.

A block of `BLOCK` bytes at a multiple of that is a part and goes at once. Shorter ones gather until they make
a part, or until `truncate` and `sync` tell that they are the last. What is small is put in one request.
"""

from __future__ import annotations

import errno
import itertools
import threading
from dataclasses import dataclass, field

from .bucket import Bucket, ObjectPath
from .checksums import BLOCK
from .errors import ObjectStoreError

MOST_PARTS = 10_000
"""Of one upload; the protocol's own bound."""


@dataclass
class _Upload:
    """One object on its way."""

    key: str
    name: str | None = None
    parts: dict[int, str] = field(default_factory=dict)
    tail: bytearray = field(default_factory=bytearray)
    begins: int = 0
    """Where `tail` begins."""
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Uploads:
    """What `tensorfile` writes through; every method raises ObjectStoreError, OSError."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._open: dict[int, _Upload] = {}
        self._numbers = itertools.count()

    def create(self, path: ObjectPath, *, direct: bool = False) -> int:
        """A handle to write an object with."""
        handle = next(self._numbers)
        self._open[handle] = _Upload(path.key)
        return handle

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Blocks in any order; what is shorter than one follows what came before it."""
        upload = self._open[fd]
        if len(data) == BLOCK and offset % BLOCK == 0:
            self._send(upload, offset, bytes(data))
            return
        with upload.lock:
            if not upload.tail:
                upload.begins = offset
            if offset != upload.begins + len(upload.tail):
                raise OSError(errno.EINVAL, f"{len(data)} bytes at {offset} do not follow what is there")
            upload.tail += data
            ready = len(upload.tail) // BLOCK * BLOCK
            blocks, begins = bytes(upload.tail[:ready]), upload.begins
            del upload.tail[:ready]
            upload.begins += ready
        for start in range(0, ready, BLOCK):
            self._send(upload, begins + start, blocks[start : start + BLOCK])

    def _send(self, upload: _Upload, offset: int, data: bytes) -> None:
        number = offset // BLOCK + 1
        if number > MOST_PARTS:
            raise ObjectStoreError(
                f"{upload.key}: a rank's file may have {MOST_PARTS * BLOCK / 1e9:.0f} GB in an object store. "
                "Give the job more ranks: they share the state out"
            )
        with upload.lock:
            if upload.name is None:
                upload.name = self._bucket.begin_upload(upload.key)
        upload.parts[number] = self._bucket.upload_part(upload.key, upload.name, number, data)

    def truncate(self, fd: int, size: int) -> None:
        """Of the last bytes only those count that lie before `size`."""
        upload = self._open[fd]
        del upload.tail[max(0, size - upload.begins) :]

    def sync(self, fd: int) -> None:
        """Makes it an object, durable as the store has it."""
        upload = self._open[fd]
        if upload.name is None:
            self._bucket.put(upload.key, bytes(upload.tail))
        else:
            if upload.tail:
                self._send(upload, upload.begins, bytes(upload.tail))
            self._complete(upload, upload.name)
        upload.done = True

    def _complete(self, upload: _Upload, name: str) -> None:
        try:
            self._bucket.complete_upload(upload.key, name, upload.parts)
        except FileNotFoundError:  # the answer to an earlier try may have been lost: then it is there
            self._bucket.size(upload.key)

    def close(self, fd: int) -> None:
        """What was not synced is dropped; where the store does not answer, a later prune does that."""
        upload = self._open.pop(fd)
        if upload.name is not None and not upload.done:
            try:
                self._bucket.abort_upload(upload.key, upload.name)
            except (ObjectStoreError, OSError):
                pass
