"""How a family of models is laid out where Hugging Face stores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Pair = tuple[str, str, bool]
"""(our tensor's name, theirs without the prefix, whether it is transposed there)."""


class Stated(NamedTuple):
    """What a config.json says of something, what the model has, and how the model is made to fit."""

    name: str
    theirs: Any
    """None: it says nothing."""
    ours: tuple[Any, ...]
    remedy: str = "this model computes no other"
    unsaid: Any = None
    """What Hugging Face takes where it says nothing; None: the model's will do."""

    def fault(self) -> list[str]:
        theirs = self.unsaid if self.theirs is None else self.theirs
        if theirs is None or theirs in self.ours:
            return []
        says = f"says no {self.name}, which is then" if self.theirs is None else f"has {self.name}"
        return [f"its config.json {says} {theirs}, the model {self.ours[0]}: {self.remedy}"]


@dataclass(frozen=True)
class Layout:
    """Names, and what to say where they do not go together."""

    prefix: str
    """That their names may carry."""
    pairs: tuple[Pair, ...]
    beyond: str
    """How the name of a layer begins that the model has not."""
    buffers: tuple[str, ...]
    """How names end of what is worked out and no weight."""
    tied: tuple[str, str] | None
    """Their names of the token embedding and of the output layer, where the model has one for both."""
    missing: str
    """Said of a name that is not there."""
    unwanted: str
    """Said of a tensor that the model has not, where it is not zero."""
    settings: Mapping[str, str]
    """Which setting decides the rows, or the columns of `down`, by the end of our name; the rest of a shape
    is model.width's."""
    shape: Mapping[str, Any]
    """Their config.json."""
    unlike: Callable[[Mapping[str, Any]], list[str]]
    """What their config.json says that this model does not compute, in words."""
    filled: frozenset[str] = field(default=frozenset())
    """Our names that the model has not and that are written as zeros."""
    longer: frozenset[str] = field(default=frozenset())
    """Our names of which the first rows of a longer one will do."""

    def remedy(self, ours: str, have: list[int], want: list[int]) -> str:
        """Which settings make a tensor of the model's, of the shape `want`, one of the shape `have`."""
        named = next((name for end, name in self.settings.items() if ours.endswith(end)), None)
        if named is None or len(have) != 2 or len(want) != 2:
            return "set model.width to fit"
        by = 1 if ours.endswith("down.weight") else 0
        apart = [name for at, name in ((by, named), (1 - by, "model.width")) if have[at] != want[at]]
        return f"set {' and '.join(apart)} to fit"
