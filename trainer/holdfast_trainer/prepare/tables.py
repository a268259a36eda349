"""Documents in the rows of Parquet and Arrow files; `datasets` saves the latter.

Rows are found by number. An Arrow file is memory-mapped, so any row is near; Parquet is decoded some rows at
a time within a row group, and read on from where the last piece ended.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from ..contract import is_file
from ..token_index import missing
from .corpus import PrepareError, needs_pyarrow
from .streams import telling

ROWS_AT_ONCE = 256
"""Decoded together: long documents must not fill the memory."""

LEAST_ROW_BYTES = 64
"""A row counts at least so much, however well it is compressed: it bounds the rows of a piece."""


class Table(Protocol):
    """The text column of one file. `size` is about its bytes, and a function of the file alone."""

    rows: int
    size: int

    def texts(self, first: int, last: int) -> list[str | None]:
        """Rows `first` to `last` - 1."""
        ...


def open_table(path: Path, column: str) -> Table:
    """Raises PrepareError: not such a file, damaged, or without a column of text of this name."""
    with needs_pyarrow(path):
        import pyarrow
    with telling(path):
        try:
            return _Parquet(path, column) if path.suffix.lower() == ".parquet" else _Arrow(path, column)
        except pyarrow.ArrowInvalid as error:
            kind = "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
            raise PrepareError(f"source {path} is no whole {kind} file ({_first_line(error)})") from error


class _Parquet:
    def __init__(self, path: Path, column: str):
        from pyarrow import parquet

        self._path, self._column = path, column
        self._file = parquet.ParquetFile(path, buffer_size=1 << 20)
        _check_column(path, column, self._file.schema_arrow)
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self.rows = metadata.num_rows
        paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
        place = paths.index(column)
        self.size = _size(self.rows, sum(group.column(place).total_uncompressed_size for group in groups))
        self._next = 0
        self._ahead: list[str | None] = []
        self._batches: Iterator[Any] = iter(())
        self._seek(0)

    def _seek(self, row: int) -> None:
        """Begin at the row group of a row."""
        group = bisect_right(self._ends, row)
        self._next = self._ends[group - 1] if group else 0
        self._ahead = []
        self._batches = self._file.iter_batches(
            ROWS_AT_ONCE,
            row_groups=list(range(group, len(self._ends))),
            columns=[self._column],
            use_threads=False,
        )

    def texts(self, first: int, last: int) -> list[str | None]:
        import pyarrow

        try:
            return self._texts(first, last)
        except (pyarrow.ArrowException, OSError, StopIteration) as error:
            if (
                isinstance(error, OSError) and error.errno is not None
            ):  # the file system's; pyarrow's have none
                raise PrepareError(f"source {self._path} cannot be read: {error.strerror}") from error
            raise PrepareError(
                f"source {self._path} is damaged near row {first} ({_first_line(error)}): get it again"
            ) from error

    def _texts(self, first: int, last: int) -> list[str | None]:
        group = bisect_right(self._ends, first)
        if first < self._next or (group and self._ends[group - 1] > self._next + len(self._ahead)):
            self._seek(first)
        while self._next + len(self._ahead) < last:
            self._drop(first)
            self._ahead += next(self._batches).column(0).to_pylist()
        self._drop(first)
        return self._ahead[: last - first]

    def _drop(self, before: int) -> None:
        dropped = min(max(0, before - self._next), len(self._ahead))
        del self._ahead[:dropped]
        self._next += dropped


class _Arrow:
    def __init__(self, path: Path, column: str):
        import pyarrow

        mapped = pyarrow.memory_map(str(path))
        try:
            reader = pyarrow.ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            reader = pyarrow.ipc.open_file(mapped)
        _check_column(path, column, reader.schema)
        self._texts = reader.read_all().column(column)
        self.rows = len(self._texts)
        self.size = _size(self.rows, self._texts.nbytes)

    def texts(self, first: int, last: int) -> list[str | None]:
        found: list[str | None] = self._texts.slice(first, last - first).to_pylist()
        return found


def _size(rows: int, stored: int) -> int:
    return max(stored, rows * LEAST_ROW_BYTES)


def _check_column(path: Path, column: str, schema: Any) -> None:
    import pyarrow

    known = ", ".join(f"{field.name}: {field.type}" for field in schema)
    if column not in schema.names:
        raise PrepareError(
            f"source {path} has no column {column!r}, it has {known}; name the column with --text-field "
            "(of a stream: text_field)"
        )
    if (times := schema.names.count(column)) > 1:
        raise PrepareError(f"source {path} has {times} columns {column!r}; rename all but one")
    kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not any(is_text(kind) for is_text in (pyarrow.types.is_string, pyarrow.types.is_large_string,
                                             pyarrow.types.is_string_view)):  # fmt: skip
        raise PrepareError(
            f"column {column!r} of source {path} holds {kind}, not text; it has {known}; name a column of "
            "text with --text-field (of a stream: text_field)"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


# -------------------------------------------------- directories that `datasets` saved


def saved_files(directory: Path) -> list[Path] | None:
    """The files of a data set that `save_to_disk` wrote, in order; None for any other directory.

    Raises PrepareError for several splits in one: which of them is meant only the user knows.
    """
    splits, state = directory / "dataset_dict.json", directory / "state.json"
    if is_file(splits):
        names = _read(splits)["splits"]
        if len(names) != 1:
            raise PrepareError(
                f"source {directory} is a data set with the splits {', '.join(names)}: name the one to "
                f"prepare, for example {directory / names[0]}"
            )
        return saved_files(directory / names[0])
    if not is_file(state) or not is_file(directory / "dataset_info.json"):
        return None
    files = [directory / part["filename"] for part in _read(state)["_data_files"]]
    for file in files:
        if not is_file(file):
            told = f"source {file} is missing; {state} names it: copy the data set again"
            raise PrepareError(told) from missing(file)
    return files


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrepareError(f"source {path} cannot be read: {error}") from error
