"""What can be set without changing a model's code: how much at a time, and how it is computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml

from ..schema import ConfigError, Range, from_mapping, read_yaml

_KERNELS = {True: "deterministic", "strict": "strictly deterministic", False: "any kernels"}


@dataclass(frozen=True)
class Settings:
    """Of one rank."""

    batch: Annotated[int, Range(1)] = 1
    """Samples in one pass."""
    accumulate: Annotated[int, Range(1)] = 1
    """Passes a step: the optimizer sees batch x accumulate samples of each rank."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the matrix products (autocast); weights stay fp32."""
    tf32: bool | None = None
    """TensorFloat-32 in the products that stay fp32, on a GPU that has it (`precision.allow_tf32`);
    null: as torch is set."""
    compile: bool = False
    """torch.compile."""
    fused: bool = False
    """One kernel for all parameters in the optimizer, instead of a loop."""
    threads: Annotated[int, Range(1)] | None = None
    """For CPU operators; null: what torch chooses."""
    workers: Annotated[int, Range(0)] = 0
    """Processes that make batches; 0: the training thread does."""
    recompute: bool = False
    """Activations are computed again in the backward pass (the GPT's train.activation_checkpointing)."""
    deterministic: bool | Literal["strict"] = True
    """Which kernels torch takes, as `Run` is asked for them; not tuned, as an exact resume stands on it."""
    learning_rate: float | None = None
    """null: as it was."""

    @property
    def samples(self) -> int:
        """A step's, of one rank."""
        return self.batch * self.accumulate

    @classmethod
    def read(cls, path: Path) -> Settings:
        """What `tune` wrote to tuned.yaml. Raises ConfigError."""
        document, places = read_yaml(path)
        return from_mapping(cls, document, path, places=places)

    def write(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False), encoding="utf-8")

    def told(self) -> str:
        """In a few words."""
        words = [f"batch {self.batch}"]
        words += [f"{self.accumulate} passes"] if self.accumulate > 1 else []
        words += [self.precision, "TF32" if self.tf32 else ""]
        words += ["compiled" if self.compile else "", "fused" if self.fused else ""]
        words += [f"{self.threads} threads"] if self.threads else []
        words += [f"{self.workers} workers"] if self.workers else []
        words += ["recomputing"] if self.recompute else []
        words += [_KERNELS[self.deterministic]]
        return ", ".join(filter(None, words))


__all__ = ["ConfigError", "Settings"]
