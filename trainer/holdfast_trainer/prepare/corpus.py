"""The text: which files, cut where, and the documents in them.

A file is cut into pieces of about one MiB, each found from the file and a byte offset alone, so that
any worker can read any piece and the order of documents never depends on how the work is shared out.
A text file is one document; one longer than a piece is cut at line ends into several. A JSONL file
has a document in each line. Pieces are gathered into units: what a worker encodes at a time.
"""

from __future__ import annotations

import codecs
import dataclasses
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from ..token_index import DataError, Split

DEFAULT_PATTERNS = ("*.txt", "*.md", "*.jsonl")
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PIECE_BYTES = 1 << 20
LINE_SEARCH_BYTES = 1 << 16
"""How far past a piece's end a line end is looked for in text before it is cut inside a line."""


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


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus as it was when it was listed. `name` is relative to its source."""

    name: str
    path: Path
    size: int
    mtime_ns: int
    sha256: str = ""

    @property
    def jsonl(self) -> bool:
        return self.path.suffix.lower() in JSONL_SUFFIXES


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of a file, both moved on to the next cut (see `_cut`)."""

    file: SourceFile
    start: int
    end: int


Unit = tuple[Piece, ...]


@dataclass(frozen=True)
class Document:
    """`replaced` is set where bytes that are no UTF-8 became U+FFFD."""

    text: str
    replaced: bool = False


# --------------------------------------------------------------------- listing


def list_files(request: Request) -> list[SourceFile]:
    """The files, hashed, in the order of the sources and of their names. Raises PrepareError."""
    listed: dict[Path, SourceFile] = {}
    for source in request.sources:
        if source.is_dir():
            found = _walk(source, request)
            if not found:
                raise PrepareError(
                    f"no file in {source} matches {' or '.join(request.patterns)}"
                    f"{' after ' + str(len(request.excludes)) + ' exclusions' if request.excludes else ''}; "
                    f"choose others with --pattern"
                )
        elif source.exists():
            found = [(source.name, source)]
        else:
            raise PrepareError(f"source {source} does not exist")
        for name, path in found:
            listed.setdefault(path.resolve(), _stat(name, path))
    with ThreadPoolExecutor(request.workers) as pool:
        return list(pool.map(_hashed, listed.values()))


def _walk(root: Path, request: Request) -> list[tuple[str, Path]]:
    out = request.out.resolve()
    found = []
    for directory, names, files in os.walk(root, onerror=_unreadable):
        here = Path(directory)
        relative = here.relative_to(root)
        names[:] = [n for n in names if not _excluded(relative / n, request) and (here / n).resolve() != out]
        for name in files:
            path = relative / name
            wanted = any(
                fnmatch.fnmatch(name, p) or fnmatch.fnmatch(path.as_posix(), p) for p in request.patterns
            )
            if wanted and not _excluded(path, request) and (here / name).is_file():
                found.append((path.as_posix(), here / name))
    return sorted(found)


def _excluded(relative: Path, request: Request) -> bool:
    return any(
        fnmatch.fnmatch(relative.name, pattern) or fnmatch.fnmatch(relative.as_posix(), pattern)
        for pattern in request.excludes
    )


def _unreadable(error: OSError) -> None:
    raise PrepareError(f"source {error.filename} cannot be read: {error.strerror}") from error


def _stat(name: str, path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise PrepareError(f"source {path} cannot be read: {error.strerror}") from error
    return SourceFile(name, path, status.st_size, status.st_mtime_ns)


def _hashed(file: SourceFile) -> SourceFile:
    try:
        with open(file.path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PrepareError(f"source {file.path} cannot be read: {error.strerror}") from error
    return dataclasses.replace(file, sha256=digest)


def corpus_digest(files: Iterable[SourceFile]) -> str:
    """SHA-256 (hex) of names, sizes and contents; not of times or of where the files are."""
    lines = "".join(f"{f.name}\0{f.size}\0{f.sha256}\n" for f in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


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


def _cut(stream: BinaryIO, file: SourceFile, near: int) -> int:
    """The first line start at or after `near`; in text, where none is close, a character's start."""
    if near <= 0 or near >= file.size:
        return max(0, min(near, file.size))
    stream.seek(near - 1)
    position = near - 1
    while block := stream.read(LINE_SEARCH_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        if not file.jsonl:
            inside = (i for i in range(1, len(block)) if block[i] & 0xC0 != 0x80)
            return position + next(inside, len(block))
        position += len(block)
    return file.size


# --------------------------------------------------------------------- reading


def read_documents(piece: Piece, text_field: str) -> Iterator[Document]:
    """The documents that start in a piece, in order, empty ones too.

    Raises PrepareError where the file can not be read, changed since it was listed, or has a line
    that is not a JSON object with text in `text_field` (named as file:line).
    """
    file = piece.file
    try:
        with open(file.path, "rb") as stream:
            status = os.fstat(stream.fileno())
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                raise PrepareError(f"source {file.path} changed while it was prepared; run prepare again")
            start, end = _cut(stream, file, piece.start), _cut(stream, file, piece.end)
            stream.seek(start)
            content = stream.read(end - start)
    except OSError as error:
        raise PrepareError(f"source {file.path} cannot be read: {error.strerror}") from error
    if file.jsonl:
        for number, line in enumerate(content.split(b"\n")):
            if line.strip():
                yield _json_document(file, start, number, line, text_field)
    else:
        if start == 0:
            content = content.removeprefix(codecs.BOM_UTF8)
        try:
            yield Document(content.decode("utf-8"))
        except UnicodeDecodeError:
            yield Document(content.decode("utf-8", "replace"), replaced=True)


def _json_document(file: SourceFile, start: int, number: int, line: bytes, text_field: str) -> Document:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PrepareError(f"{_place(file, start, number)}: not a JSON object: {error}") from error
    if not isinstance(body, dict):
        kind = type(body).__name__
        raise PrepareError(f"{_place(file, start, number)}: expected a JSON object, found a {kind}")
    text = body.get(text_field)
    if not isinstance(text, str):
        found = f"a {type(text).__name__}" if text_field in body else f"only {', '.join(map(repr, body))}"
        raise PrepareError(
            f"{_place(file, start, number)}: no text in field {text_field!r}, found {found}; "
            f"name the field with --text-field"
        )
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return Document(clean, replaced=clean != text)


def _place(file: SourceFile, start: int, number: int) -> str:
    """`file:line`; lines before the piece are counted only now, when somebody wants to know."""
    before = 0
    with open(file.path, "rb") as stream:
        while start > 0 and (block := stream.read(min(start, PIECE_BYTES))):
            before += block.count(b"\n")
            start -= len(block)
    return f"{file.path}:{before + number + 1}"


def split_of(document: bytes, seed: int, validation_fraction: float) -> Split:
    """By hash of the content: the same wherever it stands, so that copies can not leak across."""
    digest = hashlib.sha256(f"{seed}:".encode() + document).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"
