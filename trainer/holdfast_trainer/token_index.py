"""The index of a directory of token shards: what `prepare` writes and `data` reads. No torch here.

`index.json` is written last, so a directory that has one is complete. It holds no times and no
absolute paths: equal text prepared with equal arguments gives equal bytes::

    {"format": "holdfast-tokens/1", "dtype": "uint16", "vocab_size": 4096, "end_of_text": 0,
     "shards": [{"file", "split", "tokens", "bytes", "sha256"}, ...],
     "tokenizer": {"file", "sha256", ...}, "source": {"sha256", "files", "bytes", ...},
     "arguments": {...}}

A shard is the tokens of many documents, one after the other, little-endian, without a header.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from .contract import AWAY, is_directory, saved_before
from .schema import ConfigError, Range, from_mapping

INDEX_FILE = "index.json"
FORMAT: Final = "holdfast-tokens/1"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

Sha256 = str
ITEM_SIZE = {"uint16": 2, "uint32": 4}


class DataError(ValueError):
    """The prepared data can not be used; names the file, what was found, and the remedy."""


_NOT_THE_DATA = AWAY | {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""How the system says that it does not give a file now, whatever is in it."""
_NO_ANSWER = AWAY - {errno.EIO}
"""EIO: of a disk too, which may have lost the file for good."""
_NOT_THERE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM))


def may_come(error: BaseException | None) -> bool:
    """Whether a disk or a network did not give the data, or there was no room for it, now: another attempt
    may have it."""
    return _came_of(error, _NOT_THE_DATA)


def is_away(error: BaseException | None) -> bool:
    """Whether it is the data's storage that is to blame, and not the job: its server does not answer, or
    what is not there was most likely there for the attempts before."""
    return _came_of(error, _NO_ANSWER if saved_before() is None else _NO_ANSWER | _NOT_THERE)


def missing(path: Path) -> FileNotFoundError:
    """What the system would say of it: the cause of a DataError that tells of data that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _came_of(error: BaseException | None, codes: Set[int]) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in codes:
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    file: str
    split: Split
    tokens: Annotated[int, Range(1)]
    bytes: Annotated[int, Range(1)]
    sha256: Sha256


@dataclass(frozen=True)
class TokenIndex:
    """All that is known about a prepared directory."""

    format: Literal["holdfast-tokens/1"]
    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Range(1)]
    end_of_text: Annotated[int, Range(0)]
    shards: tuple[Shard, ...]
    tokenizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, split: Split) -> tuple[Shard, ...]:
        """The shards of one split, in order."""
        return tuple(s for s in self.shards if s.split == split)

    def tokens(self, split: Split) -> int:
        return sum(s.tokens for s in self.of(split))

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of what a model can see of the data: the tokens of all shards in their order."""
        body = {
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "shards": [[s.split, s.tokens, s.sha256] for s in self.shards],
        }
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read_index(directory: Path) -> TokenIndex:
    """Raises DataError where there is no directory, no index, or an index that can not be read."""
    path = directory / INDEX_FILE
    remedy = f"make it with: python -m holdfast_trainer prepare --source TEXT --out {directory}"
    try:
        if not is_directory(directory):
            raise DataError(f"data directory {directory} does not exist; {remedy}") from missing(directory)
        return from_mapping(TokenIndex, json.loads(path.read_text(encoding="utf-8")), path)
    except FileNotFoundError as error:
        raise DataError(f"{directory} has no {INDEX_FILE}: preparation did not finish; {remedy}") from error
    except DataError:
        raise
    except ConfigError as error:
        raise DataError(
            f"damaged index, or of another version:\n{error}\nremove {directory}, then {remedy}"
        ) from error
    except OSError as error:
        raise DataError(f"data {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}; remove {directory}, then {remedy}") from error
