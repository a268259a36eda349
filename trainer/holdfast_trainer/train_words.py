"""The words of `train`: which configuration, and what is laid over it. `check` takes the same ones.

No torch: what is wrong with them is told at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from . import contract
from .config import Config, check_world, load
from .contract import is_file
from .schema import place_given, word_given


def add_train_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=place_given,
        help=f"the YAML file, which may also stand alone; default: the one that {contract.ENV_CONFIG} names",
    )
    parser.add_argument(
        "--run-dir",
        type=word_given,
        help=f"a path, or s3://BUCKET/PREFIX (default: {contract.ENV_RUN_DIR}, or ./holdfast-run)",
    )
    parser.add_argument("words", nargs="*", metavar="section.key=value", help="win over the file")


def configuration(parser: argparse.ArgumentParser, arguments: argparse.Namespace, world_size: int) -> Config:
    """What these words say, for so many ranks. Raises ConfigError; ends the command where they are no words
    of `train`."""
    path, overrides = _told(parser, arguments.config, arguments.words)
    config = load(path, overrides)
    check_world(config, world_size)
    return config


def _told(
    parser: argparse.ArgumentParser, option: Path | None, words: Sequence[str]
) -> tuple[Path | None, list[str]]:
    """(file, overrides). A word without = is the file, if it can be one. Ends the command where nothing is
    told, or two files are."""
    files = [
        word
        for word in words
        if "=" not in word and (word.endswith((".yaml", ".yml")) or is_file(Path(word)))
    ]
    named = [*filter(None, [option]), *map(Path, files)]
    if len(named) > 1:
        parser.error(f"one configuration at a time, not {', '.join(map(str, named))}")
    overrides = [word for word in words if word not in files]
    if not named and (given := os.environ.get(contract.ENV_CONFIG)):
        named = [Path(given)]
    if not named and not overrides:
        parser.error(f"name a configuration, such as gpt.yaml (or set {contract.ENV_CONFIG})")
    return named[0] if named else None, overrides
