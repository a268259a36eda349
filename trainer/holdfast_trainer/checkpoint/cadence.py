"""When to save next: every N steps, every N seconds, or as often as it pays.

`auto` is Young's interval, sqrt(2 * cost * mean time between interruptions) (J. W. Young, "A first
order approximation to the optimum checkpoint interval", CACM 17(9), 1974): saving oftener costs more
than the work it protects, saving more seldom risks more than it saves. The cost is what a save puts the
training off, not what it takes until it is durable: nearly all of that goes by beside the steps.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schema import ConfigError

SPOT_MTBI_SECONDS = 2 * 3600.0
"""Assumed mean time between interruptions before any was seen: an unkind spot pool."""
SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 15 * 60.0
WINDOW = 20
"""Steps that tell what one takes while nothing is saved."""
SOONEST_AGAIN_SECONDS, LATEST_AGAIN_SECONDS = 5.0, 5 * 60.0
"""From a save that has failed to the next try, at first and in the end."""


@dataclass(frozen=True)
class Cadence:
    """At most one of `steps` and `seconds` is set; neither means auto."""

    steps: int | None = None
    seconds: float | None = None
    besides: tuple[int, ...] = ()
    """Steps of which every multiple is due too, whatever else is."""

    @classmethod
    def parse(cls, text: str | int) -> Cadence:
        """`auto`, `500` (steps), `90s`. Raises ConfigError naming the text."""
        value = str(text)
        if value == "auto":
            return cls()
        if match := re.fullmatch(r"([1-9]\d{0,17})(s?)", value):
            number = int(match[1])
            return cls(seconds=float(number)) if match[2] else cls(steps=number)
        raise ConfigError(
            f"checkpoint.every {value!r} is none of: auto, a number of steps (500), seconds (90s)"
        )

    def due_at_step(self, step: int) -> bool:
        """Every rank can tell by itself; `step` is the number of steps done."""
        return any(step % every == 0 for every in (self.steps, *self.besides) if every)

    def due_after(
        self, seconds: float, cost: float | None, mtbi: float = SPOT_MTBI_SECONDS, durable: float = 0.0
    ) -> bool:
        """Rank 0 decides for all: `seconds` since the last save began, `cost` of a save in seconds, which is
        `durable` seconds under way."""
        if self.steps is not None:
            return False
        return seconds >= (self.seconds or young_interval(cost, mtbi, durable))


def young_interval(cost: float | None, mtbi: float, durable: float = 0.0) -> float:
    """Seconds between saves, within bounds, and no less than one is under way, as there is one at a time; the
    shortest until a first save was measured."""
    if cost is None:
        return SHORTEST_SECONDS
    return min(LONGEST_SECONDS, max(SHORTEST_SECONDS, durable, math.sqrt(2 * cost * mtbi)))


class Toll:
    """What a save costs the training, from the seconds of its steps, end to end."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=WINDOW)
        """Of steps in which nothing was saved."""
        self._beside: list[float] = []
        """Of those that the newest save was under way in."""

    def begin(self) -> None:
        """A save begins."""
        self._beside.clear()

    def step(self, seconds: float, *, saving: bool) -> None:
        """A step took so long; `saving`: a save was under way in it, be it for a part."""
        (self._beside if saving else self._alone).append(seconds)

    def of(self, stall: float, durable: float) -> float:
        """Of the newest save, see `cost_of`."""
        return cost_of(stall, durable, self._alone, self._beside)


def cost_of(stall: float, durable: float, alone: Sequence[float], beside: Sequence[float]) -> float:
    """Seconds that a save put the training off: what the steps `beside` it took longer than those `alone` do.

    At least the `stall`, which was measured by itself, and at most what it took to be `durable`, as where the
    training stands still; that where steps tell nothing.
    """
    if not alone or not beside:
        return max(stall, durable)
    slower = sum(beside) - len(beside) * statistics.median(alone)
    return max(stall, min(slower, durable))


def again_after(failures: int) -> float:
    """Seconds from the last of `failures` failed saves in a row until another is due, whatever the cadence.

    All work since the newest checkpoint is at risk meanwhile; what was in the way may be gone soon.
    """
    return float(min(LATEST_AGAIN_SECONDS, SOONEST_AGAIN_SECONDS * 2 ** min(failures - 1, 10)))


def time_between_interruptions(ledgers: Iterable[Sequence[Mapping[str, Any]]]) -> float:
    """Mean seconds between interruptions, from the ledgers of the attempts so far, ended ones alone.

    What was assumed before any was seen counts as one interruption in `SPOT_MTBI_SECONDS` (the mean of
    a gamma prior with that much weight), so that one early kill does not make every step be saved.
    """
    seconds, interruptions = SPOT_MTBI_SECONDS, 1
    for lines in ledgers:
        times = [line["time"] for line in lines if isinstance(line.get("time"), int | float)]
        if times:
            seconds += max(0.0, max(times) - min(times))
            stops = [line for line in lines if line.get("event") == "stop"]
            interruptions += not stops or stops[-1].get("outcome") == "interrupted"
    return seconds / interruptions


def does_not_fit(save_seconds: float, notice_seconds: float) -> str | None:
    """What to tell where a save takes longer than a notice leaves for it; None where it fits."""
    if save_seconds <= notice_seconds:
        return None
    return (
        f"a checkpoint takes {save_seconds:.1f} s until it is durable and a notice leaves "
        f"{notice_seconds:.1f} s: a stop on notice would lose the steps since the newest checkpoint. "
        "A longer grace period, faster storage or more ranks, which share the writing, would help; "
        "saving more often makes it lose less"
    )
