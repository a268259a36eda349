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

from . import contract
from .config import ConfigError
from .contract import Termination
from .importing import without_collector
from .token_index import DataError, may_come
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
        with without_collector():  # PyTorch, after what needs none
            from .train import train
            from .train_data import check_precision, open_data

        check_precision(config)
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
