"""The report: the curve in the terminal and as a picture, the ledger as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotext
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from . import proof
from .proof import Evidence, Line

COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a")


def show(evidence: Evidence, figures: dict[str, Any], out: Path, console: Console) -> None:
    """Print the report and write loss.png."""
    console.print()
    print(terminal_plot(evidence, min(console.width, 100)))
    draw(evidence, figures, out / "loss.png")
    console.print(ledger_table(evidence))
    console.print(
        f"{figures['steps']} steps, {figures['lost_steps']} done twice, "
        f"{figures['notice_lost_steps']} of them after a notice; goodput {figures['goodput']:.1%}; "
        f"recovery {', '.join(f'{s:.1f} s' for s in figures['recovery_seconds'])}"
    )
    console.print(
        f"{figures['tokens_per_second']:,.0f} tokens/s, waiting for data {figures['data_wait_fraction']:.2%} "
        "of the time"
    )
    parts = proof.startup(evidence)
    total = parts.pop("total")
    console.print(
        f"submit to first step {total:.1f} s: " + ", ".join(f"{name} {s:.1f}" for name, s in parts.items())
    )


def by_attempt(steps: list[Line]) -> dict[int, tuple[list[int], list[float]]]:
    """(steps, losses) of each attempt."""
    curves: dict[int, tuple[list[int], list[float]]] = {}
    for line in steps:
        if "loss" in line:
            xs, ys = curves.setdefault(line["attempt"], ([], []))
            xs.append(line["step"])
            ys.append(line["loss"])
    return curves


def terminal_plot(evidence: Evidence, width: int) -> str:
    """The loss of each attempt as text."""
    plotext.clear_figure()
    plotext.plotsize(width, 18)
    plotext.theme("clear")
    for (attempt, (xs, ys)), marker in zip(by_attempt(evidence.steps).items(), "123456789", strict=False):
        plotext.plot(xs, ys, marker=marker, label=f"attempt {attempt}")
    plotext.title("training loss by step; overlapping digits: steps that were done again")
    return str(plotext.uncolorize(plotext.build()))


def draw(evidence: Evidence, figures: dict[str, Any], path: Path) -> None:
    """The same as a picture, over the twin."""
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for xs, ys in by_attempt(evidence.twin_steps).values():
        axes.plot(xs, ys, color="0.75", linewidth=7, solid_capstyle="round", label="untouched twin")
    for (attempt, (xs, ys)), colour in zip(by_attempt(evidence.steps).items(), COLOURS, strict=False):
        axes.plot(xs, ys, color=colour, linewidth=1.6, label=f"attempt {attempt}")
    for account in evidence.ledger["attempts"][:-1]:
        axes.axvline(account["lastStep"], color="0.4", linewidth=0.8, linestyle=":")
        how = "notice" if account["outcome"] == "interrupted" else "killed"
        axes.annotate(
            f"{how}, {account['lostSteps']} steps lost", (account["lastStep"], axes.get_ylim()[1]),
            xytext=(-4, -4), textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats a token)")
    axes.set_title(
        f"A run preempted {figures['disruptions']} times, and the same run left alone: {figures['proof']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def ledger_table(evidence: Evidence) -> Table:
    table = Table(title="ledger", title_justify="left", box=None, pad_edge=False)
    for name in ("attempt", "verdict", "resumed at", "last step", "durable", "lost", "recovery"):
        table.add_column(name, justify="left" if name == "verdict" else "right")
    for a in evidence.ledger["attempts"]:
        recovery = a["recoverySeconds"]
        cells = (
            a["attempt"],
            a["verdict"],
            a["resumedStep"],
            a["lastStep"],
            a["durableStep"],
            a["lostSteps"],
        )
        table.add_row(*(str(cell) for cell in cells), "-" if recovery is None else f"{recovery:.1f} s")
    return table
