"""One rank's file: the safetensors format, written and read in blocks with their checksums on the way.

The format (https://huggingface.co/docs/safetensors) is eight bytes of header length, a JSON header
with dtype, shape and offsets of each tensor, then raw bytes. It is written here because the library's
writer neither hashes nor syncs, and read here because the library cannot verify what it reads while it
reads it. The skeleton of `tree.py` travels in the header's metadata. The same state gives the same
bytes, so checksums can be compared across runs: no times, no attempt numbers.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checksums import BLOCK, BlockSums, Running, Written, combine, sums_of
from .spread import Spread
from .storage import Storage

__all__ = ["DTYPES", "RESERVED", "Header", "UnreadableFile", "Written", "read", "verify", "write"]

PAGE = 4096
"""Tensors begin at a page, as direct I/O and readers that map the file want."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What the format can hold."""

_TORCH = {name: dtype for dtype, name in DTYPES.items()}

RESERVED = "__metadata__"
"""The one name that a tensor cannot have."""

_LARGEST_HEADER = 100_000_000
"""Bytes; the library's own bound. A damaged length must not ask for all memory."""


class UnreadableFile(Exception):
    """The file's bytes are not what its manifest, or its format, says."""


@dataclass(frozen=True)
class Header:
    """The beginning of a file, and where each tensor follows, counted from the header's end."""

    text: bytes
    offsets: dict[str, tuple[int, int]]
    """(begin, end) by name, in the order of the file."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.text) + max((end for _, end in self.offsets.values()), default=0)

    @classmethod
    def of(cls, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Header:
        header: dict[str, Any] = {RESERVED: {"holdfast": json.dumps(skeleton, separators=(",", ":"))}}
        offsets: dict[str, tuple[int, int]] = {}
        # Wider types first keeps every tensor aligned to its element size.
        begin = 0
        for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
            tensor = tensors[name]
            end = begin + tensor.numel() * tensor.element_size()
            offsets[name] = begin, end
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % PAGE)
        return cls(len(text).to_bytes(8, "little") + text, offsets)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A view of a contiguous CPU tensor's memory; of a copy where it is neither."""
    if not tensor.numel():  # may have a stride of 0, which cannot be viewed
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def write(
    path: Path, skeleton: Any, tensors: Mapping[str, torch.Tensor], storage: Storage | None = None
) -> Written:
    """Write and fsync `path`, tensor by tensor, without a copy of the whole. Raises OSError."""
    storage = storage or Storage()
    header, sums, offset = Header.of(skeleton, tensors), Running(), 0
    fd = storage.create(path)
    try:
        for view in (memoryview(header.text), *(bytes_of(tensors[name]) for name in header.offsets)):
            for start in range(0, len(view), BLOCK):
                block = view[start : start + BLOCK]
                sums.update(block)
                storage.write(fd, block, offset)
                offset += len(block)
        storage.sync(fd)
    finally:
        storage.close(fd)
    return sums.finish()


