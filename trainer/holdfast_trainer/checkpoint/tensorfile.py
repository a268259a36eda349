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
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..memory import huge_pages
from ..sizes import size_text
from .bucket import Location
from .checksums import BLOCK, Running, Written, combine, sum_of
from .errors import CheckpointError, StorageUnavailable, UnsupportedState, may_pass, not_looked_at
from .scan import Bytes, Opened, UnreadableFile, opened, scan, size_of
from .spread import Spread
from .storage import PartFiles, Storage

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
    torch.complex64: "C64",
}
"""What the format can hold."""

_TORCH = {name: dtype for dtype, name in DTYPES.items()}

RESERVED = "__metadata__"
"""The one name that a tensor cannot have."""

_LARGE = 4 << 20
"""Bytes from which on a tensor is worth a mapping of its own."""

_LARGEST_HEADER = 100_000_000
"""Bytes; the library's own bound. A damaged length must not ask for all memory."""


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
        """Raises UnsupportedState where it would be too large to be read."""
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
        if len(text) > _LARGEST_HEADER:
            raise UnsupportedState(
                f"{_longest(skeleton)}: what the state has besides its tensors is {size_text(len(text))} as "
                f"text, most of it here, and {size_text(_LARGEST_HEADER)} could be read again; keep long "
                "lists of numbers as tensors or NumPy arrays"
            )
        return cls(len(text).to_bytes(8, "little") + text, offsets)


