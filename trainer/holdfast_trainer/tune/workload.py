"""A training of one's own, as `tune` and `diagnose` need it: a function that describes it.

::

    # mine.py
    from holdfast_trainer.tune.settings import Settings
    from holdfast_trainer.tune.workload import Workload

    def make() -> Workload:
        return Workload(
            model=Net,
            dataset=Images("data/"),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            settings=Settings(batch=8),
            steps=10_000,
        )

    # python -m holdfast_trainer tune mine.py:make

`settings` are those of today. What was found is read back by `Settings.read("tuned.yaml")`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..contract import is_file
from .settings import ConfigError, Settings


def adamw(parameters: Iterable[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
    """AdamW with torch's defaults; `fused` as torch has it, else its loop over parameters."""
    return (
        torch.optim.AdamW(parameters, fused=True) if fused else torch.optim.AdamW(parameters, foreach=False)
    )


@dataclass(frozen=True)
class Workload:
    """What is trained, and how it is today."""

    model: Callable[[], nn.Module]
    """Makes the model, on the CPU; called anew for every measurement."""
    dataset: Dataset[Any]
    """Samples by index, with a length."""
    loss: Callable[[nn.Module, Any], Tensor]
    """From the model and a batch on its device to a scalar."""
    settings: Settings = field(default_factory=Settings)
    collate: Callable[[list[Any]], Any] | None = None
    """From samples to a batch; torch's own where None."""
    optimizer: Callable[[Iterable[nn.Parameter], bool], torch.optim.Optimizer] = adamw
    """From parameters and whether a fused kernel is wanted."""
    work: Callable[[Any], float | Tensor] | None = None
    """What a batch holds, in `unit`, such as `lambda batch: batch["mask"].sum()`; samples where None."""
    unit: str = "samples"
    steps: int | None = None
    """Of the optimizer, in the whole training, for the time that `diagnose` estimates; None: it does not."""


def load_workload(target: str) -> Workload:
    """From FILE.py:FUNCTION or MODULE:FUNCTION. Raises ConfigError."""
    where, _, name = target.rpartition(":")
    try:
        if where.endswith(".py"):
            path = Path(where)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not is_file(path):
                raise ConfigError(f"{target}: there is no file {path}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module  # workers of a loader look samples' classes up by name
            sys.path.insert(0, str(path.absolute().parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        make = getattr(module, name, None)
    except ImportError as error:
        raise ConfigError(f"{target} cannot be imported: {error}") from error
    if not callable(make):
        raise ConfigError(f"{target}: there is no such function. Name one, such as mine.py:make")
    made = make()
    if not isinstance(made, Workload):
        raise ConfigError(f"{target} gave {type(made).__name__}; it should return a Workload")
    return made
