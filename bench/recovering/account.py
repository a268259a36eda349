"""What a run cost, worked out from what its rank 0 told and when it was hit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Hit:
    """A replica was taken at `time`, seconds since the epoch."""

    time: float
    notice: bool


@dataclass(frozen=True)
class Recovery:
    """From the last step before a loss to the end of the next step that anybody did."""

    seconds: float
    until_process: float
    """Of these, those before the process was born that did it: ending, scheduling, containers."""


@dataclass(frozen=True)
class Account:
    """Of one run."""

    wall: float
    """Seconds from submission to the last step."""
    step: float
    """Usual seconds of a step."""
    recoveries: tuple[Recovery, ...]
    lost_with_notice: int
    lost_without: int
    """Steps that were done again."""


def account(lines: Sequence[Line], hits: Sequence[Hit], submitted: float) -> Account:
    """`lines` in the order in which they were written; the run has done all its steps."""
    steps = [line for line in lines if line["event"] == "step"]
    gaps: list[float] = []
    recoveries: list[Recovery] = []
    lost = {True: 0, False: 0}
    farthest = 0
    before: float | None = None
    began = submitted
    """When the attempt before this start began to train."""
    born: float | None = None
    """Of the process that has started since the last step."""
    for line in lines:
        if line["event"] == "start":
            again = farthest - line["step"]
            if again > 0:
                lost[_cause(hits, began, line["time"])] += again
                farthest = line["step"]
            born, began = line["born"], line["time"]
            continue
        if before is not None and born is not None:
            recoveries.append(Recovery(line["time"] - before, max(0.0, born - before)))
        elif before is not None:
            gaps.append(line["time"] - before)
        before, born, farthest = line["time"], None, max(farthest, line["step"])
    return Account(
        wall=steps[-1]["time"] - submitted,
        step=median(gaps),
        recoveries=tuple(recoveries),
        lost_with_notice=lost[True],
        lost_without=lost[False],
    )


def _cause(hits: Sequence[Hit], began: float, started: float) -> bool:
    """Whether what began at `began` was ended by a hit with notice; a start that nobody caused had none.

    The first hit ends it: others before the next start meet pods that have not trained.
    """
    before = [hit for hit in hits if hit.time < started]
    first = [hit for hit in before if hit.time > began][:1] or before[-1:]
    return bool(first) and first[0].notice


def bound(steps: int, step: float, floor: float, hits: int) -> float:
    """The least wall time: every step done once, and a start at its floor for the first and every hit."""
    return steps * step + (hits + 1) * floor


def first_useful(lines: Sequence[Line]) -> float:
    """Seconds from the birth of rank 0's process to the end of its first step."""
    for start, step in pairwise(lines):
        if start["event"] == "start" and step["event"] == "step":
            return float(step["time"] - start["born"])
    raise ValueError("no start is followed by a step")
