"""A nested training state as named tensors plus a JSON skeleton, and back, exactly.

State dicts mix tensors with ints, floats, tuples, dicts with integer keys and numpy arrays (the RNG
of numpy). `pack` takes the tensors out, so that they can be staged and written as raw bytes, and
leaves tagged JSON behind; `unpack` restores the same types. Floats survive: Python's repr is the
shortest text that reads back to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_TAGS = ("$tensor", "$array", "$tuple", "$dict")


class UnsupportedState(TypeError):
    """A value in the state can be saved neither as a tensor nor as JSON."""


def pack(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(skeleton, tensors by dotted path). Tensors are not copied.

    Raises UnsupportedState naming the path of a value of any other type.
    """
    tensors: dict[str, torch.Tensor] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach()
            return {"$tensor": path}
        if isinstance(value, np.ndarray):
            tensors[path] = torch.from_numpy(value)
            return {"$array": path}
        if isinstance(value, Mapping):
            plain = all(isinstance(k, str) for k in value) and not any(tag in value for tag in _TAGS)
            if plain:
                return {k: visit(v, f"{path}.{k}" if path else k) for k, v in value.items()}
            for key in value:
                if not isinstance(key, str | int):
                    raise UnsupportedState(f"{path}: key {key!r} is a {type(key).__name__}, not str or int")
            return {"$dict": [[k, visit(v, f"{path}.{k}")] for k, v in value.items()]}
        if isinstance(value, tuple):
            return {"$tuple": [visit(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [visit(v, f"{path}.{i}") for i, v in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        raise UnsupportedState(
            f"{path}: a {type(value).__name__} cannot be saved; "
            "keep tensors, numbers, strings, lists and dicts"
        )

    return visit(state, ""), tensors


def unpack(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `pack` took apart."""
    if isinstance(skeleton, dict):
        if len(skeleton) == 1:
            tag, body = next(iter(skeleton.items()))
            if tag == "$tensor":
                return tensors[body]
            if tag == "$array":
                return tensors[body].numpy()
            if tag == "$tuple":
                return tuple(unpack(v, tensors) for v in body)
            if tag == "$dict":
                return {k: unpack(v, tensors) for k, v in body}
        return {k: unpack(v, tensors) for k, v in skeleton.items()}
    if isinstance(skeleton, list):
        return [unpack(v, tensors) for v in skeleton]
    return skeleton
