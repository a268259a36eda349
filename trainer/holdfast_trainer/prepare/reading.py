"""The documents in a piece of a file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import closing

from .corpus import Document, Piece, PrepareError, SourceFile
from .streams import Stream, Window, blocks, open_bytes, telling
from .tables import Table, open_table

_HALF_PAIRS = re.compile("[\ud800-\udfff]")
LINE_SEARCH_BYTES = 1 << 16
"""How far past a piece's end a line end is looked for in text before it is cut inside a line."""


class Reader:
    """Reads pieces, best in their order: of what can not be read from any place it keeps its own."""

    def __init__(self, text_field: str):
        self._text_field = text_field
        self._open: SourceFile | None = None
        self._window: Window | None = None
        self._table: Table | None = None
        self._no_line: tuple[SourceFile, int, int] | None = None
        """A file of JSON lines and two places in it: no line starts from the one to before the other."""

    def documents(self, piece: Piece) -> Iterator[Document]:
        """The documents that start in a piece, in order, empty ones too.

        Raises PrepareError where the file can not be read, changed since it was listed, or has a line
        that is not a JSON object with text, or null, in the text field (named as file:line).
        """
        file = piece.file
        with telling(file.path):
            status = file.path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.stored, file.mtime_ns):
            raise PrepareError(
                f"source {file.path} was changed meanwhile: start again once nobody writes to it"
            )
        if file.kind == "table":
            yield from map(clean, self._rows(piece))
            return
        start, content = self._content(piece)
        if file.kind == "jsonl":
            for number, line in enumerate(content.split(b"\n")):
                if line.strip():
                    yield _json_document(file, start, number, line, self._text_field)
        elif content:  # else a line that begins before the piece ends behind it
            yield _text_document(content, start)

    def close(self) -> None:
        if self._window:
            self._window.close()
        self._open = self._window = self._table = None

    def _rows(self, piece: Piece) -> list[str | None]:
        file = piece.file
        if self._table is None or self._open != file:
            self.close()
            self._open, self._table = file, open_table(file.path, self._text_field)
        first, last = (place * self._table.rows // file.size for place in (piece.start, piece.end))
        return self._table.texts(first, last)

    def _content(self, piece: Piece) -> tuple[int, bytes]:
        """Where the piece really starts, and its bytes."""
        file = piece.file
        with telling(file.path):
            if not file.compression:
                with open(file.path, "rb") as stream:
                    return self._between_cuts(stream, piece)
            before = max(0, piece.start - 1)
            if self._window is None or self._open != file or before < self._window.base:
                self.close()
                self._open, self._window = file, Window(open_bytes(file))
            self._window.forget(before)
            return self._between_cuts(self._window, piece)

    def _between_cuts(self, stream: Stream, piece: Piece) -> tuple[int, bytes]:
        start, end = (self._cut(stream, piece.file, place) for place in (piece.start, piece.end))
        if start == end:
            return start, b""
        stream.seek(start)
        return start, stream.read(end - start)

    def _cut(self, stream: Stream, file: SourceFile, near: int) -> int:
        """As `_cut` below. All pieces within one long line end where it does, which is looked for once."""
        if self._no_line and self._no_line[0] == file and self._no_line[1] <= near <= self._no_line[2]:
            return self._no_line[2]
        cut = _cut(stream, file, near)
        if file.kind == "jsonl":
            self._no_line = file, near, cut
        return cut


def _cut(stream: Stream, file: SourceFile, near: int) -> int:
    """The first line start at or after `near`; in text, where none is close, a character's start."""
    if near <= 0 or near >= file.size:
        return max(0, min(near, file.size))
    stream.seek(near - 1)
    position = near - 1
    while block := stream.read(LINE_SEARCH_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        if file.kind != "jsonl":
            inside = (i for i in range(1, len(block)) if block[i] & 0xC0 != 0x80)
            return position + next(inside, len(block))
        position += len(block)
    return file.size


def _text_document(content: bytes, start: int) -> Document:
    if start == 0:
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return Document(content.decode("utf-8"))
    except UnicodeDecodeError:
        return Document(content.decode("utf-8", "replace"), replaced=True)


def clean(text: str | None) -> Document:
    """A null is a document without text. Half a surrogate pair, which JSON may hold, is no character."""
    text = text or ""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Document(_HALF_PAIRS.sub("\ufffd", text), replaced=True)
    return Document(text)


def _json_document(file: SourceFile, start: int, number: int, line: bytes, text_field: str) -> Document:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PrepareError(f"{_place(file, start, number)}: not a JSON object: {error}") from error
    if not isinstance(body, dict):
        kind = type(body).__name__
        raise PrepareError(f"{_place(file, start, number)}: expected a JSON object, found a {kind}")
    text = body.get(text_field)
    if not isinstance(text, str | None) or text_field not in body:
        found = f"a {type(text).__name__}" if text_field in body else f"only {', '.join(map(repr, body))}"
        raise PrepareError(
            f"{_place(file, start, number)}: no text in field {text_field!r}, found {found}; "
            f"name the field with --text-field (of a stream: text_field)"
        )
    return clean(text)


def _place(file: SourceFile, start: int, number: int) -> str:
    """`file:line`; lines before the piece are counted only now, when somebody wants to know."""
    before = 0
    with closing(blocks(file)) as content:
        for block in content:
            before += block[: max(0, start)].count(b"\n")
            start -= len(block)
            if start <= 0:
                break
    return f"{file.path}:{before + number + 1}"
