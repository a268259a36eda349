"""From the start of a resume to the first batch, far in the data and near its beginning.

The tokens are a file without blocks on disk: two thousand million zeros. What is measured is how the place
is found; every reader then reads one batch. Imports and processes are there before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from holdfast_trainer.data import TokenDataset

from .loaders import ITEM, Windows

CONTEXT, BATCH, SEED = 256, 4, 1337
TOKENS_A_STEP = CONTEXT * BATCH

Resume = Callable[[Path, int], float]
"""Seconds to the first batch of a step."""


def write_sparse(directory: Path, tokens: int) -> None:
    """A prepared directory of so many zeros that takes no place on disk."""
    directory.mkdir(parents=True)
    with open(directory / "train.bin", "wb") as file:
        file.truncate(tokens * ITEM)
    shard = {"file": "train.bin", "split": "train", "tokens": tokens, "bytes": tokens * ITEM}
    shard["sha256"] = "not read here"
    index = {"format": "holdfast-tokens/1", "dtype": "uint16", "vocab_size": 512, "end_of_text": 0}
    (directory / "index.json").write_text(json.dumps({**index, "shards": [shard]}))


def holdfast(directory: Path, step: int) -> float:
    began = time.perf_counter()
    data = TokenDataset(directory, "train", context=CONTEXT, vocab_size=512)
    data.batch(seed=SEED, step=step, rank=0, world_size=1, global_batch=BATCH)
    return time.perf_counter() - began


def skipped(directory: Path, step: int) -> float:
    """torch's DataLoader, gone on with as accelerate does: its sampler runs again up to the place."""
    from accelerate import skip_first_batches

    began = time.perf_counter()
    loader: Any = DataLoader(
        Windows(directory / "train.bin", CONTEXT),
        batch_size=BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(SEED),
    )
    next(iter(skip_first_batches(loader, step)))
    return time.perf_counter() - began


class _Counted(Dataset[int]):
    """As long as the windows: a sampler's state does not depend on what an item is."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return 0


_states: dict[int, dict[str, Any]] = {}


def stateful(directory: Path, step: int) -> float:
    """torchdata's loader from the state that it had at this step."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(data: Dataset[Any]) -> Any:
        generator = torch.Generator().manual_seed(SEED)
        return StatefulDataLoader(data, batch_size=BATCH, shuffle=True, generator=generator)

    windows = Windows(directory / "train.bin", CONTEXT)
    if step not in _states:
        counted = loader(_Counted(len(windows)))
        for _, _batch in zip(range(step), counted, strict=False):
            pass
        _states[step] = counted.state_dict()
    state = _states[step]
    began = time.perf_counter()
    resumed = loader(Windows(directory / "train.bin", CONTEXT))
    resumed.load_state_dict(state)
    next(iter(resumed))
    return time.perf_counter() - began


RESUMES: dict[str, Resume] = {"holdfast": holdfast, "skipped": skipped, "stateful": stateful}
