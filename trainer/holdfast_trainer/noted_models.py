"""Whether models hold what the newest step ended with, or something else, as an average for a validation.

Told by a few values of the first and the last parameter of each optimizer, which are noted as each step ends.
What is cut over the ranks (FSDP2) is told by each rank's own shards: another parameter stands in a shard's
place while it is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn


class NotedModels:
    """Of one rank."""

    def __init__(self, models: Collection[nn.Module]) -> None:
        self._models, self._known = models, _parameters(models)
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters, and some of their values as the newest step ended with them."""

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """A loop begins with the models as they are."""
        ends = (p for optimizer in optimizers for p in _ends(optimizer))
        self._noted = [(p, _some(p)) for p in ends if id(p) in self._known]

    def note(self) -> None:
        """The models are as a step has ended with them."""
        self._noted = [(parameter, _some(parameter)) for parameter, _ in self._noted]

    @property
    def changed(self) -> bool:
        """Whether they are not as they were noted: their values, or the parameters themselves."""
        there = _parameters(self._models)
        return any(
            (id(p) not in there and not _in_shards(p)) or not _same_bits(_some(p), values)
            for p, values in self._noted
        )


def _parameters(models: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}


def _ends(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The first and the last of its parameters that are trained and of which this rank has any."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    trained = [p for p in parameters if p.requires_grad and _local(p).numel()]
    return [trained[0], trained[-1]] if trained else []


def _some(parameter: torch.Tensor) -> torch.Tensor:
    """Its first values, in memory of their own; on a GPU nobody waits for them."""
    row = _local(parameter)
    while row.dim() > 1:
        row = row[0]
    return row.reshape(-1)[:64].clone()


def _in_shards(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "placements")


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's memory of it."""
    local: Any = parameter.detach()
    return local.to_local() if _in_shards(local) else local  # type: ignore[no-any-return]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    return alike and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
