"""Dashboards that Grafana takes in, and alerts of which each has a runbook and has been tried."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.chart_values import Monitoring
from scripts.monitoring import DASHBOARDS, RULES
from scripts.monitoring.job import ADVICE
from scripts.monitoring.live import targets
from scripts.monitoring.panels import COLUMNS, Panel
from scripts.render_dashboards import rate_window
from scripts.verify import ROOT
from tests.cluster.errors import MissingTool
from tests.cluster.system import install
from tests.monitoring.world import PACKAGES

from holdfast_trainer.verdict import CAUSES

TESTS = Path(__file__).with_name("alerts.test.yaml")
STATES = ("busy", "held, idle", "not known", "free", "busy, nobody seen", "cannot be read")


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


def promtool(*words: str) -> None:
    try:
        install(PACKAGES)
    except MissingTool as error:
        pytest.skip(str(error))
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_agrees() -> None:
    """`make verify` asks it too, where it is installed."""
    promtool("check", "rules", str(ROOT / RULES))
    promtool("test", "rules", str(TESTS))


def test_the_configuration_for_one_machine_scrapes_as_often_as_the_panels_take_for_granted(
    tmp_path: Path,
) -> None:
    """By Prometheus' own default, once a minute, each panel of a rate was empty."""
    text = (ROOT / "docs/monitoring.md").read_text()
    (config,) = re.findall(r"```yaml\n(global:.*?)```", text, re.DOTALL)
    data = tmp_path / "data"
    data.mkdir()
    (data / "token").write_text("secret")
    (data / "prometheus-targets.json").write_text("[]")
    there = config.replace("/home/you/.local/share/holdfast", str(data)).replace(
        "/home/you/holdfast", str(ROOT)
    )
    assert "/home/you" not in there
    (tmp_path / "prometheus.yml").write_text(there)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert yaml.safe_load(config)["global"]["scrape_interval"] == Monitoring().interval == "15s"


def test_a_rate_that_is_drawn_has_two_samples_whatever_the_time_shown(tmp_path: Path) -> None:
    """Of the last 15 minutes each rate was taken over 15 s, in which a Prometheus scrapes once."""
    interval = Monitoring().interval.removesuffix("s")
    windows = [rate_window(float(interval), 60 * minutes) for minutes in (1, 15, 60, 24 * 60)]
    assert windows == ["60s", "60s", "60s", "1440s"]
    drawn = {"expr": "rate(steps_total[60s])", "eval_time": "47m", "exp_samples": [{"value": 2}]}
    shorter = {"expr": "rate(steps_total[15s])", "eval_time": "47m10s", "exp_samples": []}
    series = {"series": "steps_total", "values": "0+30x300"}
    test = {"interval": f"{interval}s", "input_series": [series], "promql_expr_test": [drawn, shorter]}
    path = tmp_path / "rates.test.yaml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    promtool("test", "rules", str(path))


