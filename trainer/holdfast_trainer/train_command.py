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
from .config import Config, ConfigError, check_world, load
from .contract import Termination
from .data import DataError, TokenDataset
from .optim import precision
from .train import train

EPILOG = """examples:
  python -m holdfast_trainer train --config gpt.yaml
  python -m holdfast_trainer train --config gpt.yaml train.steps=1000 optim.learning_rate=3e-4
  torchrun --nproc-per-node=2 -m holdfast_trainer train --config gpt.yaml --run-dir runs/a

The run directory keeps checkpoints, logs and the ledger. Start the same command again after an
interruption: it resumes from the newest checkpoint, bit for bit. SIGTERM (or Ctrl-C) saves first.
"""


def main(argv: Sequence[str]) -> int:
    """Train as the configuration says; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer train",
        description="Train a GPT on prepared text, alone or under torchrun.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=os.environ.get(contract.ENV_CONFIG),
        help=f"YAML file; default: the one that {contract.ENV_CONFIG} names",
    )
    parser.add_argument(
        "--run-dir",
        help=f"a path, or s3://BUCKET/PREFIX (default: {contract.ENV_RUN_DIR}, or ./holdfast-run)",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="win over the file")
    arguments = parser.parse_args(argv)
    if arguments.config is None and not arguments.overrides:
        parser.error(f"give --config FILE (or set {contract.ENV_CONFIG})")
    try:
        config = load(arguments.config, arguments.overrides)
        check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
        compute = precision(config.train.precision, _device())
        train_data, val_data = open_data(config)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        path = Path(os.environ.get(contract.ENV_TERMINATION_LOG, contract.DEFAULT_TERMINATION_LOG))
        contract.write_termination(path, Termination("failed", 0, 0, str(error), config_error=True))
        return contract.EXIT_CONFIG_ERROR
    # From here on Run sees to it that errors are told, to the engine and to the other ranks.
    train(config, compute, train_data, val_data, arguments.run_dir)
    return 0


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_data(config: Config) -> tuple[TokenDataset, TokenDataset | None]:
    """The training split, and the validation split where it is used. Raises DataError."""
    shape = {"context": config.model.context, "vocab_size": config.model.vocab_size}
    data = config.data
    training = TokenDataset(data.path, "train", **shape, verify=data.verify)
    if not config.validation.every:
        return training, None
    return training, TokenDataset(data.path, "validation", **shape, verify=data.verify)
