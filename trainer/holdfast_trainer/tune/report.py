"""What was found, for people and programs: a table, Markdown, JSON, a plot, settings to use."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from .plan import AS_IT_IS, Measured, factors
from .session import Findings
from .settings import Settings

HEADINGS = ("settings", "{unit}/s", "min", "max", "memory", "buys")


def cells(row: Measured, factor: float | None) -> tuple[str, ...]:
    """One line of the table."""
    name = row.candidate.name
    if not row.holds:
        when = f" in round {len(row.speeds) + 1}" if row.speeds else ""
        return (name, f"{row.fault}{when}" or "not measured", "", "", "", "")
    memory = f"{row.memory / 1e6:,.0f} MB"
    bought = "" if factor is None or name == AS_IT_IS else f"{factor:.2f}x"
    return (name, f"{row.speed:,.1f}", f"{min(row.speeds):,.1f}", f"{max(row.speeds):,.1f}", memory, bought)


def _lines(found: Findings) -> list[tuple[str, ...]]:
    bought = factors(found.rows)
    return [cells(row, bought.get(row.candidate.name)) for row in found.rows]


def as_text(found: Findings, unit: str, width: int = 110) -> str:
    """The table, what was chosen, and what there is to say about it."""
    console = Console(file=io.StringIO(), width=width)
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading.format(unit=unit), justify="right" if number else "left")
    for line in _lines(found):
        table.add_row(*line)
    console.print(table, highlight=False)
    console.print("\n" + "\n".join(conclusion(found)), highlight=False)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def conclusion(found: Findings) -> list[str]:
    """In sentences."""
    said = [f"- {note}" for note in found.notes]
    if found.interrupted:
        said.append("- interrupted: this is what was measured until then")
    chosen = found.chosen
    if chosen is not None:
        said.append(f"to use: {chosen.settings.told()}{_gain(found, chosen.settings)}")
    said.append(
        "What an optimisation buys alone is against all off, what one left out costs against all on, "
        "the rest against the settings as they are."
    )
    return said


def gain(found: Findings, settings: Settings) -> float | None:
    """The speed of these settings, over that of today's."""
    speeds = {row.candidate.settings: row.speed for row in reversed(found.rows) if row.speeds}
    today = next((row.speed for row in found.rows if row.candidate.name == AS_IT_IS and row.speeds), None)
    return None if today is None or settings not in speeds else speeds[settings] / today


def _gain(found: Findings, settings: Settings) -> str:
    factor = gain(found, settings)
    return "" if factor is None else f": {factor:.2f} times as fast as it is"


def as_markdown(found: Findings, unit: str) -> str:
    heads = [heading.format(unit=unit) for heading in HEADINGS]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    lines += ["| " + " | ".join(line) + " |" for line in _lines(found)]
    return "\n".join([*lines, "", *conclusion(found), ""])


def as_json(found: Findings, unit: str) -> str:
    chosen = found.chosen
    bought = factors(found.rows)
    body: dict[str, Any] = {
        "unit": f"{unit}/s",
        "rows": [
            {
                "name": row.candidate.name,
                "settings": dataclasses.asdict(row.candidate.settings),
                "median": row.speed if row.speeds else None,
                "min": min(row.speeds, default=None),
                "max": max(row.speeds, default=None),
                "n": len(row.speeds),
                "memory": row.memory or None,
                "fault": row.fault,
                "factor": bought.get(row.candidate.name),
            }
            for row in found.rows
        ],
        "batch_sizes": [dataclasses.asdict(size) for size in found.sizes],
        "workers": found.workers,
        "threads": found.threads,
        "chosen": None if chosen is None else dataclasses.asdict(chosen.settings),
        "gain": None if chosen is None else gain(found, chosen.settings),
        "interrupted": found.interrupted,
        "notes": found.notes,
    }
    return json.dumps(body, indent=2)


def plot(found: Findings, unit: str, path: Path) -> bool:
    """Bars with their spread; false where matplotlib is not installed."""
    rows = [row for row in found.rows if row.holds]
    if not rows:
        return False
    try:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    speeds = [row.speed for row in rows]
    below = [row.speed - min(row.speeds) for row in rows]
    above = [max(row.speeds) - row.speed for row in rows]
    axes.barh([row.candidate.name for row in rows], speeds, xerr=[below, above], color="#4878a8")
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit}/s; median, and the spread of {max(len(row.speeds) for row in rows)} rounds")
    figure.savefig(path, dpi=120)
    return True


def write(found: Findings, unit: str, out: Path, chosen: Mapping[str, Any] | None) -> list[Path]:
    """All files into `out`; `chosen` is the configuration to use, as YAML. Returns what was written."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {"tune.json": as_json(found, unit) + "\n", "tune.md": as_markdown(found, unit)}
    if chosen is not None:
        texts["tuned.yaml"] = yaml.safe_dump(dict(chosen), sort_keys=False)
    written = []
    for name, text in texts.items():
        temporary = out / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out / name)
        written.append(out / name)
    if plot(found, unit, out / "tune.png"):
        written.append(out / "tune.png")
    return written
