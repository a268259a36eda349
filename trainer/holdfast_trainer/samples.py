"""Batches of any dataset, loaded by worker processes, each a function of (seed, step, rank): no state.

The order is that of `data.py`: a permutation of each epoch that is computed point by point, so the position
is the step alone, and a resume begins at its batch at once. A whole batch is made in one worker, which
seeds its generators from (seed, step, rank) before: what a dataset draws, to crop or to mask, is the same
when a step is done again, however many workers there are.

    samples = Samples(dataset, batch=64, rank=run.rank, world_size=run.world_size, device=run.device)
    for step in run.steps(10_000):
        with run.span("data"):
            images, labels = samples.batch(step)
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from .alike import announce, depend_on
from .checkpoint import rng
from .permutation import mix, numbered, sample_order
from .token_index import DataError

Collate = Callable[[list[Any]], Any]

WORKERS_A_GPU = 4
MOST_WORKERS = 8
SPARED_CORES = 2
"""For the training process itself."""


class Samples:
    """One rank's batches of a dataset that has a length and samples by index."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 1337,
        collate: Collate = default_collate,
        workers: int | None = None,
        prefetch: int = 4,
    ):
        """`batch` samples of a rank in a step; `collate` makes a batch of them; `workers` by rule where None
        (`workers_by_rule`), 0 for none; each has `prefetch` batches ahead. The order follows from the number
        of samples: one made before `run.track` has it compared at a resume, and another one is told.

        Raises DataError for a dataset without samples, ValueError for a rank or batch that can not be.
        """
        if batch < 1 or not 0 <= rank < world_size:
            raise ValueError(f"no batch of {batch} samples for rank {rank} of {world_size}")
        size = len(dataset)  # type: ignore[arg-type]
        if not size:
            raise DataError(f"the dataset ({type(dataset).__name__}) has no samples")
        self.device = torch.device(device)
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cuda = self.device.type == "cuda"
        self.workers = workers_by_rule(_cores(), ranks_here, gpu=cuda) if workers is None else workers
        depend_on("the data of Samples", f"{size} samples, {batch * world_size} a step, seed {seed}")
        if world_size > 1:
            announce("the data of Samples", f"{size} samples, {batch} a step, seed {seed}")
        self._steps = _Steps(dataset, size, batch, rank, world_size, seed, collate)
        self._prefetch, self._cuda = prefetch, cuda
        self._next = -1
        self._batches: Iterator[Any] | None = None

    def batch(self, step: int) -> Any:
        """The batch of a step (0 is the first) on the device; the next one is being loaded meanwhile.

        Raises what the dataset or `collate` raises.
        """
        if self.workers == 0:
            before = rng.capture()
            try:
                return to_device(self._steps[step], self.device)
            finally:
                rng.restore(before)
        if step != self._next or self._batches is None:
            self.close()
            with torch.device("cpu"):  # where its generator is, whatever torch.set_default_device says
                self._batches = iter(self._loader(step))
        self._next = step + 1
        return to_device(self._fetch(self._batches), self.device)

    def _fetch(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches)
        except (OSError, EOFError) as error:
            # A batch lies in memory that its worker hands over, and torch has not looked for the dead yet.
            workers = {worker.sentinel: worker for worker in getattr(batches, "_workers", ())}
            for gone in wait(list(workers), timeout=5):
                pid = workers[gone].pid
                raise RuntimeError(f"DataLoader worker (pid {pid}) ended with a batch ({error!r})") from error
            raise

    def close(self) -> None:
        """End the workers; `batch` starts them again."""
        if stop := getattr(self._batches, "_shutdown_workers", None):
            stop()
        self._batches = None

    def _loader(self, step: int) -> DataLoader[Any]:
        return DataLoader(
            self._steps,
            batch_size=None,
            sampler=count(step),
            collate_fn=_as_it_is,
            num_workers=self.workers,
            prefetch_factor=self._prefetch,
            pin_memory=self._cuda,
            generator=torch.Generator(),  # else the loader draws from the one that training draws from
            # On a GPU too: workers touch none, batches are pinned by a thread of this process. From Python
            # 3.14 on others come from a server of forks, which a notice would end (see interruption).
            multiprocessing_context="fork",
        )


