"""`python -m holdfast_trainer check`: whether `train` takes a configuration, told at once.

The data is not touched, nor torch, but for the name of a bucket. The controller of one machine asks it
before it takes a job. Exit status: 0, or 78 where `train` would end with the same errors.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import contract
from .schema import ConfigError
from .train_words import add_train_words, configuration


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer check",
        description="Say whether `train` takes a configuration; its data is looked at when it trains.",
    )
    add_train_words(parser)
    arguments = parser.parse_intermixed_args(argv)
    try:
        configuration(parser, arguments, int(os.environ.get("WORLD_SIZE", "1")))
        named = os.environ.get(contract.ENV_RUN_DIR) or arguments.run_dir or ""
        if "://" in named:  # no other name can be told to be none
            from .place import run_directory

            run_directory(named)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    print("nothing is wrong with the configuration")
    return 0
