"""What all subjects have in common: the model's code and weights, the batches, the optimizer's figures."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast_trainer.config import Config, load
from holdfast_trainer.data import TokenDataset
from holdfast_trainer.model import GPT
from holdfast_trainer.optim import learning_rate
from holdfast_trainer.precision import Precision, precision

from .shapes import SHAPES

STEPS = 1_000_000
"""Never reached: the gate ends a training."""
POOL = 32
"""Steps whose batches are held in memory, for those who get them from a list."""


def write_tokens(directory: Path, tokens: int = 4_000_000) -> None:
    """A prepared directory of random tokens, as `prepare` would leave it."""
    directory.mkdir(parents=True)
    content = np.random.default_rng(1).integers(0, 512, size=tokens).astype("<u2").tobytes()
    (directory / "train.bin").write_bytes(content)
    shard = {"file": "train.bin", "split": "train", "tokens": tokens, "bytes": len(content)}
    index = {"format": "holdfast-tokens/1", "dtype": "uint16", "vocab_size": 512, "end_of_text": 0}
    shard["sha256"] = hashlib.sha256(content).hexdigest()
    (directory / "index.json").write_text(json.dumps({**index, "shards": [shard]}))


@dataclass(frozen=True)
class Work:
    """Of one rank."""

    config: Config
    compute: Precision
    device: torch.device
    rank: int
    world_size: int

    @classmethod
    def of(cls, shape: str, data: Path, kind: str, rank: int, world_size: int, *changes: str) -> Work:
        """`kind` is the precision by name; `changes` are section.key=value."""
        device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        sizes = dict(SHAPES[shape])
        batch = sizes.pop("batch")
        words = [f"model.{key}={value}" for key, value in sizes.items()]
        words += [f"data.path={data}", f"train.steps={STEPS}", f"train.global_batch={batch}"]
        words += [f"train.precision={kind}", "optim.warmup_steps=0", f"checkpoint.every={STEPS}", *changes]
        config = load(None, words, environ={})
        return cls(config, precision(kind, device), device, rank, world_size)

    @property
    def rows(self) -> int:
        """Sequences of this rank in a step."""
        return self.config.train.global_batch // self.world_size

    def model(self) -> GPT:
        torch.manual_seed(self.config.train.seed)
        return GPT(self.config.model).to(self.device)

    def dataset(self) -> TokenDataset:
        model = self.config.model
        return TokenDataset(
            self.config.data.prepared, "train", context=model.context, vocab_size=model.vocab_size
        )

    def pool(self) -> list[tuple[Tensor, Tensor]]:
        """The first batches of this rank, on the CPU: the same that Holdfast reads itself."""
        data = self.dataset()
        return [
            data.batch(
                seed=self.config.train.seed,
                step=step,
                rank=self.rank,
                world_size=self.world_size,
                global_batch=self.config.train.global_batch,
            )
            for step in range(POOL)
        ]

    def rate(self, step: int) -> float:
        return learning_rate(self.config.optim, step, STEPS)
