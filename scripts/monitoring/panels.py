"""Grafana's dashboard model as plain dicts, as little of it as our dashboards need. Pure.

A panel is placed in the order in which it is given, 24 columns a row, as Grafana counts them. The schema
version is one that every Grafana from 10.4 on takes in, and newer ones migrate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Panel = dict[str, Any]
Queries = Sequence[tuple[str, str]]
"""(PromQL, legend)"""

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39
COLUMNS = 24
WINDOW = "$__rate_interval"


def _panel(kind: str, title: str, about: str, queries: Queries, width: int, height: int) -> Panel:
    targets = [
        {"datasource": SOURCE, "expr": expression, "legendFormat": legend, "refId": chr(ord("A") + index)}
        for index, (expression, legend) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": targets,
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {},
    }


def graph(
    title: str,
    about: str,
    queries: Queries,
    *,
    unit: str = "short",
    width: int = 8,
    stacked: bool = False,
    goal: float | None = None,
    lowest: float | None = 0,
    highest: float | None = None,
) -> Panel:
    """Values over time; `goal` draws a dashed line."""
    panel = _panel("timeseries", title, about, queries, width, 8)
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 40 if stacked else 0, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": unit, "custom": custom}
    if lowest is not None:
        defaults["min"] = lowest
    if highest is not None:
        defaults["max"] = highest
    if goal is not None:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        steps = [{"color": "transparent", "value": None}, {"color": "red", "value": goal}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    panel["fieldConfig"]["defaults"] = defaults
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def figure(
    title: str,
    about: str,
    query: str,
    *,
    legend: str = "",
    unit: str = "short",
    width: int = 4,
    decimals: int | None = None,
) -> Panel:
    """The newest value in large; with `legend`, the label that it names in its place."""
    panel = _panel("stat", title, about, [(query, legend)], width, 3)
    panel["targets"][0]["instant"] = True
    defaults: dict[str, Any] = {"unit": unit, "noValue": "not known"}
    if decimals is not None:
        defaults["decimals"] = decimals
    panel["fieldConfig"]["defaults"] = defaults
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "name" if legend else "value",
        "colorMode": "none" if legend else "value",
        "graphMode": "none",
    }
    return panel


def table(title: str, about: str, queries: Queries, *, hidden: Sequence[str] = (), width: int = 24) -> Panel:
    """The newest values as rows by their labels, a column for each query, called by its legend."""
    panel = _panel("table", title, about, queries, width, 8)
    for target in panel["targets"]:
        target |= {"instant": True, "format": "table"}
    renamed = {f"Value #{target['refId']}": target["legendFormat"] for target in panel["targets"]}
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(("Time", *hidden), True),
                "renameByName": renamed if len(panel["targets"]) > 1 else {"Value": queries[0][1]},
            },
        },
    ]
    return panel


def marks(name: str, expression: str, color: str, title: str) -> Panel:
    """A line across every graph where the expression has a value."""
    return {
        "name": name,
        "enable": True,
        "datasource": SOURCE,
        "expr": expression,
        "step": "15s",
        "iconColor": color,
        "titleFormat": title,
    }


def choice(name: str, label: str, query: str, *, many: bool = False) -> Panel:
    """A variable whose values are a query's label of this name."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"query_result({query})", "refId": name},
        "definition": f"query_result({query})",
        "regex": f'/\\b{name}="([^"]+)"/',
        "refresh": 2,
        "sort": 1,
        "multi": many,
        "includeAll": many,
    }


def text_box(name: str, label: str, value: str) -> Panel:
    """A variable that people type."""
    return {"name": name, "label": label, "type": "textbox", "query": value}


def dashboard(
    uid: str,
    title: str,
    about: str,
    panels: Sequence[Panel],
    *,
    variables: Sequence[Panel] = (),
    annotations: Sequence[Panel] = (),
    span: str = "now-3h",
) -> Panel:
    """The whole document. Its `uid` is its address: it never changes."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["holdfast"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": span, "to": "now"},
        "templating": {"list": [source, *variables]},
        "annotations": {"list": list(annotations)},
        "links": [
            {
                "title": "Holdfast",
                "type": "dashboards",
                "tags": ["holdfast"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": _placed(panels),
    }


def _placed(panels: Sequence[Panel]) -> list[Panel]:
    placed = []
    x = y = tallest = 0
    for number, panel in enumerate(panels, start=1):
        size = panel["gridPos"]
        if x + size["w"] > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        placed.append({"id": number, **panel, "gridPos": {**size, "x": x, "y": y}})
        x, tallest = x + size["w"], max(tallest, size["h"])
    return placed
