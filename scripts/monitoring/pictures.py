"""A dashboard as a picture: the panels' own queries, drawn where Grafana would put them.

For people without a Grafana at hand, and for documents. What has no data says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, MultipleLocator

from .live import Prometheus, Series
from .panels import COLUMNS, Panel

UNIT_INCHES = 0.36
"""Height of one of Grafana's rows; a column is as wide as the width asks for."""
WIDTH_INCHES = 15.0
POINTS = 240
"""On every graph, as many as Grafana takes or fewer."""
_STYLE: Any = {
    "font.size": 7.0,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
_MARKS = {"blue": "#3274d9", "orange": "#ff780a", "red": "#e02f44"}


def draw(dashboard: Panel, prometheus: Prometheus, begin: float, end: float, path: Path) -> None:
    """Write the dashboard, as it was between two moments, to a PNG file."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    rows += 2  # the title, and the lowest legends
    with mpl.rc_context(_STYLE):
        picture = Figure(figsize=(WIDTH_INCHES, rows * UNIT_INCHES), dpi=72, layout=None)
        picture.text(0.008, 1 - 0.6 / rows, dashboard["title"], fontsize=12, weight="bold", va="center")
        marks = _marks(dashboard, prometheus, begin, end)
        for panel in dashboard["panels"]:
            axes = picture.add_axes(_place(panel, rows))
            axes.set_title(panel["title"])
            if panel["type"] == "timeseries":
                _graph(axes, panel, prometheus, begin, end)
                for moment, color in marks:
                    axes.axvline(moment, color=color, linewidth=0.8, linestyle=":")
            elif panel["type"] == "stat":
                _figure(axes, panel, prometheus)
            else:
                _table(axes, panel, prometheus)
        picture.savefig(path, pil_kwargs={"optimize": True})


def _place(panel: Panel, rows: int) -> tuple[float, float, float, float]:
    """Left, bottom, width, height as shares of the picture, with room for titles and ticks."""
    at = panel["gridPos"]
    plain = panel["type"] != "timeseries"
    left, below, above = (0.2, 0.2, 1.2) if plain else (1.0, 1.6, 1.3)
    return (
        (at["x"] + left) / COLUMNS,
        1 - (at["y"] + 1 + at["h"] - below) / rows,
        (at["w"] - left - 0.3) / COLUMNS,
        (at["h"] - below - above) / rows,
    )


def _marks(dashboard: Panel, prometheus: Prometheus, begin: float, end: float) -> list[tuple[float, str]]:
    """The first moment of each stretch in which a mark's query has a value."""
    found = []
    step = (end - begin) / POINTS
    for mark in dashboard["annotations"]["list"]:
        for series in prometheus.over(mark["expr"], begin, end, step):
            before = -math.inf
            for moment, _ in series.points:
                if moment - before > 1.5 * step:
                    found.append((_minutes(moment, end), _MARKS[mark["iconColor"]]))
                before = moment
    return found


def _graph(axes: Axes, panel: Panel, prometheus: Prometheus, begin: float, end: float) -> None:
    step = (end - begin) / POINTS
    defaults = panel["fieldConfig"]["defaults"]
    lines = [
        (one, one.called(target["legendFormat"]))
        for target in panel["targets"]
        for one in prometheus.over(target["expr"], begin, end, step)
    ]
    if "stacking" in defaults["custom"]:
        _stack(axes, lines, step, end)
    else:
        for series, name in lines:
            moments, values = _gapped(series, step, end)
            axes.plot(moments, values, linewidth=1, label=name, clip_on=False, zorder=3)
    axes.set_xlim(_minutes(begin, end), 0.0)
    if not any(value for series, _ in lines for _, value in series.points):
        axes.set_ylim(top=1.0)  # all zero: a scale of noughts says nothing
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    goal = defaults.get("thresholds", {}).get("steps", [{}])[-1].get("value")
    if goal is not None:
        axes.axhline(goal, color=_MARKS["red"], linewidth=0.8, linestyle="--")
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.1 * goal) if "max" not in defaults else None)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(_ticks(axes.get_ylim()[1], defaults["unit"]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min" if minutes else "now"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, defaults["unit"])))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    elif any(name for _, name in lines):
        room = panel["gridPos"]["w"] * _LETTERS_A_COLUMN
        ncols = max(1, min(4, room // (max(len(name) for _, name in lines) + _LETTERS_A_COLUMN)))
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncols=ncols, frameon=False, fontsize=6)


def _ticks(top: float, unit: str) -> Locator:
    """Some five; of bytes at powers of two, which alone are round there."""
    return (
        MultipleLocator(2.0 ** math.ceil(math.log2(top / 5)))
        if unit in ("bytes", "binBps")
        else MaxNLocator(5)
    )


def _stack(axes: Axes, lines: list[tuple[Series, str]], step: float, end: float) -> None:
    moments = sorted({moment for series, _ in lines for moment, _ in series.points})
    # Where all are missing there is a hole, as in `_gapped`.
    for before, after in list(pairwise(moments)):
        if after - before > 1.5 * step:
            moments += (before + step / 2, after - step / 2)
    moments.sort()
    everywhere = {moment for series, _ in lines for moment, _ in series.points}
    values = []
    for series, _ in lines:
        known = dict(series.points)
        values.append([_number(known.get(one, 0.0)) if one in everywhere else math.nan for one in moments])
    if moments:
        times = [_minutes(one, end) for one in moments]
        axes.stackplot(times, values, labels=[name for _, name in lines], alpha=0.7)


def _gapped(series: Series, step: float, end: float) -> tuple[list[float], list[float]]:
    """The points, with a hole where some are missing: no line is drawn over what is not known."""
    moments: list[float] = []
    values: list[float] = []
    before = None
    for moment, value in series.points:
        if before is not None and moment - before > 1.5 * step:
            moments.append(_minutes(moment, end))
            values.append(math.nan)
        moments.append(_minutes(moment, end))
        values.append(value)
        before = moment
    return moments, values


def _figure(axes: Axes, panel: Panel, prometheus: Prometheus) -> None:
    axes.axis("off")
    (target,) = panel["targets"]
    found = prometheus.now(target["expr"])
    unit = panel["fieldConfig"]["defaults"]["unit"]
    known = [one for one in found if not math.isnan(one.points[-1][1])]
    if not known:
        words = panel["fieldConfig"]["defaults"]["noValue"]
    elif target["legendFormat"]:
        words = known[0].called(target["legendFormat"])
    else:
        words = shown(known[0].points[-1][1], unit)
    size = 13 if len(words) < 16 else 10
    axes.text(0.5, 0.45, words, transform=axes.transAxes, ha="center", va="center", fontsize=size)


def _table(axes: Axes, panel: Panel, prometheus: Prometheus) -> None:
    axes.axis("off")
    columns = [target["legendFormat"] for target in panel["targets"]]
    rows: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for target in panel["targets"]:
        for one in prometheus.now(target["expr"]):
            key = tuple(sorted(one.labels.items()))
            rows.setdefault(key, {})[target["legendFormat"]] = one.points[-1][1]
    names = sorted({name for key in rows for name, _ in key})
    cells = [
        [*(dict(key).get(name, "") for name in names), *(_cell(row.get(column)) for column in columns)]
        for key, row in sorted(rows.items())
    ]
    if not cells:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
        return
    made = axes.table(
        cells,
        colLabels=[*names, *columns],
        colWidths=[0.97 / len(cells[0])] * len(cells[0]),  # all of it would end beyond the picture's edge
        colLoc="left",
        cellLoc="left",
        loc="upper left",
        edges="horizontal",
    )
    made.auto_set_font_size(False)
    made.set_fontsize(7)


def _cell(value: float | None) -> str:
    return "" if value is None else shown(value, "short")


def _minutes(moment: float, end: float) -> float:
    """Minutes before the end, negative: what a picture's time axis says."""
    return (moment - end) / 60


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _scaled(value: float, base: float, names: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= base and index < len(names) - 1:
        value, index = value / base, index + 1
    return f"{value:.4g}{names[index]}"


_LETTERS_A_COLUMN = 14
"""Of a legend, in one of the dashboard's 24 columns; its sign takes as much."""
_BYTES = (" B", " KiB", " MiB", " GiB", " TiB")
_UNITS: dict[str, Callable[[float], str]] = {
    "percentunit": lambda value: f"{100 * value:.3g} %",
    "s": lambda value: f"{1000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{value:.4g} s",
    "bytes": lambda value: _scaled(value, 1024, _BYTES),
    "binBps": lambda value: _scaled(value, 1024, tuple(f"{name}/s" for name in _BYTES)),
    "watt": lambda value: f"{value:.4g} W",
    "celsius": lambda value: f"{value:.3g} °C",
    "ops": lambda value: f"{value:.3g}/s",
    "reqps": lambda value: f"{value:.3g}/s",
}


def shown(value: float, unit: str) -> str:
    """A value with its unit, for people; Grafana's names of units."""
    if math.isnan(value):
        return "not known"
    if unit in _UNITS:
        return _UNITS[unit](value)
    return _scaled(value, 1000, ("", " K", " M", " G"))
