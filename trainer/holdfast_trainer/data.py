"""Batches from memory-mapped token shards. A batch is a function of (seed, step, rank): no state.

The tokens of a split are one stream, cut into windows of `context` tokens that do not overlap; a
sample is a window and the token after it. Sample number n of a run is window `permute(n mod samples)`
of epoch `n // samples`. Global row j of step s is sample `s x global_batch + j`, and rank r takes
contiguous rows, so the position in the data is the step alone, any world size that divides the
global batch sees the same global batches, and step 10**9 costs what step 0 costs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .permutation import U64, numbered, sample_order
from .token_index import ITEM_SIZE, DataError, Shard, Split, TokenIndex, read_index

__all__ = ["DataError", "TokenDataset", "Tokens"]

AHEAD = 1024
"""Samples of a rank whose windows are worked out at a time: for those of a step alone that takes longer than
to read them."""


class Tokens(Protocol):
    """One split, as the training loop reads it: prepared shards, or text that is streamed (streaming.py)."""

    @property
    def context(self) -> int: ...

    @property
    def identity(self) -> str:
        """Tells other data apart; part of what a run directory is guarded by."""

    @property
    def samples(self) -> int | None:
        """Windows in the split; None where that is not known."""

    @property
    def tracked(self) -> dict[str, Any]:
        """What a checkpoint is to have of it, by name."""

    def batch(
        self, *, seed: int, step: int, rank: int, world_size: int, global_batch: int
    ) -> tuple[Tensor, Tensor]: ...

    def seconds_a_token(self) -> float | None:
        """What it takes this rank to make one, beside the steps; None where they are there, or where nobody
        knows."""

    def describe(self, seed: int, first: int, count: int) -> str:
        """What samples `first` to `first + count - 1` of a run are, in words."""


class TokenDataset:
    """One split of a prepared directory.

    `samples` windows of `context` tokens; `tokens` in the whole split; `identity` names the content of
    the directory (both splits), whatever its path.
    """

    def __init__(
        self, path: Path, split: Split = "train", *, context: int, vocab_size: int, verify: bool = False
    ):
        """Raises DataError: directory, index or shard missing, a shard of the wrong size or (with
        `verify`) the wrong checksum, a vocabulary above the model's, too few tokens for one window."""
        index = read_index(path)
        self.path, self.split, self.context = path, split, context
        self.identity = index.identity
        self.vocab_size = index.vocab_size
        if index.vocab_size > vocab_size:
            raise DataError(
                f"the data in {path} has a vocabulary of {index.vocab_size} tokens, the model of "
                f"{vocab_size}: set model.vocab_size to at least {index.vocab_size}"
            )
        self._shards = index.of(split)
        self.tokens = sum(shard.tokens for shard in self._shards)
        self.samples = max(0, (self.tokens - 1) // context)
        if not self.samples:
            raise DataError(
                f"the {split} split in {path} has {self.tokens} tokens, and one sample needs {context + 1} "
                f"(model.context and the token after it): prepare {_more(split)}, or shorten model.context"
            )
        self._maps = [_open(path, index, shard) for shard in self._shards]
        if verify:
            for shard in self._shards:
                _verify(path / shard.file, shard)
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        self._begins = self._ends - [shard.tokens for shard in self._shards]
        self._ahead: tuple[tuple[int, ...], int, U64] = (), 0, np.empty((0, 0), dtype=np.uint64)

    def batch(
        self, *, seed: int, step: int, rank: int, world_size: int, global_batch: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens and targets of one rank in one step: int64 on CPU, [global_batch // world_size, context].

        Targets are the tokens one position on. Raises ValueError for a rank, step or batch that can
        not be, DataError for a token outside of the vocabulary (a damaged shard).
        """
        rows, rest = divmod(global_batch, world_size)
        if rest or not 0 <= rank < world_size or step < 0 or rows < 1:
            raise ValueError(
                f"no batch for rank {rank} of {world_size}, step {step}, global batch {global_batch}"
            )
        windows = self._read(self._windows_of(seed, step, rank, rows, global_batch))
        highest = int(windows.max())
        if highest >= self.vocab_size:
            raise DataError(
                f"a {self.split} shard in {self.path} is damaged: it holds token {highest}, and its "
                f"vocabulary ends at {self.vocab_size - 1}; data.verify=true names the file"
            )
        tokens, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    @property
    def tracked(self) -> dict[str, Any]:
        """Nothing: the step is the position."""
        return {}

    def seconds_a_token(self) -> float | None:
        """None: all are there."""
        return None

    def describe(self, seed: int, first: int, count: int) -> str:
        """The windows that these samples of a run are, in words."""
        windows = self.order(seed, first, count).tolist()
        named = ", ".join(map(str, windows[:8])) + (f" and {len(windows) - 8} more" if windows[8:] else "")
        return f"windows {named} of {self.context} tokens in the {self.split} split"

    def order(self, seed: int, first: int, count: int) -> NDArray[np.uint64]:
        """The windows that samples `first` to `first + count - 1` of a run are, in order."""
        return sample_order(seed, numbered(first, count), self.samples)

    def _windows_of(self, seed: int, step: int, rank: int, rows: int, global_batch: int) -> U64:
        """The windows of one rank in one step."""
        whose = seed, rank, rows, global_batch
        known, first, windows = self._ahead
        if known != whose or not first <= step < first + len(windows):
            firsts = numbered(step, max(1, AHEAD // rows)) * np.uint64(global_batch) + np.uint64(rank * rows)
            numbers = firsts[:, None] + numbered(0, rows)
            first, windows = step, sample_order(seed, numbers.ravel(), self.samples).reshape(numbers.shape)
            self._ahead = whose, first, windows
        found: U64 = windows[step - first]
        return found

    def _read(self, windows: U64) -> NDArray[np.unsignedinteger]:
        """These windows, each with the token after it: [len(windows), context + 1]."""
        size = self.context + 1
        starts = windows.astype(np.int64) * self.context
        shards = np.searchsorted(self._ends, starts, side="right")
        offsets = starts - self._begins[shards]
        read = np.empty((len(windows), size), dtype=self._maps[0].dtype)
        for row, shard, offset in zip(read, shards.tolist(), offsets.tolist(), strict=True):
            part = self._maps[shard][offset : offset + size]
            if len(part) == size:
                row[:] = part
            else:
                self._join(row, part, shard)
        return read

    def _join(self, out: NDArray[np.unsignedinteger], part: NDArray[np.unsignedinteger], shard: int) -> None:
        """Fill `out` with the end of a shard, `part`, and what follows in the next ones."""
        done = 0
        while True:
            out[done : done + len(part)] = part
            done += len(part)
            if done == len(out):
                return
            shard += 1
            part = self._maps[shard][: len(out) - done]


def _more(split: Split) -> str:
    return "more text" if split == "train" else "with a larger --validation-fraction"


def _open(directory: Path, index: TokenIndex, shard: Shard) -> NDArray[np.unsignedinteger]:
    path = directory / shard.file
    expected = shard.tokens * ITEM_SIZE[index.dtype]
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"shard {path} is missing; the index names it: {_again(directory)}") from error
    except OSError as error:
        raise DataError(f"shard {path} cannot be read: {error.strerror}") from error
    if size != expected or shard.bytes != expected:
        raise DataError(f"shard {path} has {size} bytes, expected {expected}: {_again(directory)}")
    try:
        mapped = np.memmap(path, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")
    except OSError as error:
        raise DataError(f"shard {path} cannot be read: {error.strerror}") from error
    return np.asarray(mapped)


def _verify(path: Path, shard: Shard) -> None:
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"shard {path} cannot be read: {error.strerror}") from error
    if found != shard.sha256:
        raise DataError(
            f"shard {path} is damaged: its SHA-256 is {found}, the index says {shard.sha256}: "
            f"{_again(path.parent)}"
        )


def _again(directory: Path) -> str:
    return f"copy it again, or remove {directory} and prepare it again"
