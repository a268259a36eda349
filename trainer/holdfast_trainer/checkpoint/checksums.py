"""Checksums of a file in blocks, so that many cores can compute and verify them at once.

XXH3 with 128 bits (Y. Collet, https://github.com/Cyan4973/xxHash, a fixed format since version 0.8) runs at
the speed of memory where SHA-256 takes twenty times the cycles. What it has to find is chance: flipped bits,
torn or misplaced writes, blocks of zeros; one in 2^128 of those goes unseen. It is no defence against
somebody who alters a checkpoint on purpose: who may write there may alter the manifest too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

BLOCK = 16 << 20
"""Bytes a block: large enough for any disk, small enough to share out among cores."""
_DIGITS = 32


@dataclass(frozen=True)
class Written:
    """What a manifest keeps of a file."""

    size: int
    sums: str
    """XXH3-128 of each block, 32 hex digits a block."""

    @property
    def digest(self) -> str:
        """Of the whole file: SHA-256 (hex) of its size and sums."""
        return hashlib.sha256(f"{self.size} {self.sums}".encode()).hexdigest()

    def sum_of_block(self, index: int) -> str:
        """Empty where there is none for that block."""
        return self.sums[_DIGITS * index : _DIGITS * (index + 1)]


def sum_of(block: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(block)


def combine(size: int, blocks: Iterable[str]) -> Written:
    """The checksums of a file of `size` bytes from those of its blocks, in order."""
    return Written(size, "".join(blocks))


class Running:
    """Checksums of a stream whose pieces end anywhere."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._size, self._room = 0, BLOCK
        self._block = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        self._size += len(data)
        while data:
            piece, data = data[: self._room], data[self._room :]
            self._block.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._close()

    def _close(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block, self._room = xxhash.xxh3_128(), BLOCK

    def finish(self) -> Written:
        if self._room < BLOCK:
            self._close()
        return combine(self._size, self._done)
