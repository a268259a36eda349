"""A real Prometheus scrapes a training that is interrupted, and answers all that dashboards and alerts ask.

Two of them: one keeps the labels that we give (`honor_labels`), one renames them. Each query of each panel
has to have data from both, but for those of an apiserver and of a kubelet, which one machine has not. The
list of panels with their values is printed. `DASHBOARD_PICTURES=docs make test ARGS="-k live_prometheus"`
also lets the job run for some minutes and draws what README.md shows.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from one_machine import Platform, document, platform, write_tokens
from processes import Processes
from scripts import render_dashboards
from scripts.monitoring import DASHBOARDS, RULES
from scripts.monitoring.live import Prometheus, QueryError, targets
from tests.cluster.errors import MissingTool
from tests.cluster.system import install
from tests.monitoring.world import PACKAGES, VARIABLES, exporter, prometheus, use_gpu
from tests.nvml.stand_in import GIB, CannotCompile, Script, build, busy_gpu
from waiting import wait_until

from holdfast_controller.data_directory import DataDirectory
from holdfast_controller.drills import DrillKind
from holdfast_controller.jobs import Phase, TrainingJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PICTURES = os.environ.get("DASHBOARD_PICTURES")
STRETCH_SECONDS = 60.0 if PICTURES else 0.0
"""How long each attempt is left alone: a picture wants something to show."""
PACED = """
import sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
from holdfast_trainer.__main__ import main
register_optimizer_step_post_hook(lambda *_: time.sleep(0.02))
sys.exit(main(sys.argv[1:]))
"""
"""Trains without filling a core, for as long as a Prometheus is waited for."""

Key = tuple[str, str, str]

EMPTY = {
    ("controller", "Leads", ""),
    ("controller", "Since the apiserver was heard of", "{{resource}}"),
    ("controller", "Watches that ended", "{{resource}} {{reason}}"),
    ("controller", "Requests to the apiserver", "{{method}} {{resource}}"),
    ("gpus", "Who uses what", "shares"),
    ("gpus", "Shares by job", "{{namespace}}/{{job}}"),
    ("job", "MFU and utilisation", "GPU"),
    ("job", "marks", "Failures"),
}
"""What one machine has none of: an apiserver, a kubelet; and what this job, on the CPU, does not do."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    try:
        install(PACKAGES)
        return build(tmp_path)
    except (MissingTool, CannotCompile) as error:
        pytest.skip(str(error))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    small = {"field.197.type": 1, "field.198.type": 1}  # as an H200's counters of PCIe are
    made = Script(tmp_path / "gpus.txt", [busy_gpu(0, **small), busy_gpu(1, utilization=0, **small)])
    made.write()
    return made


def asked() -> dict[Key, str]:
    """All queries of all dashboards: (dashboard, panel, legend) to PromQL."""
    return {
        (name, panel, legend): expression
        for name, build_dashboard in DASHBOARDS.items()
        for panel, legend, expression in targets(build_dashboard())
    }


def values(server: Prometheus, expression: str, since: float | None = None) -> dict[str, float]:
    """What is known now by labels, or was last `since` a moment."""
    now = time.time()
    found = server.now(expression) if since is None else server.over(expression, since, now, 1)
    return {
        ",".join(f"{name}={value}" for name, value in sorted(one.labels.items())): one.points[-1][1]
        for one in found
        if not math.isnan(one.points[-1][1])
    }


def running(here: Platform, attempt: int) -> TrainingJob:
    """Wait until the attempt has trained beyond a checkpoint of its own."""

    def on() -> TrainingJob | None:
        job = here.job("gpt")
        assert not job.status.phase.final, job.status.model_dump_json(indent=1)
        progress = job.status.progress
        at_work = job.status.attempt == attempt and job.status.phase is Phase.RUNNING
        return job if at_work and progress and progress.durable_step and progress.val_loss else None

    job = wait_until(on, f"attempt {attempt} to train and save", 240)
    assert job is not None
    time.sleep(STRETCH_SECONDS)
    return job


def all_answers(server: Prometheus, since: float) -> dict[Key, dict[str, float]]:
    """Ask until each query that can have data had some. A scrape that came late is no fault of a panel.

    A mark is there for a minute: it may be any since the test began.
    """
    queries = asked()
    seen: dict[Key, dict[str, float]] = {}

    def every() -> bool:
        for key, expression in queries.items():
            if not seen.get(key):
                seen[key] = values(server, expression, since if key[1] == "marks" else None)
        return all(seen[key] for key in queries if key not in EMPTY)

    def lacking() -> list[Key]:
        return [key for key in queries if key not in EMPTY and not seen.get(key)]

    try:
        wait_until(every, "every panel to have data")
    except AssertionError:
        pytest.fail(f"no data for {lacking()}")
    return seen


def told(answers: dict[Key, dict[str, float]]) -> str:
    lines = []
    for (name, panel, legend), found in answers.items():
        shown = "; ".join(f"{labels}{' ' if labels else ''}{value:.4g}" for labels, value in found.items())
        lines.append(f"{name:10} | {panel:36} | {legend:30} | {shown or 'no data here'}")
    return "\n".join(lines)


def check_alerts(server: Prometheus) -> None:
    """Prometheus itself has taken in every rule, evaluates it and finds nothing wrong."""

    def evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in server.rules())

    wait_until(evaluated, "all alerts to be evaluated")
    rules = server.rules()
    assert len(rules) == (render_dashboards.ROOT / RULES).read_text().count("alert: ")
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    for rule in rules:
        server.now(rule["query"])
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert not firing, "nothing is wrong with this job for as long as an alert waits"


