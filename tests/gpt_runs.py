"""GPT trainings of the tests: prepared data that a model can learn, a configuration, a gang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml
from gangs import Gang, Workshop
from tests.cluster.site import cache_directory

import holdfast_trainer
from holdfast_trainer.compilation import CACHE

COMMAND = Path(holdfast_trainer.__file__).parent / "__main__.py"
MIXED = Path(__file__).parent / "trainer" / "mixed_gang_script.py"
CONFIG = {
    "model": {"vocab_size": 64, "layers": 2, "heads": 2, "width": 32, "context": 16, "dropout": 0.1},
    "data": {"path": "data"},
    "train": {"steps": 40, "global_batch": 12, "micro_batch": 3, "precision": "fp32", "log_every": 5},
    "optim": {"learning_rate": 1e-2, "warmup_steps": 4},
    "validation": {"every": 9, "batches": 2},
    "checkpoint": {"every": 6},
}


def write_data(directory: Path) -> None:
    """Shards that a model can learn something of: short words over and over, in random order."""
    directory.mkdir()
    chance = np.random.default_rng(3)
    words = chance.integers(1, 64, size=(20, 5))
    shards = []
    for split, count in (("train", 2000), ("validation", 200)):
        content = words[chance.integers(0, 20, size=count)].astype("<u2").tobytes()
        (directory / f"{split}.bin").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        shards.append(
            {
                "file": f"{split}.bin",
                "split": split,
                "tokens": count * 5,
                "bytes": len(content),
                "sha256": sha256,
            }
        )
    index = {"format": "holdfast-tokens/1", "dtype": "uint16", "vocab_size": 64, "end_of_text": 0}
    (directory / "index.json").write_text(json.dumps({**index, "shards": shards}))


def write_config(directory: Path) -> Path:
    """Data and configuration in `directory`; returns the configuration's file."""
    write_data(directory / "data")
    body = {**CONFIG, "data": {"path": str(directory / "data")}}
    path = directory / "gpt.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def compiler_cache() -> dict[str, str]:
    """For the environment of ranks that compile: half a minute of C++, which is done once on a machine."""
    return {CACHE: str(cache_directory() / "compiled")}


def start(
    workshop: Workshop,
    config: Path,
    *overrides: str,
    name: str = "run",
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
) -> Gang:
    """The next attempt of run `name`."""
    arguments = ["train", "--config", str(config), *overrides]
    return workshop.start(name, ranks=ranks, script=COMMAND, arguments=arguments, env=env)
