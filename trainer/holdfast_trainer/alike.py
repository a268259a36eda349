"""What must be the same on every rank, compared before the first step, or before the first save.

Ranks that differ in a setting or in their data do not fail: they train something that nobody asked for,
or wait for each other for ever. So each tells what it has, by name, and all see the same answer. So it is
with what batches follow from, between one attempt and the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .parallel import Gang
from .schema import ConfigError


class RanksDiffer(ConfigError):
    """Ranks of one gang were started with something different."""


def require_alike(gang: Gang, values: Mapping[str, object]) -> None:
    """Collective. Raises RanksDiffer on every rank, naming each value that differs and who has it."""
    shown = {name: str(value) for name, value in values.items()}
    if faults := differing(gang.gather(shown)):
        raise RanksDiffer(faults)


def require_same_models(gang: Gang, samples: Mapping[str, bytes], where: object) -> None:
    """Of what a checkpoint has once for all ranks, `samples` are by name. Collective. Raises RanksDiffer.

    `where` is what they were computed with: ranks of which that is not the same drift apart by roundings.
    """
    told = gang.gather((samples, where))
    first, there = told[0]
    apart = [name for name in first if any(theirs[name] != first[name] for theirs, _ in told)]
    if apart and all(elsewhere == there for _, elsewhere in told):
        raise RanksDiffer(
            f"the parameters of {', '.join(apart)} are not the same on all ranks, and a "
            "checkpoint has them once: put the model under DDP (`model = run.wrap(model)`), and change "
            "parameters, averages of them too, on all ranks alike"
        )


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


def _ranks(values: Sequence[str], value: str) -> str:
    numbers = [str(rank) for rank, found in enumerate(values) if found == value]
    if len(numbers) > 4:
        numbers = [*numbers[:3], f"{len(numbers) - 3} more"]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
