"""How attempts came up, and where: the second table of `holdfast ledger`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from . import formats
from .tables import Column

STAGES = {
    "detectSeconds": "DETECT",
    "tearDownSeconds": "TEAR DOWN",
    "waitSeconds": "WAIT",
    "scheduleSeconds": "SCHEDULE",
    "startSeconds": "START",
    "importSeconds": "IMPORT",
    "rendezvousSeconds": "RENDEZVOUS",
    "buildSeconds": "BUILD",
    "loadSeconds": "LOAD",
    "firstStepSeconds": "FIRST STEP",
}


def start_columns(attempts: Sequence[Mapping[str, Any]]) -> list[Column]:
    """One row an attempt: what the time up to its first step went into, its nodes, its cost."""
    columns = [Column("ATTEMPT", 0, True), Column("RECOVERY", 0, True)]
    columns += [Column(title, 3, True) for title in STAGES.values()]
    columns += [Column("CAPACITY", 1), Column("NODES", 4), Column("COST", 2, True)]
    for attempt in attempts:
        stages, where = attempt["breakdown"] or {}, attempt["whereabouts"] or {}
        cells = [str(attempt["attempt"]), formats.duration(attempt["recoverySeconds"])]
        cells += [_seconds(stages.get(stage)) for stage in STAGES]
        cells += [capacity(where), ", ".join(where.get("nodes", [])) or formats.UNKNOWN]
        cells.append(formats.money(attempt["cost"], where.get("currency")))
        for column, cell in zip(columns, cells, strict=True):
            column.cells.append(Text(cell))
    return columns


def capacity(where: Mapping[str, Any]) -> str:
    """`Spot`, or `3 Spot, 1 OnDemand` where the replicas' nodes differ."""
    kinds: Mapping[str, int] = where.get("capacity", {})
    if len(kinds) < 2:
        return next(iter(kinds), formats.UNKNOWN)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items())


def _seconds(value: float | None) -> str:
    """To the hundredth below ten: most stages are short."""
    return f"{value:.2f}s" if value is not None and value < 10 else formats.duration(value)
