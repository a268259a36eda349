"""`python -m holdfast_trainer check`: whether `train` takes a configuration, told at once.

Neither torch nor the data is touched. The controller of one machine asks it before it takes a job. Exit
status: 0, or 78 where `train` would end with the same errors.
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
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    print("nothing is wrong with the configuration")
    return 0