def _longest(skeleton: Any) -> str:
    """The path of what most of its text is of."""
    path: list[str] = []
    while isinstance(skeleton, dict) and skeleton and not any(key.startswith("$") for key in skeleton):
        longest = max(skeleton, key=lambda key: len(json.dumps(skeleton[key])))
        path.append(longest)
        skeleton = skeleton[longest]
    return ".".join(path)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A view of a contiguous CPU tensor's memory; of a copy where it is neither."""
    if not tensor.numel():  # may have a stride of 0, which cannot be viewed
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def write(
    path: Location,
    skeleton: Any,
    tensors: Mapping[str, torch.Tensor],
    storage: PartFiles | None = None,
    heard: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write and fsync `path`, tensor by tensor, without a copy of the whole. Raises OSError.

    `heard` is told the bytes of each block that was written. What it raises ends the writing.
    """
    files: PartFiles = storage or Storage()
    header, sums, offset = Header.of(skeleton, tensors), Running(), 0
    fd = files.create(path)
    try:
        # One after the other: what lies on a GPU is copied, and memory is short where this is called.
        for view in chain((memoryview(header.text),), (bytes_of(tensors[name]) for name in header.offsets)):
            for start in range(0, len(view), BLOCK):
                block = view[start : start + BLOCK]
                sums.update(block)
                files.write(fd, block, offset)
                heard(len(block))
                offset += len(block)
        files.sync(fd)
    finally:
        files.close(fd)
    return sums.finish()


def write_image(
    path: Location,
    image: memoryview,
    size: int,
    storage: PartFiles,
    *,
    padded: bool = True,
    writers: int = 1,
    ready: Callable[[int], None] = lambda end: None,
    heard: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write and fsync the first `size` bytes of `image`, a file as it lies in memory. Raises OSError.

    `ready` returns when the bytes up to `end` are there; `heard` is told the bytes of each block that was
    written. What they raise ends the writing.

    `image` begins at a page and is a multiple of pages long, so that it can go around the page cache: the
    disk then reads the memory itself, the last page whole (`padded`). Blocks are written by several threads,
    `writers` at least, so that the disk has work while checksums are computed.
    """
    count = -(-size // BLOCK)
    fd = storage.create(path, direct=size >= BLOCK)

    def write_block(number: int) -> str:
        start = number * BLOCK
        ready(min(start + BLOCK, size))
        checksum = sum_of(image[start : min(start + BLOCK, size)])
        storage.write(fd, image[start : start + BLOCK if padded else min(start + BLOCK, size)], start)
        heard(min(BLOCK, size - start))
        return checksum

    writing = Spread(write_block, count, name="write", aside=True, least=writers)
    try:
        sums = writing.finish()
        storage.truncate(fd, size)
        storage.sync(fd)
        return combine(size, sums)
    finally:
        writing.cancel()
        storage.close(fd)


# --------------------------------------------------------------- verify and read


def verify(path: Location, expected: Written) -> None:
    """Read all of `path`, compare every checksum. Raises UnreadableFile naming it and the difference,
    CheckpointError where nobody can look."""
    try:
        scan(path, _size(path, expected), expected, lambda offset, data: None, alone=True)
    except OSError as error:
        raise _fault(path, error) from error


def read(
    path: Location,
    expected: Written | None = None,
    *,
    alone: bool = True,
    wanted: Callable[[str], bool | range] = lambda name: True,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(skeleton, tensors), each block checked against `expected` while it is read, by several threads.

    Every tensor has memory of its own. What is not `wanted`, by name, is checked and forgotten; a range means
    these rows of dimension 0. `alone`: no other process reads the file now. Raises UnreadableFile where it is
    no file of ours, or not as written, CheckpointError where it is as written and cannot be loaded, for want
    of memory for instance.
    """
    size = _size(path, expected)
    try:
        text, header = _read_header(path, size)
        tensors: dict[str, torch.Tensor] = {}
        places: list[Bytes | int] = [len(text)]
        for name in sorted(header, key=lambda name: tuple(header[name]["data_offsets"])):
            before, entry, after = _part(header[name], wanted(name))
            places.append(before)
            if entry is not None:
                tensors[name] = _empty(entry)
                places.append(_array(tensors[name]))
            places.append(after)
        scan(path, size, expected, _scatter(places), alone=alone)
        return json.loads(json.loads(text[8:])[RESERVED]["holdfast"]), tensors
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if expected is None:
            raise UnreadableFile(f"{path.name}: {error}") from error
        raise _not_loaded(path, expected, error) from error


def shapes(path: Location, expected: Written) -> dict[str, list[int]]:
    """Of its tensors, by name, as its header says. Raises as `read`, but finds no damage to the rest."""
    try:
        _, header = _read_header(path, _size(path, expected))
        return {name: [int(size) for size in entry["shape"]] for name, entry in header.items()}
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise _not_loaded(path, expected, error) from error


def _not_loaded(path: Location, expected: Written, error: Exception) -> CheckpointError:
    """What to raise where a file is whole; raises as `verify` where it is not, as damage says more than what
    it did to the header."""
    verify(path, expected)
    kind = StorageUnavailable if may_pass(error) else CheckpointError
    return kind(f"{path} is as it was written, and cannot be loaded: {error}")


def _fault(path: Location, error: OSError) -> CheckpointError | UnreadableFile:
    return not_looked_at(path, error) or UnreadableFile(f"{path.name}: {error.strerror or error}")


def _part(entry: dict[str, Any], wanted: bool | range) -> tuple[int, dict[str, Any] | None, int]:
    """(bytes before what is wanted of a tensor, the entry of that as of a tensor, bytes after it)."""
    begin, end = entry["data_offsets"]
    if wanted is False:
        return end - begin, None, 0
    if wanted is True:
        return 0, entry, 0
    total, *rest = entry["shape"]
    row = (end - begin) // total if total else 0
    part = {**entry, "shape": [len(wanted), *rest], "data_offsets": [0, row * len(wanted)]}
    return row * wanted.start, part, end - begin - row * wanted.stop


def _size(path: Location, expected: Written | None) -> int:
    try:
        size = size_of(path)
    except OSError as error:
        raise _fault(path, error) from error
    if expected is not None and size != expected.size:
        raise UnreadableFile(f"{path.name} has {size} bytes, its manifest says {expected.size}")
    return size


def _read_header(path: Location, size: int) -> tuple[bytes, dict[str, Any]]:
    with opened(path) as file:
        start = _bytes_at(file, 0, min(8, size))
        length = int.from_bytes(start, "little")
        if not 0 < length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes cannot be: no file of ours, or damaged")
        text = start + _bytes_at(file, 8, length)
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


def _bytes_at(file: Opened, offset: int, count: int) -> bytes:
    data = bytearray(count)
    file.read(memoryview(data), offset, count)
    return bytes(data)


def _empty(entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _TORCH[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{end - begin} bytes for {entry['dtype']} {shape}")
    if end - begin < _LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever torch.set_default_device says
    memory = huge_pages(end - begin)  # few page faults, which else cost more than the reading
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _array(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor that was just made; copies into it let go of the interpreter."""
    return np.frombuffer(bytes_of(tensor), dtype=np.uint8)


def _scatter(places: Sequence[Bytes | int]) -> Callable[[int, Bytes], None]:
    """What puts pieces of a file into `places`, which follow one another in it; a number is bytes that have
    none."""
    sized = [(place, size) for place in places if (size := place if isinstance(place, int) else len(place))]
    ends = [int(end) for end in np.cumsum([size for _, size in sized])]

    def take(offset: int, data: Bytes) -> None:
        done, at = 0, bisect_right(ends, offset)
        while done < len(data):
            place, size = sized[at]
            begin = offset + done - (ends[at] - size)
            count = min(size - begin, len(data) - done)
            if not isinstance(place, int):
                place[begin : begin + count] = data[done : done + count]
            done, at = done + count, at + 1

    return take
