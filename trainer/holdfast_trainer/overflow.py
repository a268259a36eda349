"""Steps that a gradient scaler passed over, because gradients in fp16 were not finite.

A few are usual: the scale begins high, and each halves it. Where gradients overflow at every scale no step
changes a weight, and the loss stays finite all the while; so many in a row end the run.

A skipped step shows in the scale, which the scaler lowers then. It is read before the optimizer's turn, when
it is that of the step before, so that the CPU does not wait for what the GPU does now.
"""

from __future__ import annotations

LIMIT = 100
"""Skipped in a row. A scale of 2^16 is 2^-84 by then: what still overflows is no matter of the scale."""


class Overflow:
    """Of one rank."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._scale: float | None = None

    def look(self, scale: float | None, *, stepped: bool) -> bool:
        """Whether a step was skipped since the last look. `scale`: the scaler's, None where there is none at
        work; `stepped`: an optimizer has its turn, and it is not merely that gradients are gathered."""
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