def check_shown(
    tmp_path: Path,
    series: dict[str, str],
    minute: int,
    shown: Mapping[tuple[str, str, str], float | None],
    how: str = "{}",
) -> None:
    """What these panels, as (dashboard, panel, legend), show at that minute: each one figure or nothing."""
    variables = {"namespace": "a", "job": "gpt", "price": "2", "__range": "1h"}
    asked = {
        (name, panel, legend): re.sub(r"\$([A-Za-z_]\w*)", lambda found: variables[found[1]], expression)
        for name in {name for name, _, _ in shown}
        for panel, legend, expression in targets(DASHBOARDS[name]())
        if (name, panel, legend) in shown
    }
    cases = [
        {
            "expr": how.format(asked[key]),
            "eval_time": f"{minute}m",
            "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
        }
        for key, value in shown.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": given, "promql_expr_test": cases}
    document = tmp_path / "shown.yaml"
    document.write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", str(document))


def test_every_gpu_is_in_one_state_and_one_that_nobody_holds_costs_nothing(tmp_path: Path) -> None:
    """One GPU is free; from the last half hour on it computes for processes that nobody sees. MIG cuts
    another, so NVML does not say how busy it is, and a part is held since half an hour. Two were lost before
    the exporter began: they never told a UUID."""
    series = {
        'holdfast_gpu_up{gpu="0",uuid="GPU-0",instance="n"}': "1x480",
        'holdfast_gpu_utilization_ratio{gpu="0",uuid="GPU-0",instance="n"}': "0x360 0.9x120",
        'holdfast_gpu_up{gpu="1",uuid="GPU-1",instance="n"}': "1x480",
        'holdfast_gpu_up{gpu="2",uuid="",instance="n"}': "0x480",
        'holdfast_gpu_up{gpu="3",uuid="",instance="n"}': "0x480",
        'holdfast_gpu_shares_allocated{gpu="1",uuid="GPU-1",mig="MIG-a",pod="p",instance="n"}': "_x120 1x360",
    }

    def states(unknown: float, free: float, unseen: float) -> dict[tuple[str, str, str], float]:
        found = (0, 0, unknown, free, unseen, 2)
        return {("gpus", "GPUs by state", legend): value for legend, value in zip(STATES, found, strict=True)}

    costs_nothing = {("gpus", "GPU hours", ""): 0.0, ("gpus", "Cost", ""): 0.0}
    check_shown(tmp_path, series, 29, {**states(0, 2, 0), **costs_nothing})
    costs = {("gpus", "GPU hours", ""): 0.5, ("gpus", "Cost", ""): 1.0, ("gpus", "Cannot be read", ""): 2.0}
    check_shown(tmp_path, series, 59, {**states(1, 1, 0), **costs})
    check_shown(tmp_path, series, 119, states(1, 0, 1))


def test_where_no_exporter_is_heard_no_number_of_gpus_is_known(tmp_path: Path) -> None:
    """None was held, none was idle and nothing was paid, as if there were GPUs that nobody had taken."""
    series = {
        'holdfast_gpu_exporter_up{source="nvml",instance="n"}': "0x240",
        'holdfast_gpu_up{gpu="0",uuid="GPU-0",instance="m"}': "1x40 stale",
        'holdfast_gpu_shares_allocated{gpu="0",uuid="GPU-0",mig="",pod="p",instance="m"}': "1x40 stale",
    }
    titles = ("Held", "Held and idle", "Cannot be read")
    unknown: dict[tuple[str, str, str], float | None] = {("gpus", title, ""): None for title in titles}
    unknown |= {("gpus", "GPUs by state", legend): None for legend in STATES}
    hours = {("gpus", "GPU hours", ""): None, ("gpus", "Cost", ""): None}
    check_shown(tmp_path, series, 80, {**unknown, **hours})
    # What was known of the hour still is.
    check_shown(tmp_path, series, 55, {**unknown, ("gpus", "Cost", ""): 11 * 2 / 60})


def test_a_gpu_is_free_where_the_kubelet_says_that_nobody_holds_it(tmp_path: Path) -> None:
    """One kubelet does not answer: who holds the GPUs of its node is known of the one with a process of a
    job alone."""
    series = {
        'holdfast_gpu_exporter_up{source="pod-resources",instance="n"}': "1x20",
        'holdfast_gpu_exporter_up{source="pod-resources",instance="m"}': "0x20",
        'holdfast_gpu_processes{gpu="1",uuid="m-1",job="gpt",instance="m"}': "1x20",
    }
    series |= {
        f'holdfast_{figure}{{gpu="{gpu}",uuid="{node}-{gpu}",instance="{node}"}}': f"{value}x20"
        for node, gpu, busy in (("n", 0, 0), ("m", 0, 0), ("m", 1, 0.9), ("m", 2, 0.9))
        for figure, value in (("gpu_up", 1), ("gpu_utilization_ratio", busy))
    }
    found = dict(zip(STATES, (1, 0, 1, 1, 1, 0), strict=True))
    check_shown(
        tmp_path, series, 4, {("gpus", "GPUs by state", legend): value for legend, value in found.items()}
    )


@pytest.mark.parametrize(
    ("step", "total", "shown"), [(998, 1000, 0.99), (29, 100, 0.29), (1000, 1000, 1.0), (5, "NaN", None)]
)
def test_a_job_that_has_a_step_left_is_not_done(
    tmp_path: Path, step: int, total: float | str, shown: float | None
) -> None:
    """99.8 % were shown as all, and of steps without an end NaN."""
    labels = 'namespace="a",holdfast_dev_job="gpt",pod="gpt-1-worker-0"'
    told = {"holdfast_step": step, "holdfast_total_steps": total}
    series = {f"{name}{{{labels}}}": " ".join([str(value)] * 20) for name, value in told.items()}
    check_shown(tmp_path, series, 2, {("job", "Done", ""): shown})


def test_a_job_that_takes_a_deleted_one_s_name_was_not_disrupted(tmp_path: Path) -> None:
    """The one before it was, twice."""
    series = {
        'holdfast_job_attempts_total{namespace="a",job="gpt"}': "1x20 2x20 3x20 0 1x20",
        'holdfast_job_disruptions_total{namespace="a",job="gpt"}': "0x20 1x20 2x20 0 0x20",
    }
    attempts, disruptions = ("job", "marks", "Attempts"), ("job", "marks", "Disruptions")
    for minute, new, lost in ((4, None, None), (6, 1, 1), (9, None, None), (16, 1, None)):
        check_shown(tmp_path, series, minute, {attempts: new, disruptions: lost}, "count({})")


def test_a_table_of_the_jobs_that_lost_most_has_no_others(tmp_path: Path) -> None:
    """Of a thousand jobs each had a row, most of them with a cell for what it had lost that was empty."""
    series = {
        f'{name}{{exported_namespace="a",exported_job="gpt-{job}",namespace="hf",job="hf"}}': f"{job}x20"
        for job in range(30)
        for name in (
            "holdfast_job_lost_steps",
            "holdfast_job_disruptions_total",
            "holdfast_job_goodput_ratio",
        )
    }
    title = "What interruptions cost"
    for column in ("lost steps", "disruptions", "goodput"):
        check_shown(tmp_path, series, 2, {("controller", title, column): 20.0}, "count({})")
        check_shown(tmp_path, series, 2, {("controller", title, column): 10.0}, "min({})")
