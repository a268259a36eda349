"""In which order an optimizer has its parameters: its state tells them apart by their numbers alone.

A loop that puts them into groups by way of a set has them in another order in each process. What was saved of
one would then go to another of the same shape, without a word. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

Order = list[list[str]]
"""The names of an optimizer's parameters, by group; empty for one that no model has."""


def order_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Order:
    """`names` has the models' parameters by their id."""
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def told(order: Order) -> str:
    """Short, for ranks to compare."""
    return hashlib.sha256(json.dumps(order).encode()).hexdigest()[:12]


def regrouped(had: Order | None, has: Order) -> str:
    """In words, a parameter that is in another group than it was; empty where names tell of none."""
    for number, (were, are) in enumerate(zip(had or [], has, strict=False)):
        if others := sorted(set(are) - set(were)) if _tell(had, has) else []:
            return f"its group {number} has {others[0]} now, which was in another one"
    return ""


def moved(had: Order | None, has: Order) -> list[int]:
    """The numbers that the parameters had, in the order in which they are now. Where names do not tell, as in
    a checkpoint of an earlier Holdfast's, they are as they were."""
    names = list(chain.from_iterable(has))
    if had is None or not _tell(had, has):
        return list(range(len(names)))
    numbers = {name: number for number, name in enumerate(chain.from_iterable(had))}
    return [numbers[name] for name in names]


def _tell(had: Order | None, has: Order) -> bool:
    before, now = list(chain.from_iterable(had or [])), list(chain.from_iterable(has))
    return "" not in now and len(set(now)) == len(now) and sorted(before) == sorted(now)


def in_order(state: dict[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """An optimizer's saved `state` for one whose parameters had these numbers."""
    known = list(chain.from_iterable(group["params"] for group in state["param_groups"]))
    turn = iter([known[number] for number in numbers])
    groups = [{**group, "params": [next(turn) for _ in group["params"]]} for group in state["param_groups"]]
    for group in groups:
        group.pop("param_names", None)  # torch's own, in the order of then: it has them as they are now
    return {**state, "param_groups": groups}
