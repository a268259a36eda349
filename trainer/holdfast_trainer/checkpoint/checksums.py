"""Checksums of a file in blocks, so that many cores can compute and verify them at once.

CRC-32 of each block finds damage: every burst of up to 32 bits, anything else but one in four thousand
million. It is what a load checks, at the speed of memory. SHA-256 over the SHA-256 of all blocks says
that two states are the same; it is the proof, and what `checkpoint verify` reads for as well.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 16 << 20
"""Bytes a block: large enough for any disk, small enough to share out among cores."""


@dataclass(frozen=True)
class Written:
    """What a manifest keeps of a file."""

    size: int
    sha256: str
    """SHA-256 (hex) over the SHA-256 digests of all blocks."""
    crc32: str = ""
    """CRC-32 of each block, eight hex digits a block."""

    def block_crc(self, index: int) -> int | None:
        """None where the manifest has none for that block."""
        text = self.crc32[8 * index : 8 * index + 8]
        return int(text, 16) if text else None


@dataclass(frozen=True)
class BlockSums:
    crc32: int
    sha256: bytes


def sums_of(block: memoryview) -> BlockSums:
    return BlockSums(zlib.crc32(block), hashlib.sha256(block).digest())


def combine(size: int, blocks: Iterable[BlockSums]) -> Written:
    """The checksums of a file of `size` bytes from those of its blocks, in order."""
    blocks = list(blocks)
    whole = hashlib.sha256(b"".join(block.sha256 for block in blocks))
    return Written(size, whole.hexdigest(), "".join(f"{block.crc32:08x}" for block in blocks))


class Running:
    """Checksums of a stream whose pieces end anywhere."""

    def __init__(self) -> None:
        self._done: list[BlockSums] = []
        self._size = self._room = 0
        self._crc, self._sha = 0, hashlib.sha256()
        self._room = BLOCK

    def update(self, data: memoryview) -> None:
        self._size += len(data)
        while data:
            piece, data = data[: self._room], data[self._room :]
            self._crc = zlib.crc32(piece, self._crc)
            self._sha.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._close()

    def _close(self) -> None:
        self._done.append(BlockSums(self._crc, self._sha.digest()))
        self._crc, self._sha, self._room = 0, hashlib.sha256(), BLOCK

    def finish(self) -> Written:
        if self._room < BLOCK:
            self._close()
        return combine(self._size, self._done)
