"""The `data` section of the configuration: prepared shards, or text that is tokenised while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .schema import ConfigError, Range


@dataclass(frozen=True)
class StreamConfig:
    """Text as it lies there (see token_stream.py): no preparation and nothing on disk for it, but also no
    shuffling, and a run that goes on with as many ranks as it began with."""

    sources: tuple[Path, ...]
    """Files, directories, or what Hugging Face's `datasets` saved: text, JSON lines (packed with gzip or
    zstd, too), Parquet. Read in this order, over and over; relative to the working directory."""
    tokenizer: Path
    """A tokenizer.json of the `tokenizers` library, such as `prepare` writes."""
    patterns: tuple[str, ...] | None = None
    """Which files of directories are read, such as ["*.txt"]; null: those that `prepare` takes. A file that
    is named itself is always read."""
    text_field: str = "text"
    """The key of a JSON line, or the column of a table, that holds the text."""
    validation_fraction: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    """Share of the documents, such as 0.01, that validation reads and training does not, chosen by hash as
    `prepare` does. 0: none, and then `validation.every` must be 0, too."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources: an empty list; name files or directories with text")


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens are: `path`, or `stream`."""

    path: Path | None = None
    """Directory made by `python -m holdfast_trainer prepare`; relative to the working directory."""
    verify: bool = False
    """Read all shards at each start and compare their checksums, which takes minutes for a large set. false:
    only their sizes are checked."""
    stream: StreamConfig | None = None
    """Text that is tokenised while it trains, instead of `path`."""

    def __post_init__(self) -> None:
        if self.path is None and self.stream is None:
            raise ConfigError(
                "path: required, but missing (expected a path, of what `prepare` wrote); or name text to be "
                "tokenised while it trains, with data.stream"
            )
        if self.path is not None and self.stream is not None:
            raise ConfigError("stream: there is data.path, too: name one of them")
        if self.verify and self.stream is not None:
            raise ConfigError("verify: prepared shards have checksums, data.stream has none; leave it out")

    @property
    def prepared(self) -> Path:
        """The prepared directory. Raises ConfigError where there is none."""
        if self.path is None:
            raise ConfigError(
                "data.stream: a stream has one batch after the other, and here any is wanted: run python -m "
                "holdfast_trainer prepare, and name what it wrote with data.path"
            )
        return self.path
