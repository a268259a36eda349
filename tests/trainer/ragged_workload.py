"""A workload for the tests of tune and diagnose: small, slow in known ways, out of memory above a size."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from holdfast_trainer.tune.settings import Settings
from holdfast_trainer.tune.workload import Workload

FITS = 12


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), float(index))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    if len(batch) > FITS:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    return model(batch).square().mean()


def make() -> Workload:
    return Workload(lambda: nn.Linear(8, 8), Numbers(), loss, Settings(batch=1, threads=1))


def whole() -> Workload:
    """It is said how long its training is."""
    return Workload(lambda: nn.Linear(8, 8), Numbers(), loss, Settings(batch=4, threads=1), steps=100_000)


class Callback(nn.Linear):
    """Keeps in its state what no checkpoint can hold."""

    def get_extra_state(self) -> object:
        return print


def unsaved() -> Workload:
    return Workload(lambda: Callback(8, 8), Numbers(), loss, Settings(batch=4, threads=1))


def scattered_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Has an operation without a deterministic kernel on a CPU either."""
    torch.zeros(3).put_(torch.zeros(2, dtype=torch.int64), torch.ones(2))
    return loss(model, batch)


def scattering() -> Workload:
    return Workload(lambda: nn.Linear(8, 8), Numbers(), scattered_loss, Settings(batch=4, threads=1))


def scattering_strictly() -> Workload:
    settings = Settings(batch=4, threads=1, deterministic="strict")
    return Workload(lambda: nn.Linear(8, 8), Numbers(), scattered_loss, settings)


def scattering_as_it_comes() -> Workload:
    settings = Settings(batch=4, threads=1, deterministic=False)
    return Workload(lambda: nn.Linear(8, 8), Numbers(), scattered_loss, settings)


def half_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Has no number where it is computed in bf16."""
    made = model(batch)
    return made.float().square().mean() * (1.0 if made.dtype == torch.float32 else float("nan"))


def no_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return loss(model, batch) * float("nan")


def lost() -> Workload:
    return Workload(lambda: nn.Linear(8, 8), Numbers(), no_loss, Settings(4, threads=1))


def lost_in_bf16() -> Workload:
    return Workload(lambda: nn.Linear(8, 8), Numbers(), half_loss, Settings(4, threads=1))


def slow_loss(model: nn.Module, batch: Tensor) -> Tensor:
    time.sleep(0.8 / len(batch))
    return loss(model, batch)


def steady() -> Workload:
    """A step takes so long that no busy neighbour hides that twice the batch is four times the speed."""
    return Workload(lambda: nn.Linear(8, 8), Numbers(), slow_loss, Settings(batch=1, threads=1))


class Looping(nn.Module):
    """Makes a tensor for every number it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: Tensor) -> Tensor:
        rows = []
        for row in batch:
            made = torch.stack([torch.tensor(float(value)) for value in row])
            rows.append(self.layer(made))
        return torch.stack(rows)


def looping() -> Workload:
    return Workload(Looping, Numbers(), loss, Settings(batch=4, fused=True, threads=1))


def looping_at_most() -> Workload:
    """The batch is as large as fits."""
    return Workload(Looping, Numbers(), loss, Settings(batch=FITS, fused=True, threads=1))


def too_few() -> Workload:
    return Workload(lambda: nn.Linear(8, 8), Numbers(), loss, Settings(batch=600, threads=1))


def nothing() -> int:
    return 3
