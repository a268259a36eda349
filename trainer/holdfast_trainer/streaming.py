"""Text that is tokenised while it trains, as the training loop reads prepared shards.

The training split is a TokenStream that is tracked with the model, so each checkpoint has its position.
Validation reads the first windows of its own split once and keeps them: they are the same every time, and
what they were read from is not read again.
"""

from __future__ import annotations

from torch import Tensor

from .data_config import StreamConfig
from .prepare.corpus import DEFAULT_PATTERNS
from .prepare.tokenizer import read_tokenizer, vocabulary
from .token_index import DataError, Split
from .token_stream import TokenStream


class StreamedTokens:
    """One rank's part of a split. `identity` says only that text is streamed: which, and how it is read, the
    stream's own state tells, and in more words than a hash."""

    identity = "streamed"
    samples = None
    """How many windows there are is not known before all is read."""

    def __init__(
        self,
        config: StreamConfig,
        split: Split,
        *,
        context: int,
        vocab_size: int,
        rows: int,
        rank: int,
        world_size: int,
    ):
        """`rows` a step. Raises DataError: sources or tokenizer missing or unreadable, a vocabulary above the
        model's, no text for this rank in the validation split."""
        size = vocabulary(read_tokenizer(config.tokenizer))
        if size > vocab_size:
            raise DataError(
                f"tokenizer {config.tokenizer} has a vocabulary of {size} tokens, the model of {vocab_size}: "
                f"set model.vocab_size to at least {size}"
            )
        self.context, self._split = context, split
        self._shape = rank, world_size, rows
        self._stream = TokenStream(
            config.sources,
            config.tokenizer,
            context=context,
            batch=rows,
            rank=rank,
            world_size=world_size,
            split=split,
            validation_fraction=config.validation_fraction,
            text_field=config.text_field,
            patterns=config.patterns or DEFAULT_PATTERNS,
        )
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Of the validation split."""
        if split == "validation":
            self._kept.append(self._stream.batch())  # now, not when the run has come to its first validation

    @property
    def tracked(self) -> dict[str, TokenStream]:
        """What a checkpoint is to have of it, by name."""
        return {"stream": self._stream}

    def batch(
        self, *, seed: int, step: int, rank: int, world_size: int, global_batch: int
    ) -> tuple[Tensor, Tensor]:
        """As TokenDataset.batch. Of the training split these are the next ones, whatever step asks."""
        if (rank, world_size, global_batch // world_size) != self._shape:
            raise ValueError(f"a stream for (rank, ranks, rows) {self._shape} has no batch for others")
        if self._split == "train":
            return self._stream.batch()
        while len(self._kept) <= step:
            self._kept.append(self._stream.batch())
        return self._kept[step]

    def seconds_a_token(self) -> float | None:
        """As TokenDataset.seconds_a_token."""
        return self._stream.seconds_a_token()

    def describe(self, seed: int, first: int, count: int) -> str:
        """As TokenDataset.describe; about where they are from, for the stream has gone on since."""
        place = self._stream.state_dict()
        where = ", ".join(f"{name} {place[name]}" for name in ("epoch", "unit", "token"))
        return f"{count} windows of {self.context} tokens of the stream, before {where}"
