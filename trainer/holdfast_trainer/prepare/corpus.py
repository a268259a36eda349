"""The text: what is asked for, and how its files are cut.

A file is cut into pieces of about one MiB, each found from the file and a place in it alone, so that
any worker can read any piece and the order of documents never depends on how the work is shared out.
A text file is one document; one longer than a piece is cut at line ends into several. A JSONL file
has a document in each line, a table one in each row. Pieces are gathered into units: what a worker encodes
at a time. `listing` finds the files, `reading` the documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..token_index import DataError, Split

DEFAULT_PATTERNS = ("*.txt", "*.md", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
TEXT_SUFFIXES = frozenset({".txt", ".md"})
"""Of what is text beyond doubt: all else is read as that, too."""
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
COMPRESSIONS = frozenset({".gz", ".zst"})
PIECE_BYTES = 1 << 20


class PrepareError(DataError):
    """Preparation can not start or go on; names the file and the remedy."""


@dataclass(frozen=True)
class Request:
    """What to prepare. All but `sources`, `out`, `workers` and `encoder` is recorded in the index."""

    sources: tuple[Path, ...]
    out: Path
    encoder: Literal["auto", "tokenizers"] = "auto"
    """`tokenizers` alone, or gigatoken where it makes the same tokens."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; None trains one of `vocab_size`."""
    vocab_size: int = 4096
    workers: int = 1
    validation_fraction: float = 0.01
    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    """Of files in source directories; files named themselves are always taken."""
    excludes: tuple[str, ...] = ()
    text_field: str = "text"
    shard_tokens: int = 1 << 27
    """128 M tokens: 256 MB a file with a 16-bit vocabulary."""
    seed: int = 1337


@contextmanager
def needs_pyarrow(path: Path) -> Iterator[None]:
    """Raises PrepareError where the import inside fails."""
    try:
        yield
    except ImportError as error:
        raise PrepareError(
            f"source {path} needs pyarrow to be read ({error}): pip install 'holdfast[trainer]'"
        ) from error


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus as it was when it was listed. `name` is relative to its source.

    `size` is that of the text: bytes when nothing is compressed, in a table those of its column.
    `stored` is that of the file.
    """

    name: str
    path: Path
    stored: int
    mtime_ns: int
    size: int = 0
    sha256: str = ""

    @property
    def compression(self) -> str:
        """`gz`, `zst`, or nothing."""
        suffix = self.path.suffix.lower()
        return suffix[1:] if suffix in COMPRESSIONS else ""

    @property
    def kind(self) -> Literal["text", "jsonl", "table"]:
        suffix = (self.path.with_suffix("") if self.compression else self.path).suffix.lower()
        if suffix in TABLE_SUFFIXES:
            return "table"
        return "jsonl" if suffix in JSONL_SUFFIXES else "text"


@dataclass(frozen=True)
class Piece:
    """Places `start` to `end` of a file, both moved on to the next cut (see `reading`)."""

    file: SourceFile
    start: int
    end: int


Unit = tuple[Piece, ...]


@dataclass(frozen=True)
class Document:
    """`replaced` is set where bytes that are no UTF-8 became U+FFFD."""

    text: str
    replaced: bool = False


# --------------------------------------------------------------------- cutting


def pieces(files: Iterable[SourceFile]) -> Iterator[Piece]:
    """All pieces in order."""
    for file in files:
        for start in range(0, file.size, PIECE_BYTES):
            yield Piece(file, start, min(start + PIECE_BYTES, file.size))


def units(files: Iterable[SourceFile]) -> Iterator[Unit]:
    """Neighbouring pieces, together at most about a piece long."""
    gathered: list[Piece] = []
    size = 0
    for piece in pieces(files):
        length = piece.end - piece.start
        if gathered and size + length > PIECE_BYTES:
            yield tuple(gathered)
            gathered, size = [], 0
        gathered.append(piece)
        size += length
    if gathered:
        yield tuple(gathered)


def split_of(document: bytes, seed: int, validation_fraction: float) -> Split:
    """By hash of the content: the same wherever it stands, so that copies can not leak across."""
    digest = hashlib.sha256(f"{seed}:".encode() + document).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"
