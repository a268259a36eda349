"""`python -m holdfast_trainer export-hf`: a run's model as a directory that Hugging Face reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import contract
from .config import ConfigError, load
from .importing import without_collector
from .schema import place_given


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 1 where the checkpoint or the directory cannot be used, 78 for the configuration."""
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer export-hf",
        description="Write the model of a run as model.safetensors and config.json, in the names and "
        "layout of its family (GPT-2, Llama). The checkpoint is verified first.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, or s3://BUCKET/PREFIX")
    parser.add_argument(
        "--config", type=place_given, required=True, help="the YAML file that the run was given"
    )
    parser.add_argument(
        "--out", type=place_given, required=True, metavar="DIRECTORY", help="where to write them"
    )
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="all that the run was given"
    )
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load(arguments.config, arguments.overrides)
        with without_collector():  # PyTorch, after what needs none
            from .hf_export import CheckpointError, export
        try:
            step, end = export(arguments.run, arguments.step, config, arguments.out)
        except (CheckpointError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    print(f"step {step} is in {arguments.out}")
    if end is None:
        print("note: config.json names no end of text: the data of the run is not here", file=sys.stderr)
    return 0
