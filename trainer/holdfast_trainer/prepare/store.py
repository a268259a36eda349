"""Shards on disk, and the place that a preparation has durably reached.

Tokens are appended to one open shard a split; a full shard is closed and the next one opened. `save`
makes all appended bytes durable and then replaces the state file, which names the next unit, the
finished shards and how far the open ones reach. What lies beyond after a crash was written but not
recorded: it is cut off, and written again with the same content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..contract import NO_ROOM, exists, fsync_directory, replace_durably
from ..schema import ConfigError, from_mapping
from ..token_index import ITEM_SIZE, SPLITS, Shard, Split
from .corpus import PrepareError

STATE_FILE = ".prepare.json"
_SHARD_NAME = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.bin")


@dataclass
class Tally:
    """What was met in the text so far."""

    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: int = 0
    """UTF-8 bytes of all documents that were encoded."""
    empty: int = 0
    """Documents without text, left out."""
    replaced: int = 0
    """Documents with bytes that are no UTF-8, which became U+FFFD."""
    first_replaced: str = ""
    """The file of the first of them."""


@dataclass(frozen=True)
class State:
    """How far a preparation has come. `open` counts the recorded tokens of each open shard."""

    arguments: dict[str, Any]
    source: dict[str, Any]
    tokenizer_sha256: str | None = None
    sampled_bytes: int | None = None
    """Of text that the tokenizer was trained on; None where it was given."""
    next_unit: int = 0
    shards: tuple[Shard, ...] = ()
    open: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    format: Literal["holdfast-prepare/1"] = "holdfast-prepare/1"


def read_state(out: Path) -> State | None:
    """The recorded place, or None where no preparation was begun. Raises PrepareError."""
    path = out / STATE_FILE
    try:
        return from_mapping(State, json.loads(path.read_text(encoding="utf-8")), path)
    except FileNotFoundError:
        return None
    except (ConfigError, ValueError) as error:
        raise PrepareError(f"{path} is damaged: {error}; remove {out} and prepare again") from error


def write_state(out: Path, state: State) -> None:
    """Replace the record durably. Raises PrepareError where the disk does not take it."""
    write_text(out / STATE_FILE, json.dumps(dataclasses.asdict(state)))


def write_text(path: Path, text: str) -> None:
    """Replace a file durably. Raises PrepareError where the disk does not take it."""
    try:
        replace_durably(path, text)
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> PrepareError:
    """The error for a write that failed; says what is kept and what to do."""
    if error.errno in NO_ROOM:
        return PrepareError(
            f"no space left for {path}: free some, and run the same command again: it continues where it "
            f"stopped"
        )
    return PrepareError(f"{path} cannot be written: {error.strerror or error}")


class ShardStore:
    """The shards of one preparation. Use as a context manager: it closes its files."""

    def __init__(self, out: Path, dtype: str, shard_tokens: int, state: State):
        """Goes on from `state`: what it does not record is removed. Raises PrepareError."""
        self.out, self.state = out, state
        self._item = ITEM_SIZE[dtype]
        self._limit = shard_tokens * self._item
        self._check_finished()
        self._remove_unrecorded()
        self._finished = list(state.shards)
        self._finished_since_save = 0
        self._open: dict[Split, _OpenShard] = {}
        for split in SPLITS:
            if state.open.get(split):
                self._open[split] = _OpenShard.resume(
                    self._next_path(split), split, state.open[split] * self._item
                )

    def __enter__(self) -> ShardStore:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self._open.values():
            shard.close()

    @property
    def finished_since_save(self) -> int:
        """Shards that were filled and are not in the record yet."""
        return self._finished_since_save

    def append(self, split: Split, tokens: bytes) -> None:
        """Add tokens to a split, in the shards' type. Raises PrepareError where the disk is full."""
        rest = memoryview(tokens)
        while rest:
            shard = self._open.get(split)
            if shard is None:
                shard = self._open[split] = _OpenShard.create(self._next_path(split), split)
            part = rest[: self._limit - shard.bytes]
            shard.write(part)
            rest = rest[len(part) :]
            if shard.bytes == self._limit:
                self._finish(split)

    def save(self, next_unit: int, tally: Tally) -> State:
        """Make everything appended durable, then record it with the next unit to encode."""
        for shard in self._open.values():
            shard.sync()
        self.state = dataclasses.replace(
            self.state,
            next_unit=next_unit,
            shards=tuple(self._finished),
            open={split: shard.bytes // self._item for split, shard in self._open.items()},
            tally=tally,
        )
        write_state(self.out, self.state)
        self._finished_since_save = 0
        return self.state

    def finish(self) -> tuple[Shard, ...]:
        """Close the last shards and give all of them, by split and number."""
        for split in list(self._open):
            self._finish(split)
        fsync_directory(self.out)
        return tuple(sorted(self._finished, key=lambda s: (SPLITS.index(s.split), s.file)))

    def _finish(self, split: Split) -> None:
        shard = self._open.pop(split)
        try:
            shard.sync()
        finally:
            shard.close()
        self._finished.append(
            Shard(shard.path.name, split, shard.bytes // self._item, shard.bytes, shard.digest.hexdigest())
        )
        self._finished_since_save += 1

    def _next_path(self, split: Split) -> Path:
        number = sum(shard.split == split for shard in self._finished)
        return self.out / f"{split}-{number:05d}.bin"

    def _check_finished(self) -> None:
        for shard in self.state.shards:
            path = self.out / shard.file
            size = path.stat().st_size if exists(path) else 0
            if size != shard.bytes:
                raise PrepareError(
                    f"{path} has {size} bytes, and {shard.bytes} were recorded: the directory was changed "
                    f"or the disk lost data; remove {self.out} and prepare again"
                )

    def _remove_unrecorded(self) -> None:
        recorded = {shard.file for shard in self.state.shards}
        for split in SPLITS:
            if self.state.open.get(split):
                number = sum(shard.split == split for shard in self.state.shards)
                recorded.add(f"{split}-{number:05d}.bin")
        for path in self.out.iterdir():
            if _SHARD_NAME.fullmatch(path.name) and path.name not in recorded:
                path.unlink()


class _OpenShard:
    """A shard that is being written, and the running digest of its bytes."""

    def __init__(self, path: Path, split: Split, descriptor: int):
        self.path, self.split = path, split
        self.bytes = 0
        self.digest = hashlib.sha256()
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, split: Split) -> _OpenShard:
        try:
            return cls(path, split, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644))
        except OSError as error:
            raise storage_error(path, error) from error

    @classmethod
    def resume(cls, path: Path, split: Split, size: int) -> _OpenShard:
        """Cut the file back to its recorded `size` and read those bytes into the digest."""
        try:
            shard = cls(path, split, os.open(path, os.O_RDWR))
        except OSError as error:
            raise storage_error(path, error) from error
        while shard.bytes < size and (block := os.read(shard._descriptor, min(1 << 20, size - shard.bytes))):
            shard.digest.update(block)
            shard.bytes += len(block)
        if shard.bytes < size:
            shard.close()
            raise PrepareError(
                f"{path} has {shard.bytes} bytes, and {size} were recorded: the disk lost data; remove "
                f"{path.parent} and prepare again"
            )
        os.ftruncate(shard._descriptor, size)
        return shard

    def write(self, part: memoryview) -> None:
        rest = part
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise storage_error(self.path, error) from error
        self.digest.update(part)
        self.bytes += len(part)

    def sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        os.close(self._descriptor)
