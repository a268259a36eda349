"""`python -m holdfast_trainer export-hf`: a run's model as a directory that Hugging Face reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from . import contract
from .checkpoint.configuration import CONFIGURATION, other_configuration
from .checkpoint.directory import CheckpointError
from .checkpoint.inspection import Opened, choose, open_run
from .checkpoint.manifest import Manifest
from .config import Config, ConfigError, load
from .data_config import DataConfig
from .schema import place_given
from .token_index import DataError, read_index


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
        run = open_run(arguments.run)
        step = choose(run, arguments.step)
        with Opened(run, step) as opened:
            _check_config(opened, config)
            parts = opened.shared()["parts"]
        if "model" not in parts:
            raise CheckpointError(f"step {step} has no part 'model', only {', '.join(parts)}")
        end = _end_of_text(config.data, opened.manifest)
        from .hf_weights import save_weights

        try:
            save_weights(parts["model"], config.model, arguments.out, end_of_text=end)
        except ConfigError as error:
            if CONFIGURATION in opened.manifest.environment:
                raise
            raise CheckpointError(
                f"{opened.path} is of a loop of its own, and its model not the configured one, which has a "
                f"layout there ({error}). The weights of any are written by: python -m holdfast_trainer "
                f"checkpoint export {arguments.run}@{step} --out FILE"
            ) from error
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"step {step} is in {arguments.out}")
    if end is None:
        print("note: config.json names no end of text: the data of the run is not here", file=sys.stderr)
    return 0


def _end_of_text(config: DataConfig, manifest: Manifest) -> int | None:
    """The token that ended each document; None where the data is not here, or no longer what it was."""
    try:
        if config.stream is not None:
            from .prepare.tokenizer import end_of_text, read_tokenizer

            return end_of_text(read_tokenizer(config.stream.tokenizer), config.stream.tokenizer)
        index = read_index(config.prepared)
    except DataError:
        return None
    return index.end_of_text if manifest.config_hash.endswith(index.identity) else None


def _check_config(opened: Opened, config: Config) -> None:
    """Raises ConfigError for another one than the run's: the tensors would not tell how many heads they are
    of, nor the base of rotary angles, and what is written would compute something else."""
    trained = replace(opened.manifest, config_hash=opened.manifest.config_hash.partition("-")[0])
    if told := other_configuration(trained, config.hash(), config.defining()):
        raise ConfigError(
            f"{opened.path} was written under another configuration ({told}): "
            "give the file and the overrides that the run was given"
        )
