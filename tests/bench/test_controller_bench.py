"""The benchmark of the controller runs, both sides take turns, and ratios come from the rows beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.controller import main
from bench.controlling.turns import BARE, OURS, percentile, told_after
from bench.report import ROOT
from processes import Processes
from tests.cluster.system import CONTROL_PLANE_PACKAGES, is_root, missing

RATIOS = {
    "jobs_per_second",
    "share_of_raw_rate",
    "memory_mib_at_20",
    "rest_p99_seconds",
    "progress_to_status_p99_seconds",
}
SMALL = (
    "--jobs=20",
    "--nodes=3",
    "--raw=5",
    "--rounds=1",
    "--rest=1",
    "--steady=10",
    "--calm=1",
    "--real-operator=0",
    "--training=3",
    "--steps=8",
)
LONGEST_SECONDS = 1200
"""The first run builds the programs it needs."""


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(2400)
def test_both_sides_take_turns_on_one_apiserver(processes: Processes, tmp_path: Path) -> None:
    if missing(CONTROL_PLANE_PACKAGES) and not is_root():
        pytest.skip("etcd is not installed, and only root may install it")
    command = [sys.executable, "-m", "bench.controller", *SMALL, f"--out={tmp_path}"]
    process = processes.start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 0, out
    body = json.loads((tmp_path / "controller.json").read_text())
    assert {row["subject"] for row in body["rows"]} == {OURS, BARE}
    assert set(body["ratios"]) >= RATIOS
    rows = {(row["subject"], row["metric"]): row["median"] for row in body["rows"]}
    # The job, its status twice (it opens, it has started), ConfigMap, PyTorchJob, an Event: at least.
    assert rows[OURS, "writes per job, few jobs"] >= 6
    assert body["ratios"]["share_of_raw_rate"] == rows[OURS, "jobs"] / rows[BARE, "jobs"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--jobs=3", "--jobs 3: at least 20 is needed"),
        ("--nodes=0", "--nodes 0: at least 1 is needed"),
        ("--real-operator=-1", "--real-operator -1: 0 or more jobs"),
        ("--training=251", "--training 251: 0 to 250 jobs"),
        ("--rounds=5000", "--rounds 5000: 10000 jobs are too few for so many turns"),
        ("--steady=0", "--steady 0: more than 0 jobs/s"),
    ],
)
def test_what_it_cannot_do_is_refused(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option])
    assert said in capsys.readouterr().err


def test_a_step_counts_as_told_with_the_first_status_that_says_it_or_a_later_one() -> None:
    done = [1.0, 2.0, 3.0, 4.0]
    assert told_after(done, [(0, 0.5), (1, 1.5), (1, 1.75), (4, 4.5)]) == [0.5, 2.5, 1.5, 0.5]


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(1, 201)]
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (100.0, 198.0, 7.0)
