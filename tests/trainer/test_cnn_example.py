"""The example of the README: an ordinary loop becomes safe with a few lines, and can prove it."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import KILL, NOTICE, Workshop, holding

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "k8s" / "examples" / "cnn"


def changes() -> list[str]:
    plain, safe = ((EXAMPLE / name).read_text().splitlines() for name in ("plain.py", "safe.py"))
    lines = list(difflib.unified_diff(plain, safe, lineterm="", n=0))[2:]
    return [line for line in lines if not line.startswith("@@")]


def test_at_most_ten_lines_change() -> None:
    assert sum(line.startswith("+") for line in changes()) <= 10
    assert "holdfast" not in (EXAMPLE / "plain.py").read_text().lower()


def test_the_readme_shows_exactly_these_lines() -> None:
    shown = (ROOT / "README.md").read_text().split("## Make your own loop safe")[1].split("```diff\n")[1]
    block = [line for line in shown.split("```")[0].splitlines() if line[:1] in ("+", "-")]
    blank = ("+", "-")
    assert block == [line for line in changes() if line not in blank]


def short(tmp_path: Path, name: str) -> Path:
    """The example with fewer steps."""
    text = (EXAMPLE / name).read_text()
    assert "STEPS = 400" in text
    path = tmp_path / name
    path.write_text(text.replace("STEPS = 400", "STEPS = 60"))
    return path


def waiting(script: Path) -> Path:
    """So that a signal meets it."""
    script.write_text(holding(script.read_text()))
    return script


def test_the_plain_loop_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, short(tmp_path, "plain.py")],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.startswith("step 0: loss ")


@pytest.mark.slow
def test_killed_and_noticed_equals_untouched(workshop: Workshop, tmp_path: Path) -> None:
    script = waiting(short(tmp_path, "safe.py"))
    env = {"HOLDFAST_CHECKPOINT_EVERY": "8"}
    untouched = workshop.finish("untouched", ranks=2, script=script, env=env)
    interrupted = workshop.finish_interrupted((13, KILL), (34, NOTICE), ranks=2, script=script, env=env)
    starts = [line["resumed_step"] for line in interrupted.events("attempt_start")]
    assert 0 == starts[0] < starts[1] < starts[2] < 60, starts
    assert interrupted.losses() == untouched.losses()
    assert sorted(interrupted.losses()) == list(range(1, 61))
    assert interrupted.stop()["digest"] == untouched.stop()["digest"] != ""
