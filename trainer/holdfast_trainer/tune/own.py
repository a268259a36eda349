"""A workload of one's own as a subject of measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from ..checkpoint.tree import packed_bytes
from ..parallel import Gang, accumulate, wrap
from ..precision import precision
from ..rehearsal import Clock
from ..samples import to_device
from .settings import Settings
from .workload import Workload


class OwnTrial:
    """Steps of a workload; batches come from torch's DataLoader."""

    def __init__(self, workload: Workload, settings: Settings, gang: Gang, *, alone: bool) -> None:
        self._workload, self._settings, self._gang = workload, settings, gang
        self._compute = precision(settings.precision, gang.device)
        torch.manual_seed(0)
        self._raw = raw = workload.model().to(gang.device)
        if settings.compile:
            raw.forward = torch.compile(raw.forward)
        self.model: nn.Module = raw if alone else wrap(raw, gang)
        self._optimizer = workload.optimizer(raw.parameters(), settings.fused)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._loader = loader(workload, settings, gang, alone=alone)
        self._batches: Iterator[Any] = iter(self._loader)
        self.work = self._worked = 0.0
        self._losses = torch.zeros((), device=gang.device)

    def step(self, number: int) -> Clock:
        if number == 1 and self._settings.workers:
            # Step 0 compiled and allocated, and workers went as far ahead meanwhile as they never do again.
            self._batches = iter(self._loader)
        clock = Clock(self._gang.device)
        for index in range(self._settings.accumulate):
            given = self._next()
            batch = to_device(given, self._gang.device)
            clock.lap("data")
            with accumulate(self.model, last=index == self._settings.accumulate - 1):
                with self._compute.autocast():
                    loss = self._workload.loss(self.model, batch) / self._settings.accumulate
                clock.lap("forward")
                self._compute.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                clock.lap("backward")
            self._losses += loss.detach().sum()  # of one element, whatever its shape
            # Of what is on the CPU: a number that has to come from a GPU would be waited for.
            self._worked += float(self._workload.work(given) if self._workload.work else self._settings.batch)
        self._compute.scaler.step(self._optimizer)
        self._compute.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        # Batches differ in what they hold: over the steps so far.
        self.work = self._worked / (number + 1)
        return clock

    @property
    def losses(self) -> float:
        return float(self._losses)

    def state_bytes(self) -> int:
        """Of a checkpoint of model and optimizer. Raises UnsupportedState."""
        return packed_bytes({"model": self._raw.state_dict(), "optimizer": self._optimizer.state_dict()})

    def _next(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
        try:
            return next(self._batches)
        except StopIteration:
            samples, ranks = len(self._workload.dataset), self._gang.world_size  # type: ignore[arg-type]
            raise ValueError(
                f"the dataset has {samples} samples, too few for a batch of {self._settings.batch} on "
                f"{ranks} ranks"
            ) from None

    def close(self) -> None:
        with ExitStack() as stack:
            if stop := getattr(self._batches, "_shutdown_workers", None):
                stack.callback(stop)
        del self._batches


def loader(workload: Workload, settings: Settings, gang: Gang, *, alone: bool = False) -> DataLoader[Any]:
    """As the settings say: shuffled by a seed, whole batches, workers that stay."""
    dataset: Dataset[Any] = workload.dataset
    generator = torch.Generator().manual_seed(0)
    sampler: Any = RandomSampler(dataset, generator=generator)  # type: ignore[arg-type]
    if gang.world_size > 1 and not alone:
        sampler = DistributedSampler(dataset, gang.world_size, gang.rank)
    return DataLoader(
        dataset,
        batch_size=settings.batch,
        sampler=sampler,
        collate_fn=workload.collate,
        num_workers=settings.workers,
        pin_memory=gang.device.type == "cuda",
        persistent_workers=settings.workers > 0,
        prefetch_factor=4 if settings.workers else None,
        drop_last=True,
        multiprocessing_context="fork" if settings.workers else None,  # on a GPU too, as samples.py says
    )
