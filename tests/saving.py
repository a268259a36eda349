"""A saver of one rank, and what its saves leave."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast_trainer.checkpoint import Loaded, Saved, Saver
from holdfast_trainer.checkpoint.manifest import Manifest
from holdfast_trainer.contract import RunDir
from holdfast_trainer.training_state import TrainingState


@dataclass
class Told:
    """What a saver reported."""

    saved: list[Saved] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def make_saver(run: RunDir, told: Told | None = None, **options: Any) -> Saver:
    told = told or Told()
    given = {"attempt": 1, "rank": 0, "world_size": 1} | options
    return Saver(
        run,
        **given,
        on_saved=told.saved.append,
        on_failed=lambda step, error: told.failed.append(f"{step}: {error}"),
    )


def state(value: float, size: int = 4) -> dict[str, Any]:
    return {"parts": {"w": torch.full((size,), value)}}


def save(saver: Saver, step: int, value: float | None = None, size: int = 4) -> None:
    saver.save(step, state(step if value is None else value, size), {"rng": step})
    saver.wait()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """In which this process may open no more than `count` files besides those that it has open."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def listing(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def loaded(state: dict[str, Any], own: dict[str, Any] | None = None) -> Loaded:
    """A part of the name `scaler` as a later attempt finds it, rank 0's and this rank's own."""
    manifest = Manifest(step=7, attempt=1, world_size=1, config_hash="", files={}, time=0.0)
    return Loaded(manifest, {"parts": {"scaler": state}}, None if own is None else {"parts": {"scaler": own}})


def saved_by(state: TrainingState, *, without: tuple[str, ...] = ()) -> Loaded:
    """What a later attempt finds of it; `without` what an older torch did not save of an optimizer."""
    shared = state.capture(1).shared
    for group in shared["parts"]["optimizer"]["param_groups"]:
        for key in without:
            del group[key]
    return Loaded(Manifest(1, 1, 1, "", {}, 0.0), shared, None)


def carried(state: TrainingState) -> Any:
    """Of the gradients, what a save now has."""
    state.end_step()
    return state.capture(1).shared.get("gradients", {}).get("optimizer")
