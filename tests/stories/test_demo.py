"""Somebody who has never seen Holdfast types `make demo`; here a shorter run of the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import Processes
from waiting import wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FIGURES = {
    "steps",
    "attempts",
    "disruptions",
    "failures",
    "lost_steps",
    "goodput",
    "recovery_seconds",
    "notice_lost_steps",
    "proof",
    "digest",
    "twin_digest",
    "tokens_per_second",
    "data_wait_fraction",
    "wall_seconds",
    "first_step_seconds",
}


def test_fewer_steps_than_two_disruptions_take_are_refused_at_once(tmp_path: Path) -> None:
    """Of one step it ended in a traceback, after both runs."""
    words = [sys.executable, "-m", "scripts.demo", "--steps", "1", "--out", tmp_path / "demo"]
    demo = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert demo.returncode == 2
    assert "--steps 1: give at least 6, for two disruptions in between" in demo.stderr
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_shows_an_identical_resume_and_leaves_nothing_running(
    tmp_path: Path, processes: Processes
) -> None:
    out = tmp_path / "build" / "demo"
    demo = processes.start(
        [sys.executable, "-m", "scripts.demo", "--steps", "6", "--out", out],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed, _ = demo.communicate(timeout=1700)
    assert demo.returncode == 0, printed
    assert "resume proof: identical" in printed
    wait_until(lambda: not processes.running(), "what it started to be gone")

    figures = json.loads((out.parent / "demo.json").read_text())
    assert figures.keys() == FIGURES
    assert figures["digest"] == figures["twin_digest"] in printed
    assert (figures["proof"], figures["steps"]) == ("identical", 6)
    assert (figures["attempts"], figures["disruptions"], figures["failures"]) == (3, 2, 0)
    assert figures["notice_lost_steps"] == 0
    assert len(figures["recovery_seconds"]) == 2
    recovery = ", ".join(f"{seconds:.1f} s" for seconds in figures["recovery_seconds"])
    assert any(
        line.startswith("6 steps, ") and line.endswith(f"; recovery {recovery}")
        for line in printed.splitlines()
    ), "in a pipe a sentence is not broken at 80 columns"
    assert 0 < figures["goodput"] < 1
    assert 0 < figures["data_wait_fraction"] < 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_demo_that_is_told_to_end_again_and_again_ends_its_job_all_the_same(
    tmp_path: Path, processes: Processes
) -> None:
    """make gets the signal of its group, as from `timeout`, and passes it on: the job trained on."""
    log = tmp_path / "demo.log"
    with log.open("w") as output:
        demo = processes.start(
            [sys.executable, "-m", "scripts.demo", "--steps", "60", "--out", tmp_path / "demo"],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    wait_until(lambda: "running, attempt 1" in log.read_text(), "the demo's job to run")
    for _ in range(50):  # one of them meets the other's exit before the job is told to end
        demo.terminate()
        time.sleep(0.002)
    assert demo.wait(300) == 143, log.read_text()
    wait_until(lambda: not processes.running(), "what it started to be gone", 20)