class _Steps(Dataset[Any]):
    """The dataset by steps: a batch each."""

    def __init__(
        self,
        dataset: Dataset[Any],
        size: int,
        batch: int,
        rank: int,
        world_size: int,
        seed: int,
        collate: Collate,
    ):
        self._dataset, self._size, self._seed, self._collate = dataset, size, seed, collate
        self._batch, self._rank, self._world_size = batch, rank, world_size

    def __getitem__(self, step: int) -> Any:
        number = step * self._world_size + self._rank
        indices = sample_order(self._seed, numbered(number * self._batch, self._batch), self._size).tolist()
        _seed(self._seed, number)
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])


def pad_ragged(
    samples: Sequence[Any], *, fill: float = 0, multiple: int = 8, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Sequences of different length as one tensor [samples, longest], filled up with `fill`, and the lengths.

    The longest is rounded up to a multiple, for shapes that repeat; the tensor is allocated once, and each
    sequence (a list of numbers, an array, a tensor) is copied to its place. For use in a `collate`.

    Where no `dtype` is given, it is one that can hold all sequences (as numpy has it for their types).
    Raises DataError where it cannot hold a value or `fill`; that floats are rounded is no reason.
    """
    arrays = [np.asarray(sample) for sample in samples]
    lengths = torch.tensor([len(array) for array in arrays], device="cpu")
    longest = -(-max(1, int(lengths.max())) // multiple) * multiple
    if dtype is None:
        # An empty list has a type by default alone.
        typed = {a.dtype for a, s in zip(arrays, samples, strict=True) if len(a) or hasattr(s, "dtype")}
        dtype = torch.from_numpy(np.empty(0, np.result_type(*(typed or {arrays[0].dtype})))).dtype
    padded = torch.full((len(arrays), longest), fill, dtype=dtype, device="cpu")
    if not dtype.is_floating_point and padded[0, 0].item() != fill:
        raise DataError(f"{dtype} has no room for fill={fill}: give another dtype")
    rows = padded.numpy()
    for kind in {array.dtype for array in arrays if len(array)}:
        if not np.can_cast(kind, rows.dtype):
            _check_room(np.concatenate([array for array in arrays if array.dtype == kind]), rows.dtype)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return padded, lengths


def _check_room(values: np.ndarray[Any, Any], kind: np.dtype[Any]) -> None:
    """Raises DataError where `kind` cannot have all `values`, or values of their type as a rule."""
    if values.dtype.kind in "iu" and kind.kind in "iu":
        room = np.iinfo(kind)
        for value in (values.min(), values.max()):
            if not room.min <= value <= room.max:
                raise DataError(
                    f"a sequence holds {value}, and {kind} has no room for that: give a wider dtype"
                )
    elif not np.can_cast(values.dtype, kind, "same_kind"):
        raise DataError(f"a sequence of {values.dtype} would lose its values as {kind}: give another dtype")


def workers_by_rule(cores: int, ranks: int, *, gpu: bool) -> int:
    """Workers for each of `ranks` ranks on a machine: 4 a GPU, 8 at most, 2 cores left to training."""
    most = WORKERS_A_GPU if gpu else MOST_WORKERS
    return max(0, min(most, (cores - SPARED_CORES) // ranks))


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor in it, whatever holds them. What has a `to` of its own, such as a PackedSequence, knows
    which of its tensors belong there."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(to := getattr(batch, "to", None)):
        return to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _seed(seed: int, number: int) -> None:
    mixed = mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(number)
    value = int(mix(mixed)[0]) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _as_it_is(batch: Any) -> Any:
    return batch


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1
