"""Which checkpoints stay: the newest, those of round steps, and the best by validation loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..schema import ConfigError


@dataclass(frozen=True)
class Retention:
    """A checkpoint stays for any one of the reasons. Raises ConfigError for numbers that are none."""

    keep: int = 3
    """Newest ones."""
    every: int = 0
    """Those of each multiple of so many steps; 0: none for that."""
    best: int = 0
    """Those with the lowest validation loss, measured at exactly their step; 0: none for that."""

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("keep_every", self.every), ("keep_best", self.best)):
            if not hasattr(value, "__index__"):
                raise ConfigError(f"{name}={value!r} is no whole number")
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep}: at least 1 checkpoint must be kept, or nothing is durable")
        if self.every < 0:
            raise ConfigError(f"keep_every={self.every}: a number of steps, or 0 to keep no others")
        if self.best < 0:
            raise ConfigError(f"keep_best={self.best}: a number of checkpoints, or 0 to keep none for that")

    def stays(self, steps: Sequence[int], losses: Mapping[int, float]) -> set[int]:
        """Of `steps`, newest first, those that stay. Of equal losses the later step is the better."""
        known = [step for step in steps if math.isfinite(losses.get(step, math.nan))]
        best = sorted(known, key=lambda step: (losses[step], -step))[: self.best]
        round_ones = [step for step in steps if self.every and step % self.every == 0]
        return {*steps[: self.keep], *round_ones, *best}
