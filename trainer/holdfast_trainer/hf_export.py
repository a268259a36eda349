"""A checkpoint of a run, verified, as a directory that Hugging Face reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .checkpoint.configuration import CONFIGURATION, other_configuration
from .checkpoint.errors import CheckpointError as CheckpointError
from .checkpoint.inspection import Opened, choose, open_run
from .checkpoint.manifest import Manifest
from .config import Config, ConfigError
from .data_config import DataConfig
from .hf_weights import save_weights
from .token_index import DataError, read_index


def export(named: str, asked: int | None, config: Config, out: Path) -> tuple[int, int | None]:
    """Write the model of a run (a directory, or s3://BUCKET/PREFIX): of step `asked`, or of the newest.

    Returns the step, and the token that ends a document, where that is known. Raises CheckpointError or
    OSError for a checkpoint or a directory that cannot be used, ConfigError for another configuration.
    """
    run = open_run(named)
    step = choose(run, asked)
    with Opened(run, step) as opened:
        _check_config(opened, config)
        parts = opened.shared()["parts"]
    if "model" not in parts:
        raise CheckpointError(f"step {step} has no part 'model', only {', '.join(parts)}")
    end = _end_of_text(config.data, opened.manifest)
    try:
        save_weights(parts["model"], config.model, out, end_of_text=end)
    except ConfigError as error:
        if CONFIGURATION in opened.manifest.environment:
            raise
        raise CheckpointError(
            f"{opened.path} is of a loop of its own, and its model not the configured one, which has a "
            f"layout there ({error}). The weights of any are written by: python -m holdfast_trainer "
            f"checkpoint export {named}@{step} --out FILE"
        ) from error
    return step, end


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
