"""What a script gives the optimizers and schedulers that it makes, such as a learning rate.

A checkpoint has it too, and that counts, as torch loads it with their state: somebody who lowers the rate in
the script alone trains on with the one of before. So it is kept with each checkpoint as it was given, and a
resume to which something else is given says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_NOT_GIVEN = frozenset({"params", "param_names", "initial_lr", "last_epoch"})


def given(parts: Mapping[str, Any]) -> dict[str, Any]:
    """By what a checkpoint keeps it as. To be asked before anything is loaded."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            groups = [_settings(group) for group in part.param_groups]
            for key in dict.fromkeys(key for group in groups for key in group):
                values = [group.get(key) for group in groups]
                found[_told(key, name)] = values[0] if values.count(values[0]) == len(values) else values
        elif isinstance(part, LRScheduler):
            found |= _of_scheduler(name, part.state_dict())
    return found


def _of_scheduler(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """With those that it is made of."""
    found = {_told(key, name): value for key, value in _settings(state).items()}
    for number, inner in enumerate(state.get("_schedulers", ())):
        found |= _of_scheduler(f"{name}, its number {number}", inner)
    return found


def _told(key: str, name: str) -> str:
    return f"{key} given to {name} (a checkpoint's counts)"


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is plain among them, as JSON has it; of a Counter, as milestones are in, what it counts."""
    named = {key: value for key, value in values.items() if not str(key).startswith("_")}
    found = {
        key: sorted(value.elements()) if isinstance(value, Counter) else value for key, value in named.items()
    }
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in found.items()
        if key not in _NOT_GIVEN and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    return value is None or type(value) in (bool, int, str)
