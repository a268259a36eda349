"""What a configuration needs of the machine before the ranks meet: its precision, and its data."""

from __future__ import annotations

import torch

from .config import Config
from .data import TokenDataset, Tokens
from .precision import precision
from .token_index import Split


def check_precision(config: Config) -> None:
    """Raises ConfigError where the device of this process does not have it."""
    precision(config.train.precision, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def open_data(config: Config, rank: int, world_size: int) -> tuple[Tokens, Tokens | None]:
    """The training split, and the validation split where it is used, for this rank. Raises DataError."""
    training = _split(config, "train", rank, world_size)
    return training, _split(config, "validation", rank, world_size) if config.validation.every else None


def _split(config: Config, split: Split, rank: int, world_size: int) -> Tokens:
    data, model = config.data, config.model
    if data.stream is None:
        shape = {"context": model.context, "vocab_size": model.vocab_size}
        return TokenDataset(data.prepared, split, **shape, verify=data.verify)
    from .streaming import StreamedTokens  # what tokenises takes its time to import

    return StreamedTokens(
        data.stream,
        split,
        context=model.context,
        vocab_size=model.vocab_size,
        rows=config.train.global_batch // world_size,
        rank=rank,
        world_size=world_size,
    )
