"""`python -m holdfast_trainer train`: arguments, configuration and data, then the loop in `train.py`.

It runs as one process, under torchrun, or as a Holdfast job; where it left off it goes on. What can never
run is told here, before the ranks meet.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import contract
from .config import Config, ConfigError
from .contract import Termination
from .data import DataError, TokenDataset, Tokens
from .precision import precision
from .token_index import Split, may_come
from .train import train
from .train_words import add_train_words, configuration

EPILOG = """examples:
  python -m holdfast_trainer train gpt.yaml
  python -m holdfast_trainer train gpt.yaml train.steps=1000 optim.learning_rate=3e-4
  torchrun --nproc-per-node=2 -m holdfast_trainer train gpt.yaml --run-dir runs/a

`python -m holdfast_trainer explain` lists all settings, `explain train.precision` one of them.

The run directory keeps checkpoints, logs and the ledger. Start the same command again after an
interruption: it resumes from the newest checkpoint, bit for bit. SIGTERM (or Ctrl-C) saves first.
"""


def main(argv: Sequence[str]) -> int:
    """Train as the configuration says; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer train",
        description="Train a GPT on prepared or streamed text, alone or under torchrun.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_train_words(parser)
    arguments = parser.parse_intermixed_args(argv)
    rank, world_size = (int(os.environ.get(*of)) for of in (("RANK", "0"), ("WORLD_SIZE", "1")))
    try:
        config = configuration(parser, arguments, world_size)
        precision(config.train.precision, _device())
        train_data, val_data = open_data(config, rank, world_size)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        path = Path(os.environ.get(contract.ENV_TERMINATION_LOG, contract.DEFAULT_TERMINATION_LOG))
        final = not may_come(error)
        contract.write_termination(path, Termination("failed", 0, 0, str(error), config_error=final))
        return contract.EXIT_CONFIG_ERROR if final else 1
    # From here on Run sees to it that errors are told, to the engine and to the other ranks.
    train(config, train_data, val_data, arguments.run_dir)
    return 0


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
