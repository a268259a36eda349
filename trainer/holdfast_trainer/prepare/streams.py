"""Bytes of source files, as they were before they were compressed.

A compressed file can only be read from its start. `Window` lets a reader that moves forward look back a
little all the same, so that pieces are cut from it as from any file; whoever asks for an earlier place
begins anew.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from .corpus import PrepareError, SourceFile, needs_pyarrow

BLOCK_BYTES = 1 << 20


class Stream(Protocol):
    """What is cut into pieces."""

    def seek(self, position: int, /) -> object: ...

    def read(self, size: int, /) -> bytes: ...


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Raises PrepareError for what goes wrong while a source is read."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PrepareError(f"source {path} is no whole gzip file ({error}): get it again") from error
    except OSError as error:  # pyarrow's own errors are of this kind, without a number
        if error.errno is None:
            raise PrepareError(f"source {path} is damaged or cut off ({error}): get it again") from error
        raise PrepareError(f"source {path} cannot be read: {error.strerror}") from error


def open_bytes(file: SourceFile) -> IO[bytes]:
    """From the start. Raises OSError, and while it is read what `telling` knows."""
    if file.compression == "gz":
        unpacked: IO[bytes] = gzip.open(file.path, "rb")  # type: ignore[assignment]  # noqa: SIM115
        return unpacked
    if file.compression == "zst":
        with needs_pyarrow(file.path):
            import pyarrow
        stream: IO[bytes] = pyarrow.input_stream(str(file.path), compression="zstd")
        return stream
    return open(file.path, "rb")


def blocks(file: SourceFile) -> Generator[bytes]:
    """All bytes, in order."""
    with open_bytes(file) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block


class Window:
    """The last part of a stream that can only be read forward."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._kept = bytearray()
        self._base = self._position = 0
        """Where what is kept begins, and where the next read does."""

    @property
    def base(self) -> int:
        return self._base

    def forget(self, before: int) -> None:
        """What lies before a place is not asked for again."""
        while self._base < before:
            if not self._kept and not self._fill():
                return
            dropped = min(before - self._base, len(self._kept))
            del self._kept[:dropped]
            self._base += dropped

    def seek(self, position: int, /) -> None:
        if position < self._base:
            raise ValueError(f"{position} lies before what is kept, which begins at {self._base}")
        self._position = position

    def read(self, size: int, /) -> bytes:
        begin = self._position - self._base
        while len(self._kept) < begin + size and self._fill():
            pass
        found = bytes(self._kept[begin : begin + size])
        self._position += len(found)
        return found

    def _fill(self) -> bool:
        block = self._stream.read(BLOCK_BYTES)
        self._kept += block
        return bool(block)

    def close(self) -> None:
        self._stream.close()
