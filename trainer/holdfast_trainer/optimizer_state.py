"""How an optimizer gets back the state that was saved of it."""

from __future__ import annotations

from typing import Any

import torch

from .checkpoint.tree import laid_out_like, side_by_side
from .parallel import shard_like
from .parameter_order import Order, in_order, moved, regrouped


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], had: Order | None, has: Order, changed: set[int]
) -> str:
    """Empty where it is loaded, else why it is another optimizer's state: that lacks what this one needs, and
    has what this one does not know. What a version of itself before did not save it has filled in by itself.

    `had`, `has`: the order of its parameters then, where that is known, and now; `changed`: the ids of those
    that have another type now.
    """
    if misfit := _other_groups(optimizer, state) or regrouped(had, has):
        return misfit
    numbers = moved(had, has)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    of = dict(zip(numbers, parameters, strict=True))
    placed = {
        number: _beside(of[number], kept) if number in of else kept  # what it keeps for none of them alone
        for number, kept in state["state"].items()
    }
    state = in_order(state, numbers)
    groups = list(optimizer.param_groups)
    lacking: set[str] = set()
    try:
        optimizer.load_state_dict({**state, "state": placed})
    except KeyError as error:
        lacking = {str(error.args[0])}
    for number, parameter in of.items():
        if number in placed and parameter in optimizer.state and id(parameter) not in changed:
            live = optimizer.state[parameter]
            optimizer.state[parameter] = _of_types(live, placed[number], parameter.dtype)
    known = getattr(optimizer, "defaults", {}).keys()
    for group in optimizer.param_groups:
        if not group.keys() <= {"params", "initial_lr", *known}:
            lacking |= known - group.keys()
    if not lacking:
        _go_on_with(groups, optimizer)
    needs = ", ".join(sorted(lacking))
    return f"a {type(optimizer).__name__} needs {needs}, which was not saved" if needs else ""


def _beside(parameter: torch.Tensor, kept: Any) -> Any:
    """What is kept for a parameter, mostly a dict, cut over the ranks and laid out as it is."""
    return side_by_side(kept, None, lambda one, _: laid_out_like(shard_like(one, parameter), parameter))


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """One that a part of the script's own has loaded: what it keeps lies as its parameters do."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter in optimizer.state:
            optimizer.state[parameter] = _beside(parameter, optimizer.state[parameter])


@torch.no_grad()
def _go_on_with(groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """`groups`, which it had before it was loaded, with what is loaded: torch makes others, and a script that
    took a group, or a rate that is a tensor, from it before would set the rate of nothing."""
    for before, loaded in zip(groups, optimizer.param_groups, strict=True):
        for key, value in loaded.items():
            was = before.get(key)
            if isinstance(value, torch.Tensor) and isinstance(was, torch.Tensor):
                loaded[key] = was.copy_(value)
        if before is not loaded:
            before.clear()
            before.update(loaded)
    optimizer.param_groups[:] = groups  # the list may be an inner optimizer's too by now


def _of_types(live: Any, saved: Any, given: torch.dtype) -> Any:
    """What is kept for a parameter, of the types that it was saved with: as it is loaded torch makes all of
    it the parameter's, `given`. A moment in float32 of weights in bfloat16 would be rounded, and a mask would
    be no mask any more."""

    def as_saved(now: Any, then: Any) -> Any:
        both = isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor)
        return then.to(now.device) if both and then.dtype != now.dtype == given else now

    return side_by_side(live, saved, as_saved)


def _other_groups(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> str:
    """How the parameters that it has differ from those it had, in words; empty where they do not."""
    had, has = (
        [len(group["params"]) for group in groups]
        for groups in (saved["param_groups"], optimizer.param_groups)
    )
    if had == has:
        return ""
    hint = ""
    if had[: len(has)] == has:
        hint = " (what a loop gives it later is to be there before run.track, frozen)"
    elif has[: len(had)] == had:
        hint = " (what a loop took from it is to stay there, frozen)"
    return f"its groups had {had} parameters, and have {has} now{hint}"
