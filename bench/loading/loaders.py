"""Token batches as Holdfast reads them, and as others do, from the same tokens.

Each is an endless iterator of (tokens, targets), int64 [batch, context] on the CPU (Holdfast's and nanoGPT's
on the device), in shuffled order. The peers' data set is the usual one: a window of a memory map an item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from holdfast_trainer.assembly import Batches

from ..training.work import Work

Loaded = Iterator[tuple[Tensor, Tensor]]
ITEM = 2
"""Bytes a token: uint16."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a file of uint16 tokens that do not overlap, and the token after each."""

    def __init__(self, path: Path, context: int):
        self._path, self._context = path, context
        self._samples = (path.stat().st_size // ITEM - 1) // context
        self._map: Any = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._map is None:  # in the worker that reads
            self._map = np.memmap(self._path, dtype=np.uint16, mode="r")
        start = index * self._context
        window = torch.from_numpy(self._map[start : start + self._context + 1].astype(np.int64))
        return window[:-1], window[1:]


def holdfast(work: Work, _workers: int) -> Loaded:
    """As `train.py` gets them."""
    batches = Batches(work.dataset(), work.config, 0, 1, work.device)
    for step in count():
        yield from batches.batch(step)


def nanogpt(work: Work, _workers: int) -> Loaded:
    """nanoGPT's way: windows anywhere, drawn anew for each batch, from a map that is opened anew."""
    context, rows = work.config.model.context, work.rows
    while True:
        tokens = np.memmap(work.config.data.prepared / "train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(tokens) - context - 1, (rows,)).tolist()
        inputs = torch.stack([torch.from_numpy(tokens[i : i + context].astype(np.int64)) for i in starts])
        targets = torch.stack(
            [torch.from_numpy(tokens[i + 1 : i + 1 + context].astype(np.int64)) for i in starts]
        )
        if work.device.type == "cuda":
            inputs, targets = (
                part.pin_memory().to(work.device, non_blocking=True) for part in (inputs, targets)
            )
        yield inputs, targets


def _settings(work: Work, workers: int) -> dict[str, Any]:
    return {
        "batch_size": work.rows,
        "shuffle": True,
        "drop_last": True,
        "num_workers": workers,
        "pin_memory": work.device.type == "cuda",
        "persistent_workers": workers > 0,
    }


def _epochs(loader: Any) -> Loaded:
    while True:
        yield from ((tokens, targets) for tokens, targets in loader)


def memmap(work: Work, workers: int) -> Loaded:
    """torch's DataLoader over the windows."""
    windows = Windows(work.config.data.prepared / "train.bin", work.config.model.context)
    return _epochs(DataLoader(windows, **_settings(work, workers)))


def stateful(work: Work, workers: int) -> Loaded:
    """torchdata's DataLoader that can say where it is, over the windows."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    windows = Windows(work.config.data.prepared / "train.bin", work.config.model.context)
    return _epochs(StatefulDataLoader(windows, **_settings(work, workers)))


def arrow(work: Work, workers: int) -> Loaded:
    """Hugging Face's `datasets`: a row is a window, in a memory-mapped Arrow file."""
    import datasets
    import pyarrow

    path, width = work.config.data.prepared, work.config.model.context + 1
    tokens = np.memmap(path / "train.bin", dtype=np.uint16, mode="r")
    rows = len(tokens) // width
    values = pyarrow.array(np.asarray(tokens[: rows * width]))
    lengths = pyarrow.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
    table = pyarrow.table({"window": pyarrow.ListArray.from_arrays(lengths, values)})
    folder = path / "arrow"
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(folder)
    loaded = datasets.load_from_disk(str(folder)).with_format("torch")
    loader = DataLoader(loaded, **_settings(work, workers))
    return _epochs((batch["window"][:, :-1], batch["window"][:, 1:]) for batch in _rows(loader))


def _rows(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


LOADERS: dict[str, Callable[[Work, int], Loaded]] = {
    "holdfast": holdfast,
    "nanogpt": nanogpt,
    "memmap": memmap,
    "arrow": arrow,
    "stateful": stateful,
}