def recovered(here: Platform) -> TrainingJob:
    """The job, once its status says what the recovery took."""

    def known() -> TrainingJob | None:
        job = here.job("gpt")
        return job if job.status.attempts[-1].recovery_seconds is not None else None

    job = wait_until(known, "the recovery to be known")
    assert job is not None
    return job


def check_truth(server: Prometheus, job: TrainingJob) -> None:
    """What is shown is what the job's own status says, and the GPUs' script, once it was scraped."""
    status = job.status
    before, after = status.attempts
    assert before.recovery_seconds is None
    assert after.recovery_seconds is not None
    assert after.breakdown is not None
    assert (status.attempt, status.disruptions, status.failures) == (2, 1, 0)
    expected = {
        ("job", "Attempts", ""): {"": 2.0},
        ("job", "Disruptions", ""): {"": 1.0},
        ("job", "Failures", ""): {"": 0.0},
        ("job", "Lost steps", ""): {"": float(status.lost_steps)},
        ("job", "Recovery", "recovery"): {"": after.recovery_seconds},
        ("job", "Recovery", "{{stage}}"): {
            f"stage={stage}": seconds for stage, seconds in after.breakdown.stages().items()
        },
        ("job", "Phase", "{{phase}}"): {"phase=Running": 1.0},
        ("job", "choices", "job"): {"job=gpt": 1.0},
        ("job", "choices", "namespace"): {"namespace=default": 1.0},
        ("job", "GPU, by replica and rank", "replica {{replica}} rank {{rank}}"): {
            f"rank=0,replica=0,uuid={busy_gpu(0).uuid}": 0.55
        },
        ("gpus", "GPUs", ""): {"": 2.0},
        ("gpus", "Held", ""): {"": 1.0},
        ("gpus", "Power", ""): {"": 701.0},
        ("gpus", "Who uses what", "processes"): {"job=gpt,namespace=default": 1.0},
        ("gpus", "Who uses what", "memory, bytes"): {"job=gpt,namespace=default": 4.0 * GIB},
    }
    queries = asked()
    wrong: dict[Key, dict[str, float]] = {}

    def true() -> bool:
        wrong.clear()
        for key, value in expected.items():
            shown = values(server, queries[key])
            if shown != pytest.approx(value):
                wrong[key] = shown
        return not wrong

    try:
        wait_until(true, "the truth to be shown")
    except AssertionError:
        pytest.fail(f"shown {wrong}; expected { ({key: expected[key] for key in wrong}) }")

    def advice() -> dict[str, float]:
        """One; two for the moment in which it changes."""
        shown = values(server, queries["job", "What holds it back", "{{advice}}"])
        return shown if len(shown) == 1 else {}

    (label,) = wait_until(advice, "one piece of advice")
    assert label.startswith("advice=")


def test_live_prometheus_has_data_for_every_panel(
    tmp_path: Path,
    processes: Processes,
    library: Path,
    script: Script,
    capsys: pytest.CaptureFixture[str],
) -> None:
    began = time.time()
    data = write_tokens(tmp_path / "data")
    asks = document("gpt", data, steps=1_000_000, layout=(1, 1))
    asks["spec"]["checkpoint"]["every"] = "2s"
    if not PICTURES:
        asks["spec"]["command"] = ["python", "-c", PACED, "train"]
    with ExitStack() as stack:
        here = stack.enter_context(platform(tmp_path / "holdfast", processes))
        address = stack.enter_context(exporter(tmp_path / "exporter", processes, script.environment(library)))
        servers = {
            honor: stack.enter_context(
                prometheus(
                    tmp_path / f"honor-{honor}",
                    processes,
                    DataDirectory(tmp_path / "holdfast"),
                    address,
                    honor_labels=honor,
                )
            )
            for honor in (True, False)
        }
        here.ask(lambda client: client.submit(asks, "default"))
        use_gpu(script, processes, 1)
        running(here, 1)
        for server in servers.values():  # what rises must have been seen before
            wait_until(lambda s=server: values(s, "holdfast_job_disruptions_total"), "a scrape")
        here.ask(lambda client: client.drill("default", "gpt", 0, DrillKind.KILL))
        use_gpu(script, processes, 2)
        running(here, 2)
        for honor, server in servers.items():
            answers = all_answers(server, began)
            with capsys.disabled():
                print(f"\nhonor_labels: {str(honor).lower()}\n{told(answers)}")
            check_truth(server, recovered(here))
            check_alerts(server)
        pictures = Path(PICTURES) if PICTURES else tmp_path / "pictures"
        given = [f"--var={name}={value}" for name, value in VARIABLES.items() if not name.startswith("_")]
        given += [f"--prometheus={servers[False].client.base_url}", f"--out={pictures}"]
        minutes = 2 * STRETCH_SECONDS / 60 + 1
        assert render_dashboards.main([*given, f"--minutes={minutes}", "--interval=1"]) == 0
        for name in DASHBOARDS:
            assert (pictures / f"dashboard-{name}.png").stat().st_size > 10_000


def test_what_cannot_be_asked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        render_dashboards.main(["--prometheus=http://127.0.0.1:1", f"--out={tmp_path}", "--only=gpus"]) == 1
    )
    assert "does not answer as a Prometheus" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        render_dashboards.main(["--var", "gpt"])
    assert "--var gpt: give NAME=VALUE, such as --var job=gpt" in capsys.readouterr().err
    with httpx.Client(base_url="http://127.0.0.1:1") as client, pytest.raises(QueryError) as refused:
        Prometheus(client).now('up{job="$job"}')
    assert "the query needs $job: give it with --var job=..." in str(refused.value)
