"""Gradients that an optimizer has not stepped with yet.

A loop that steps its optimizer in every fourth step of the run, say, carries gradients from one step to the
next: they are part of its state, and in no `state_dict`. Other loops leave gradients behind that were stepped
with, and clear them before they compute more: those are worth nothing. The first and the last gradient of an
optimizer tell which they are. PyTorch counts the writes to a tensor: where these two are the tensors that
there were when its newest step ended, with no write since, nothing has been added.

A loop that never clears them adds to what it has stepped with. So it does where such a tensor is there, with
no write since, as the next gradient comes to be added: then what was stepped with is part of the state too.

A loop that clears them in place (`zero_grad(set_to_none=False)`) has, in a step that leaves a parameter out,
a gradient of zeros for it, with which an optimizer goes on decaying; one without a gradient it passes over.
Where it steps with one of the two tensors of its step before, or has zeros in all of them as the step ends,
they are kept so: a checkpoint has which there are. Parts of a larger tensor tell nothing by being the same:
those of DDP's buckets come back whichever way a loop clears them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from .checkpoint.tree import laid_out_like
from .parallel import shard_like

_Marks = list[tuple[weakref.ref[torch.Tensor], int]]
"""Gradients, and how often they had been written to."""


class Unspent:
    """Of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._stepped_with: _Marks = []
        self._ended_with: _Marks = []
        """When the newest step of the run had ended."""
        self._carried = self._kept_on = False
        """kept_on: it has stepped with the gradients of its step before, whatever was written to them."""
        self._adds_on = False
        """To what it had stepped with."""
        self._add_to: _Marks | None = None
        """What that would be, stepped with or restored; None once it was looked at."""
        optimizer.register_step_post_hook(self._after_step)
        if not self.in_shards:  # to which FSDP2 adds by itself
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            for parameter in trained[:1] + trained[1:][-1:]:
                look: Any = partial(self._before_adding, weakref.ref(parameter))
                parameter.register_hook(unserializable_hook(look))  # type: ignore[no-untyped-call]

    def _before_adding(self, parameter: weakref.ref[torch.Tensor], _: torch.Tensor) -> None:
        if self._add_to is None:
            return
        add_to, self._add_to, to = self._add_to, None, parameter()
        there = None if to is None else to.grad
        self._adds_on = there is not None and any(
            then() is there and version == there._version for then, version in add_to
        )

    def _after_step(self, *_: object) -> None:
        before, self._stepped_with = self._stepped_with, self._marks()
        pairs = [(then(), now()) for (then, _), (now, _) in zip(before, self._stepped_with, strict=False)]
        same = [then is now and now is not None and not now._is_view() for then, now in pairs]
        self._add_to = self._stepped_with
        self._kept_on = self._kept_on or any(same)  # another one is the last where a head has its first turn

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups  # another list after a load

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(group["params"] for group in self._groups))

    def end_step(self) -> None:
        """A step of the run has ended: gradients that are carried on now are part of the state after it."""
        self._ended_with = self._marks()
        stepped_with = not self._adds_on and self._untouched_since(self._stepped_with)
        self._carried = bool(self._ended_with) and not stepped_with

    def take_back(self) -> bool:
        """A step of the run was left before the optimizer's turn, and is done anew: what it alone has
        computed is cleared. False where it has added to gradients that are carried."""
        if self._untouched_since(self._ended_with):
            return True
        if not self._carried:
            for parameter in self._parameters:
                parameter.grad = None
        return not self._carried

    def _marks(self) -> _Marks:
        return [(weakref.ref(gradient), gradient._version) for gradient in self._ends()]

    def _untouched_since(self, marks: _Marks) -> bool:
        now = [(gradient, gradient._version) for gradient in self._ends()]
        then = [(gradient(), version) for gradient, version in marks]
        return len(now) == len(then) and all(
            a is b and writes == known for (a, writes), (b, known) in zip(now, then, strict=True)
        )

    @property
    def in_shards(self) -> bool:
        return any(hasattr(p, "placements") for p in self._parameters)

    def gradients(self) -> dict[int, Any]:
        """By the number of their parameter, for a checkpoint: of a sparse one its parts. Of what is cleared
        in place, or will be, None, or the parts of a sparse one without values."""
        if not (self._carried or self._kept_on):
            return {}
        found = {number: p.grad for number, p in enumerate(self._parameters) if p.grad is not None}
        # What is in shards would ask the other ranks, which may not ask.
        carried = self._carried and (
            self.in_shards or any(bool(_values(gradient).any()) for gradient in found.values())
        )
        return {number: _kept(one) if carried else _cleared(one) for number, one in found.items()}

    def restore(self, gradients: Mapping[int, Any]) -> None:
        """Go on with what `gradients` gave."""
        parameters = self._parameters
        for number, gradient in gradients.items():
            if gradient is None:
                parameters[number].grad = torch.zeros_like(parameters[number])
                continue
            whole = _from_parts(gradient) if isinstance(gradient, Mapping) else gradient
            mine = laid_out_like(shard_like(whole, parameters[number]), parameters[number])
            parameters[number].grad = mine.to(parameters[number].device)
        cleared = [
            one is None or (isinstance(one, Mapping) and not len(one["values"])) for one in gradients.values()
        ]
        self._carried, self._kept_on = not all(cleared), any(cleared)
        self._ended_with = self._add_to = self._marks()

    def _ends(self) -> list[torch.Tensor]:
        """This rank's memory of the first gradient and of the last, empty where there are none."""
        there = [_first(group["params"] for group in self._groups)]
        there.append(_first(reversed(group["params"]) for group in reversed(self._groups)))
        with torch.no_grad():  # else what is in shards gives another tensor each time
            return [_local(gradient) for gradient in there if gradient is not None]


def _first(groups: Iterable[Iterable[torch.Tensor]]) -> torch.Tensor | None:
    return next((p.grad for p in chain.from_iterable(groups) if p.grad is not None), None)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _kept(gradient: torch.Tensor) -> Any:
    """For a checkpoint. The parts of a sparse one are not coalesced, which adds up in another order."""
    if not gradient.is_sparse:
        return gradient
    return {
        "indices": gradient._indices(),
        "values": gradient._values(),
        "shape": tuple(gradient.shape),
        "coalesced": gradient.is_coalesced(),
    }


def _cleared(gradient: torch.Tensor) -> Any:
    """Likewise, as zeros."""
    return _kept(torch.zeros_like(gradient)) if gradient.is_sparse else None


def _from_parts(kept: Mapping[str, Any]) -> torch.Tensor:
    parts = kept["indices"], kept["values"], kept["shape"]
    return torch.sparse_coo_tensor(*parts, is_coalesced=kept["coalesced"], check_invariants=False)


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "placements") else gradient
    return local
