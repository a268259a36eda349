"""One rank's file: the safetensors format, written as a stream with its checksum on the way.

The format (https://huggingface.co/docs/safetensors) is eight bytes of header length, a JSON header
with dtype, shape and offsets of each tensor, then raw bytes. It is written here because the
library's writer neither hashes nor syncs; it is read by the library. The skeleton of `tree.py`
travels in the header's metadata. The same state gives the same bytes, so checksums can be compared
across runs: no times, no attempt numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

CHUNK = 8 << 20
"""Bytes a write; large enough for the disk, small enough to share the core."""

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
"""What the format and its reader can hold."""

RESERVED = "__metadata__"
"""The one name that a tensor cannot have."""


class UnreadableFile(Exception):
    """The file's bytes are not what its manifest, or its format, says."""


@dataclass(frozen=True)
class Written:
    """What a manifest keeps of a file."""

    size: int
    sha256: str


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():  # may have a stride of 0, which cannot be viewed
        return memoryview(b"")
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def write(path: Path, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Write and fsync `path`; tensors must be on the CPU. Raises OSError as the file system does."""
    header: dict[str, Any] = {RESERVED: {"holdfast": json.dumps(skeleton, separators=(",", ":"))}}
    # Wider types first keeps every tensor aligned to its element size, as readers that map it want.
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        blocks = [memoryview(len(text).to_bytes(8, "little") + text), *(_bytes(tensors[n]) for n in names)]
        for view in blocks:
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                digest.update(chunk)
                size += len(chunk)
                while chunk:
                    chunk = chunk[os.write(fd, chunk) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return Written(size, digest.hexdigest())


def verify(path: Path, expected: Written) -> None:
    """Read all of `path`. Raises UnreadableFile naming it and the difference."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise UnreadableFile(f"{path.name} has {size} bytes, its manifest says {expected.size}")
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnreadableFile(f"{path.name}: {error.strerror or error}") from error
    if found != expected.sha256:
        raise UnreadableFile(f"{path.name}: checksum {found[:12]}, its manifest says {expected.sha256[:12]}")


def read(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """(skeleton, tensors) of a verified file. Raises UnreadableFile where it is no file of ours."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return json.loads(metadata["holdfast"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UnreadableFile(f"{path.name}: {error}") from error
