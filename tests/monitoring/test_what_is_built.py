"""Dashboards that Grafana takes in, and alerts of which each has a runbook and has been tried."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.monitoring import DASHBOARDS, RULES
from scripts.monitoring.job import ADVICE
from scripts.monitoring.live import targets
from scripts.monitoring.panels import COLUMNS, Panel
from scripts.verify import ROOT
from tests.cluster.errors import MissingTool
from tests.cluster.system import install
from tests.monitoring.world import PACKAGES

from holdfast_trainer.verdict import CAUSES

TESTS = Path(__file__).with_name("alerts.test.yaml")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / RULES).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_fits_grafana_s_grid_and_names_no_data_source(name: str) -> None:
    board = DASHBOARDS[name]()
    panels: list[Panel] = board["panels"]
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS, panel["title"]
        for cell in (
            (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert board["templating"]["list"][0]["type"] == "datasource"


def test_addresses_of_dashboards_never_change() -> None:
    assert {name: build()["uid"] for name, build in DASHBOARDS.items()} == {
        "job": "holdfast-job",
        "controller": "holdfast-controller",
        "gpus": "holdfast-gpus",
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_that_a_query_names_is_there(name: str) -> None:
    board = DASHBOARDS[name]()
    known = {one["name"] for one in board["templating"]["list"]} | {"__rate_interval", "__range"}
    for panel, _, expression in targets(board):
        assert set(re.findall(r"\$([A-Za-z_]\w*)", expression)) <= known, panel


def test_the_job_s_dashboard_has_a_sentence_for_every_cause_that_the_trainer_names() -> None:
    assert sorted(ADVICE) == sorted(CAUSES)


def test_every_alert_has_a_runbook() -> None:
    document = (ROOT / "docs" / "runbooks.md").read_text()
    headings = re.findall(r"^## (\w+)$", document, flags=re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in alerts())
    for rule in alerts():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / path).is_file()
        assert anchor == rule["alert"].lower()


def test_every_alert_was_tried_to_fire_and_to_be_silent() -> None:
    tried: dict[str, set[bool]] = {}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test.get("alert_rule_test", []):
            found = tried.setdefault(case["alertname"], set())
            found.add(bool(case["exp_alerts"]))
            # Promtool compares all that fires: series beside the ones that fire are silent.
            if case["exp_alerts"] and len(test["input_series"]) > len(case["exp_alerts"]):
                found.add(False)
    assert tried == {rule["alert"]: {True, False} for rule in alerts()}


def test_promtool_agrees() -> None:
    """`make verify` asks it too, where it is installed."""
    try:
        install(PACKAGES)
    except MissingTool as error:
        pytest.skip(str(error))
    for words in (("check", "rules", str(ROOT / RULES)), ("test", "rules", str(TESTS))):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
