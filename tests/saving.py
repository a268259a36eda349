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

from holdfast_trainer.checkpoint import Saved, Saver
from holdfast_trainer.contract import RunDir


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
