"""Units of text to tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..token_index import Split
from .corpus import Document, Unit, split_of
from .encoder import Engine, Tokens, load
from .reading import Reader
from .tokenizer import end_of_text, read_tokenizer


@dataclass(frozen=True)
class EncoderSettings:
    """All that a worker needs to know."""

    tokenizer: Path
    dtype: str
    seed: int
    validation_fraction: float
    text_field: str
    engine: Engine


@dataclass
class EncodedUnit:
    """Tokens of a unit as bytes in the shards' type, for each split, and what was met on the way."""

    tokens: dict[Split, bytes]
    documents: dict[Split, int] = field(default_factory=dict)
    text_bytes: int = 0
    empty: int = 0
    replaced: list[str] = field(default_factory=list)
    """Names of files that hold bytes which are no UTF-8."""


class UnitEncoder:
    """A loaded tokenizer, applied to units."""

    def __init__(self, settings: EncoderSettings):
        self.settings = settings
        tokenizer = read_tokenizer(settings.tokenizer)
        self.encoder = load(settings.engine, tokenizer)
        self.end = end_of_text(tokenizer, settings.tokenizer)
        self.reader = Reader(settings.text_field)

    def encode(self, unit: Unit) -> EncodedUnit:
        """Read and encode one unit."""
        return self.encode_documents(
            (piece.file.name, document) for piece in unit for document in self.reader.documents(piece)
        )

    def encode_documents(self, documents: Iterable[tuple[str, Document]]) -> EncodedUnit:
        """Documents with the names of what they are in; each is closed by the end-of-text token."""
        settings = self.settings
        result = EncodedUnit(tokens={})
        texts: list[str] = []
        splits: list[Split] = []
        for name, document in documents:
            if document.replaced:
                result.replaced.append(name)
            if not document.text:
                result.empty += 1
                continue
            encoded = document.text.encode("utf-8")
            texts.append(document.text)
            splits.append(split_of(encoded, settings.seed, settings.validation_fraction))
            result.text_bytes += len(encoded)
        gathered: dict[Split, list[Tokens]] = {}
        for tokens, split in zip(self.encoder.encode(texts), splits, strict=True):
            gathered.setdefault(split, []).append(tokens)
        result.documents = {split: len(found) for split, found in gathered.items()}
        result.tokens = {split: self._joined(found) for split, found in gathered.items()}
        return result

    def _joined(self, documents: list[Tokens]) -> bytes:
        """The tokens of documents one after the other, each with the end of text."""
        length = sum(map(len, documents)) + len(documents)
        joined = np.full(length, self.end, dtype=np.dtype(self.settings.dtype).newbyteorder("<"))
        place = 0
        for tokens in documents:
            joined[place : place + len(tokens)] = tokens
            place += len(tokens) + 1
        return joined.tobytes()
