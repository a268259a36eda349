"""Dashboards and alerts, built by code: `make generate` writes them into the chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from .alerts import rules
from .controller import controller
from .gpus import gpus
from .job import job
from .panels import Panel

DASHBOARDS: Mapping[str, Callable[[], Panel]] = {"job": job, "controller": controller, "gpus": gpus}
RULES = "helm/holdfast/alerts/holdfast.yaml"


def text(build: Callable[[], Panel]) -> str:
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


FILES: Mapping[str, Callable[[], str]] = {
    RULES: rules,
    **{
        f"helm/holdfast/dashboards/{name}.json": lambda build=build: text(build)  # type: ignore[misc]
        for name, build in DASHBOARDS.items()
    },
}
"""Path to generator."""
