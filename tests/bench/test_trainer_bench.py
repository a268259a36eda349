"""The benchmark of the trainer runs, lets subjects take turns, and says whom it left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bench.report import ROOT, Report
from bench.trainer import PEER_PACKAGES, UNITS, ratios, stages, tokens_a_step
from bench.training.shapes import SHAPES
from bench.training.turns import busy
from processes import Processes
from waiting import wait_until

pytestmark = pytest.mark.long


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ours_and_the_bare_loop_take_turns(processes: Processes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.trainer", "--shape", "tiny", "--rounds", "1", "--window", "1"]
    command += ["--no-peers", "--stages", "same dtype", "telemetry"]
    command += ["--out", str(tmp_path / "out"), "--place", str(tmp_path / "place")]
    process = processes.start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=1700)
    assert process.returncode == 0, out
    body = json.loads((tmp_path / "out" / "trainer.json").read_text())
    median = {(row["subject"], row["metric"]): row["median"] for row in body["rows"]}
    assert body["ratios"]["vs_bare_loop"] == median["holdfast", "speed"] / median["bare loop", "speed"]
    assert {"telemetry_cost", "share_of_gemm_peak", "first_step_vs_bare_loop"} <= set(body["ratios"])
    assert median["holdfast", "first step"] > 0
    for name in ("bare loop", "holdfast"):
        assert out.index(f"warm-up: {name}\n") < out.index(f"start {name}\n"), "none waits for the disk"
    assert body["machine"]["left_out"]["lightning"] == "lightning is not installed"
    assert "hf trainer was left out: transformers is not installed" in out
    assert list((tmp_path / "place").iterdir()) == [], "runs are removed"


def test_what_is_around_a_step_is_measured_on_a_tiny_model_and_set_against_a_step_of_the_real_one() -> None:
    report = Report("trainer")
    report.add("holdfast", "speed", UNITS["speed"], tokens_a_step("10M") / 0.5)  # half a second a step
    for name, seconds in (("holdfast", 0.012), ("holdfast", 0.014), ("bare loop", 0.010)):
        report.add(f"{name}, tiny model", "step", UNITS["step"], seconds)
    report.add("holdfast, tiny model, telemetry off", "step", UNITS["step"], 0.011)
    ratios(report, "10M", 2)
    assert report.ratios["telemetry_cost"] == pytest.approx(0.002 / 0.5)
    assert report.ratios["around_a_step_cost"] == pytest.approx(0.003 / 0.5)


def test_a_model_that_there_is_not_is_refused() -> None:
    command = [sys.executable, "-m", "bench.trainer", "--shape", "5M"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "argument --shape: invalid choice: '5M' (choose from" in done.stderr
    assert "124M" in done.stderr


def test_neighbours_are_busy_until_they_are_not_wanted_any_more() -> None:
    with busy(2) as started:
        neighbours = [psutil.Process(one.pid) for one in started]
        assert len(neighbours) == 2
        wait_until(lambda: all(one.cpu_times().user > 0.05 for one in neighbours), "both to be busy")
    assert not any(one.is_running() for one in neighbours)


def test_every_machine_gets_the_stages_that_it_can_run() -> None:
    titles = lambda cores, gpus: [stage.title for stage in stages("10M", 5, 3, cores, gpus)]  # noqa: E731
    assert titles(2, 0) == ["same dtype", "as it comes", "compiled", "busy machine", "ddp", "telemetry"]
    alone = ["same dtype", "as it comes", "compiled", "busy machine", "telemetry"]
    assert titles(1, 0) == titles(16, 1) == alone
    deterministic = [
        any("deterministic" in one.name for one in stages("10M", 5, 3, 2, n)[0].subjects) for n in (0, 1)
    ]
    assert deterministic == [False, True], "a GPU has faster kernels that are not"
    beside, ddp = stages("10M", 5, 3, 8, 4)[3:5]
    assert beside.neighbours == 8
    assert [subject.name for subject in beside.subjects][:2] == [
        "bare loop, busy machine",
        "holdfast, busy machine",
    ]
    assert (ddp.ranks, ddp.threads) == (4, 2)
    assert [subject.name for subject in ddp.subjects][1] == "holdfast, 4 processes"
    assert all(SHAPES[shape]["batch"] % 4 == 0 for shape in ("10M", "124M"))
    assert set(PEER_PACKAGES.values()) == {"transformers", "lightning"}