def write_image(path: Path, image: memoryview, size: int, storage: Storage) -> Written:
    """Write and fsync the first `size` bytes of `image`, a file as it lies in memory. Raises OSError.

    `image` begins at a page and is a multiple of pages long, so that it can go around the page cache:
    the disk then reads the memory itself. Other threads compute checksums meanwhile.
    """
    count = -(-size // BLOCK)
    fd = storage.create(path, direct=size >= BLOCK)

    def sums(number: int) -> BlockSums:
        return sums_of(image[number * BLOCK : min((number + 1) * BLOCK, size)])

    hashing = Spread(sums, count, name="checksums", aside=True)
    try:
        for start in range(0, count * BLOCK, BLOCK):
            storage.write(fd, image[start : start + BLOCK], start)
        storage.truncate(fd, size)
        storage.sync(fd)
        return combine(size, hashing.finish())
    finally:
        hashing.cancel()
        storage.close(fd)


# --------------------------------------------------------------- verify and read


def verify(path: Path, expected: Written) -> None:
    """Read all of `path`, compare every checksum. Raises UnreadableFile naming it and the difference."""
    fd = _open(path, expected)
    try:
        running = Running()
        while chunk := os.read(fd, BLOCK):
            running.update(memoryview(chunk))
    except OSError as error:
        raise UnreadableFile(f"{path.name}: {error.strerror or error}") from error
    finally:
        os.close(fd)
    found = running.finish()
    if found.sha256 != expected.sha256 or (expected.crc32 and found.crc32 != expected.crc32):
        raise UnreadableFile(
            f"{path.name}: checksum {found.sha256[:12]}, its manifest says {expected.sha256[:12]}"
        )


def read(path: Path, expected: Written | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """(skeleton, tensors), each block checked against `expected` while it is read, by several threads.

    Every tensor has memory of its own. Raises UnreadableFile where it is no file of ours, or not as
    written.
    """
    fd = _open(path, expected)
    try:
        size = os.fstat(fd).st_size
        text, header = _read_header(fd, size)
        tensors = {name: _empty(entry) for name, entry in header.items()}
        order = sorted(header, key=lambda name: tuple(header[name]["data_offsets"]))
        views = [memoryview(bytearray(text)), *(bytes_of(tensors[name]) for name in order)]
        _fill(fd, path.name, views, expected)
        return json.loads(json.loads(text[8:])[RESERVED]["holdfast"]), tensors
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if expected is not None:
            verify(path, expected)  # damage says more than what it did to the header
        raise UnreadableFile(f"{path.name}: {error}") from error
    finally:
        os.close(fd)


def _open(path: Path, expected: Written | None) -> int:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UnreadableFile(f"{path.name}: {error.strerror or error}") from error
    size = os.fstat(fd).st_size
    if expected is not None and size != expected.size:
        os.close(fd)
        raise UnreadableFile(f"{path.name} has {size} bytes, its manifest says {expected.size}")
    return fd


def _read_header(fd: int, size: int) -> tuple[bytes, dict[str, Any]]:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(_LARGEST_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes cannot be: no file of ours, or damaged")
    text = os.pread(fd, 8 + length, 0)
    header = json.loads(text[8:])
    del header[RESERVED]
    position = 0
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if begin != position or end < begin:
            raise ValueError(f"a tensor at {begin} to {end}, where {position} is next")
        position = end
    if position != size - len(text):
        raise ValueError(f"{size - len(text)} bytes of tensors, its header tells of {position}")
    return text, header


def _empty(entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _TORCH[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{end - begin} bytes for {entry['dtype']} {shape}")
    return torch.empty(shape, dtype=dtype)


def _fill(fd: int, name: str, views: Sequence[memoryview], expected: Written | None) -> None:
    """Read the file into `views`, which follow one another in it."""
    ends, total = [], 0
    for view in views:
        total += len(view)
        ends.append(total)

    def fill(index: int) -> None:
        pieces, position, left = [], index * BLOCK, min(BLOCK, total - index * BLOCK)
        at = bisect_right(ends, position)
        while left:
            begin = position - (ends[at] - len(views[at]))
            piece = views[at][begin : begin + left]
            pieces.append(piece)
            position, left, at = position + len(piece), left - len(piece), at + 1
        _read_all(fd, [piece for piece in pieces if piece], index * BLOCK)
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        wanted = None if expected is None else expected.block_crc(index)
        if wanted is not None and crc != wanted:
            raise UnreadableFile(
                f"{name}: checksum {crc:08x} of block {index}, its manifest says {wanted:08x}"
            )

    Spread(fill, -(-total // BLOCK), name="read").finish()


def _read_all(fd: int, pieces: list[memoryview], offset: int) -> None:
    for start in range(0, len(pieces), 512):  # IOV_MAX is 1024
        group = pieces[start : start + 512]
        size = sum(map(len, group))
        done = os.preadv(fd, group, offset)
        while done < size:  # signals and network file systems give less than asked for
            more, skip = [], done
            for piece in group:
                if skip < len(piece):
                    more.append(piece[skip:])
                skip = max(0, skip - len(piece))
            count = os.preadv(fd, more, offset + done)
            if not count:
                raise ValueError("the file is shorter than it was")
            done += count
        offset += size
