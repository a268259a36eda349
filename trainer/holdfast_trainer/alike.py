"""What must be the same on every rank, compared before the first step, or before a save.

Ranks that differ in a setting or in their data do not fail: they train something that nobody asked for,
or wait for each other for ever. So each tells what it has, by name, and all see the same answer. So it is
with what batches follow from, between one attempt and the next.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .faults import strayed
from .parallel import Gang
from .schema import ConfigError

APART = 0.01
"""How far a rank's parameters may be from rank 0's, as a share of their size, while one model is trained.

Roundings, of kernels that do not repeat their bits, come to less; what goes on from more is another model.
"""

TOLD_LENGTH = 400
"""Characters of what ranks have by one name."""


class RanksDiffer(ConfigError):
    """Ranks of one gang were started with something different."""


def require_alike(gang: Gang, values: Mapping[str, object]) -> None:
    """Collective. Raises RanksDiffer on every rank, naming each value that differs and who has it."""
    shown = {name: str(value) for name, value in values.items()}
    if faults := differing(gang.gather(shown)):
        raise RanksDiffer(faults)


class SameModels:
    """Of one attempt: whether what a checkpoint has once for all ranks is the same on all of them."""

    def __init__(self, gang: Gang, where: object, rounded: Callable[[str, str], None]) -> None:
        """`where` is what models are computed with: ranks of which that is not the same drift apart by
        roundings, and are not compared. `rounded` is told by rank 0, once, what is apart by roundings and why
        that matters."""
        self._gang, self._where, self._rounded = gang, where, rounded
        self._same_at: int | None = None
        self._told = False

    def require(self, step: int, samples: Mapping[str, np.ndarray], durable_step: Callable[[], int]) -> None:
        """To be asked before the state after `step` steps is saved. Collective.

        `samples` has elements of the parameters by the name of each model, float64 of shape [elements].
        `durable_step` is asked where these have come apart.

        Raises RanksDiffer where models were never the same, Strayed where one has since become another.
        """
        told = self._gang.gather((samples, self._where))
        first, there = told[0]
        if any(elsewhere != there for _, elsewhere in told):
            return
        away = [{name: _away(theirs[name], first[name]) for name in first} for theirs, _ in told]
        names = ", ".join(name for name in first if any(of_rank[name] for of_rank in away))
        if not names:
            self._same_at = step
            return
        if self._same_at is None:
            raise RanksDiffer(
                f"the parameters of {names} are not the same on all ranks, and a "
                "checkpoint has them once: put the model under DDP (`model = run.wrap(model)`), and change "
                "parameters, averages of them too, on all ranks alike"
            )
        worst = [max(of_rank.values()) for of_rank in away]
        furthest = worst.index(max(worst))
        ranks = _numbered([rank for rank, found in enumerate(worst) if found])
        if worst[furthest] > APART:
            raise strayed(step, names, ranks, furthest, worst[furthest], self._same_at, durable_step())
        if not self._told and self._gang.rank == 0:
            self._told = True
            self._rounded(
                f"parameters of {names} that are not the same on {ranks}",
                f"were the same to the bit at step {self._same_at}, and at step {step} are up to "
                f"{worst[furthest]:.1g} of their size away from rank 0's. A checkpoint has them once, each "
                "from one of the ranks",
            )


def _away(theirs: np.ndarray, first: np.ndarray) -> float:
    """How far elements are from rank 0's, as a share of their size; 0 where all have the same bits."""
    if theirs.tobytes() == first.tobytes():
        return 0.0
    with np.errstate(all="ignore"):
        share = float(np.linalg.norm(theirs - first) / np.linalg.norm(first))
    return share if share >= 0 else float("inf")


_announced: dict[str, str] = {}


def announce(name: str, value: str) -> None:
    """What this process has of something that ranks share out by number: compared before the first step.

    For parts that do not know the gang. A second one of a name is compared with the second one of others.
    """
    _add(_announced, name, value)


def announced() -> Mapping[str, str]:
    """All of it, to be compared."""
    return dict(_announced)


_depended_on: dict[str, str] = {}


def depend_on(name: str, value: str) -> None:
    """What this process's batches follow from, besides the step: kept with each checkpoint, and an attempt
    that goes on with something else says so. A second one of a name is compared with the second one then."""
    _add(_depended_on, name, value)


def depended_on() -> Mapping[str, str]:
    """All of it."""
    return dict(_depended_on)


def _add(values: dict[str, str], name: str, value: str) -> None:
    number = 2
    key = name
    while key in values:
        key, number = f"{name} ({number})", number + 1
    values[key] = value


def differing(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name whose value is not the same on all ranks; `ranks` has them by rank."""
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    lines = []
    for name in names:
        values = [rank.get(name, "nothing") for rank in ranks]
        counts = Counter(values)
        if len(counts) == 1:
            continue
        said = ", ".join(f"{value!r:.60} on {_ranks(values, value)}" for value in counts)
        lines.append(f"{name} differs among the ranks: {said}; start all of them with the same")
    return lines


def together(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What rank 0 has, and where others have another word or number by a name the values of all. Pure.

    `ranks` has them by rank. Where ranks' values are many, their digest stands for most of them.
    """
    found: dict[str, Any] = {}
    for name, value in ranks[0].items():
        values = [str(rank.get(name, value)) for rank in ranks]
        told = ", ".join(f"{one} on {_ranks(values, one)}" for one in dict.fromkeys(values))
        if len(told) > TOLD_LENGTH:
            told = f"{told[:TOLD_LENGTH]}... ({hashlib.sha256(repr(values).encode()).hexdigest()[:8]})"
        found[name] = value if len(set(values)) == 1 or isinstance(value, Mapping) else told
    return found


def _ranks(values: Sequence[str], value: str) -> str:
    return _numbered([rank for rank, found in enumerate(values) if found == value])


def _numbered(ranks: Sequence[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) > 4:
        numbers = [*numbers[:3], f"{len(numbers) - 3} more"]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
