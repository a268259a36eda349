"""Steps that a gradient scaler passed over, because gradients in fp16 were not finite.

A few are usual: the scale begins high, and each halves it. Where gradients overflow at every scale no step
changes a weight, and the loss stays finite all the while; so many in a row end the run.

A skipped step shows in the scale, which the scaler lowers then. It is looked at before the optimizer's turn,
when it is that of the step before; a GPU's is read at the next look, so that the CPU does not wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

from .late import Late

LIMIT = 100
"""Skipped in a row. A scale of 2^16 is 2^-84 by then: what still overflows is no matter of the scale."""


class _Look(NamedTuple):
    scale: Late
    stepped: bool


class Overflow:
    """Of one rank."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._scale: float | None = None
        self._coming: _Look | None = None
        """Of which the scale is on its way."""

    def look(self, scale: Late | None, *, stepped: bool) -> bool:
        """Whether it is known now that a step was skipped. `scale`: the scaler's, None where there is none at
        work; `stepped`: an optimizer has its turn, and it is not merely that gradients are gathered."""
        if scale is None or not scale.late:
            return self._compare(None if scale is None else scale.read(), stepped=stepped)
        before, self._coming = self._coming, _Look(scale, stepped)
        return before is not None and self._compare(before.scale.read(), stepped=before.stepped)

    def _compare(self, scale: float | None, *, stepped: bool) -> bool:
        skipped = scale is not None and self._scale is not None and scale < self._scale
        self._scale = scale
        if skipped:
            self.in_a_row += 1
        elif stepped:
            self.in_a_row = 0
        return skipped

    @property
    def for_good(self) -> bool:
        return self.in_a_row >= LIMIT
