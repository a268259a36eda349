"""Batches straight from text, tokenised on the way: for what is never prepared.

The units of the corpus (prepare/corpus.py) are dealt to the ranks: rank r of w reads units r, r + w, and so
on, in the order of the sources, over and over. What they hold, each document closed by the end of text, is
one stream of tokens, cut into windows that do not overlap; a sample is a window and the token after it.

The position is a unit and a token in it. Track the stream, and every checkpoint has the position of each
rank: a resume encodes that unit again and goes on with the very next token, however much came before. In a
compressed file the way to the unit must be unpacked again. Where that unit has other tokens than it had, the
resume is refused.

    stream = TokenStream([Path("texts")], Path("tokenizer.json"), context=1024, batch=8,
                         rank=run.rank, world_size=run.world_size)
    run.track(model=model, optimizer=optimizer, stream=stream)
    for step in run.steps(10_000):
        tokens, targets = stream.batch()

In the place of paths it takes a `datasets.IterableDataset` (stream_sources.py), such as
`load_dataset("parquet", data_files="texts/*.parquet", split="train", streaming=True)`.

The next unit, of about one MiB, is encoded in a thread of its own while steps use up the last: the encoders
let go of the interpreter meanwhile. Nothing is shuffled. A prepared directory (`data.py`) has not that limit,
and any number of ranks can go on with it.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .alike import announce
from .prepare.corpus import DEFAULT_PATTERNS, PrepareError
from .prepare.encode import EncoderSettings, UnitEncoder
from .prepare.encoder import choose
from .prepare.tokenizer import read_tokenizer
from .stream_sources import Place, ResumableDataset, Source, StreamedDataset, TextFiles
from .token_index import DataError, Split

KEPT = 8
"""Units of which it is known what they took."""


class _Chunk(NamedTuple):
    place: Place
    """From which its source reads this unit again."""
    digest: str
    """Of its tokens."""
    tokens: np.ndarray[Any, np.dtype[np.uint32]]


class TokenStream:
    """The tokens of one rank, from a place on. `identity` names the sources: names and sizes of files, not
    their content; shards, columns and first document of a dataset."""

    def __init__(
        self,
        sources: Sequence[Path | str] | Path | ResumableDataset,
        tokenizer: Path | str,
        *,
        context: int,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        validation_fraction: float = 0.0,
        seed: int = 1337,
        encoder: Literal["auto", "tokenizers"] = "auto",
        text_field: str = "text",
        patterns: Sequence[str] = DEFAULT_PATTERNS,
    ):
        """`batch` windows of `context` tokens a step; the split is by hash of a document, as in `prepare`.
        `patterns` are of files in directories, `text_field` is a column where the source is a dataset. One
        path or pattern need not be in a list.

        Raises DataError (PrepareError) for sources or a tokenizer that can not be read or resumed.
        """
        if context < 1 or batch < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"no stream for rank {rank} of {world_size}, {batch} windows of {context} tokens"
            )
        sources = [sources] if isinstance(sources, str | Path) else sources
        patterns = [patterns] if isinstance(patterns, str) else patterns
        tokenizer = Path(tokenizer)
        self._source: Source = (
            TextFiles([Path(one) for one in sources], patterns, text_field, rank, world_size)
            if isinstance(sources, Sequence)
            else StreamedDataset(sources, text_field, rank, world_size)
        )
        self.identity = self._source.identity
        self._read_as = {
            "tokenizer": _digest(tokenizer),
            "split": split,
            "text_field": text_field,
            "validation_fraction": validation_fraction,
            "seed": seed if validation_fraction else None,  # it draws nothing but the split
        }
        if world_size > 1:
            announce("the sources of TokenStream", f"{self._source.told} ({self.identity[:12]})")
            announce("the way TokenStream reads", ", ".join(map(str, self._read_as.values())))
        self._context, self._batch, self._split = context, batch, split
        self._rank, self._world_size = rank, world_size
        if self._source.served < world_size:  # all ranks say so: of one alone its peers would be torn off
            raise self._no_text(self._source.served)
        engine = choose(read_tokenizer(tokenizer), ())[0] if encoder == "auto" else encoder
        self._encoder = UnitEncoder(
            EncoderSettings(tokenizer, "uint32", seed, validation_fraction, text_field, engine)
        )
        self._thread = ThreadPoolExecutor(1, "token-stream")
        self._go_to(self._source.beginning(0), 0)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next tokens and targets of this rank: int64 on CPU, [batch, context]. Raises DataError."""
        length = self._batch * self._context
        while sum(len(chunk.tokens) for chunk in self._chunks) - self._offset <= length:
            self._chunks.append(self._next_chunk())
        joined = np.concatenate([chunk.tokens for chunk in self._chunks])
        window = torch.from_numpy(joined[self._offset : self._offset + length + 1].astype(np.int64))
        self._offset += length
        while self._offset >= len(self._chunks[0].tokens):
            self._offset -= len(self._chunks.popleft().tokens)
        shape = (self._batch, self._context)
        return window[:-1].view(shape), window[1:].view(shape)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins."""
        chunk = self._chunks[0] if self._chunks else None
        return {
            "sources": self.identity,
            "read_as": self._read_as,
            "world_size": self._world_size,
            **(chunk.place if chunk else self._begun_at),
            "token": self._offset,
            "unit_digest": chunk.digest if chunk else self._expected,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises DataError where these are other sources, read in another way (which a
        state of an older version does not tell), or where other ranks share them."""
        if state["sources"] != self.identity:
            raise DataError(
                "the stream's sources are not those of the checkpoint (names or sizes differ, or a dataset's "
                f"shards, columns or first document): name the same ones, not {self._source.told}, or use a "
                "new run directory"
            )
        was = state.get("read_as", self._read_as)
        if changed := [name for name, value in self._read_as.items() if was.get(name) != value]:
            told = "; ".join(f"{name} was {was.get(name)!r}, now {self._read_as[name]!r}" for name in changed)
            raise DataError(
                f"the stream is not read as it was for the checkpoint, so its position means nothing: {told}"
                f". Give it the same {', '.join(changed)}, or use a new run directory"
            )
        if state["world_size"] != self._world_size:
            raise DataError(
                f"the checkpoint's stream was read by {state['world_size']} ranks, now there are "
                f"{self._world_size}: start as many, or prepare the text, which any number of ranks can read"
            )
        place = {name: state[name] for name in self._source.beginning(0)}
        self._go_to(place, state["token"], state.get("unit_digest"))

    def _go_to(self, place: Place, token: int, expected: str | None = None) -> None:
        self._begun_at, self._expected = place, expected
        self._offset = token
        self._chunks: deque[_Chunk] = deque()
        self._ahead = self._read(place, expected)
        self._coming: Future[_Chunk] | None = None
        self._took: list[tuple[float, int]] = []
        """Seconds and tokens of the units that were made, the newest few."""

    def seconds_a_token(self) -> float | None:
        """What it takes to read and encode one; waits for the unit that is being made. The first one also
        opens its source: it counts where there is no other. None where there was none with tokens."""
        if self._coming is not None:
            self._coming.exception()
        took = self._took[1:] or self._took
        tokens = sum(number for _, number in took)
        return sum(seconds for seconds, _ in took) / tokens if tokens else None

    def _make(self, ahead: Iterator[_Chunk]) -> _Chunk:
        """`ahead`: as it was when this was asked for. The thread may come to it after another `_go_to`."""
        began = time.perf_counter()
        chunk = next(ahead)
        self._took = [*self._took[-KEPT:], (time.perf_counter() - began, len(chunk.tokens))]
        return chunk

    def _next_chunk(self) -> _Chunk:
        """From the first call on one is being encoded; what cannot be is said by every further call."""
        if self._coming is None:
            self._coming = self._thread.submit(self._make, self._ahead)
        chunk = self._coming.result()
        self._coming = self._thread.submit(self._make, self._ahead)
        return chunk

    def _read(self, place: Place, expected: str | None) -> Iterator[_Chunk]:
        """This rank's units from a place on, without end."""
        while True:
            found = 0
            for here, documents in self._source.units(place):
                content = self._encoder.encode_documents(documents).tokens.get(self._split, b"")
                digest = hashlib.sha256(content).hexdigest()[:12]
                if expected is not None and digest != expected:
                    raise DataError(
                        f"the text at the checkpoint's position ({here}) is not what it was: the sources "
                        "were changed, or do not give the same twice. Bring them back, or use a new run "
                        "directory"
                    )
                expected = None
                found += len(content)
                yield _Chunk(here, digest, np.frombuffer(content, dtype="<u4"))
            if not found and place == self._source.beginning(place["epoch"]):
                raise self._no_text(self._rank)
            place = self._source.beginning(place["epoch"] + 1)

    def _no_text(self, rank: int) -> DataError:
        remedies = []
        if self._split == "validation":
            remedies.append("take more documents for it, with a larger validation_fraction")
        if self._world_size > 1:
            remedies.append("prepare them, or start fewer ranks: they are dealt in parts of about 1 MiB")
        return DataError(
            f"the sources hold no {self._split} text for rank {rank} of {self._world_size}: "
            f"{'; or '.join(remedies) or 'name some that are not empty'}"
        )


def _digest(tokenizer: Path) -> str:
    """Of the file's content. Raises PrepareError where it cannot be read."""
    try:
        return hashlib.sha256(tokenizer.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise PrepareError(f"tokenizer {tokenizer} cannot be read: {error}") from error
