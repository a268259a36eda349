"""Holdfast without a package that it needs, as after a bare `pip install holdfast`, says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gpt_runs import write_config

from holdfast_trainer.contract import ENV_TERMINATION_LOG, EXIT_CONFIG_ERROR, Termination

ROOT = Path(__file__).parents[1]
BARE = (sys.executable, "-S", "-m")
"""Python with its own library alone."""
TORCHRUN = ("holdfast_trainer.torchrun", "--nproc-per-node=1", "--", "--", "python", "loop.py")


def ran(told: Path, *words: str, beside: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """With what is in the directories `beside`."""
    sources = os.pathsep.join(map(str, (ROOT / "trainer", ROOT / "controller", *beside)))
    environment = {**os.environ, "PYTHONPATH": sources, ENV_TERMINATION_LOG: str(told)}
    return subprocess.run(
        [*BARE, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("words", "who", "lacks"),
    [
        (("holdfast_trainer", "train", "gpt.yaml"), "train", "yaml"),
        (("holdfast_trainer", "check", "gpt.yaml"), "check", "yaml"),
        (("holdfast_trainer", "checkpoint", "verify", "run"), "checkpoint", "yaml"),
        (TORCHRUN, "torchrun", "torch"),
    ],
    ids=["train", "check", "checkpoint", "torchrun"],
)
def test_a_trainer_without_its_packages_says_so_and_is_not_tried_again(
    words: tuple[str, ...], who: str, lacks: str, tmp_path: Path
) -> None:
    done = ran(tmp_path / "told", *words)
    _was_told(done, tmp_path / "told", who, lacks)


def test_a_trainer_without_pytorch_says_so_when_it_has_read_its_configuration(tmp_path: Path) -> None:
    """As where the controller's packages alone are installed."""
    beside = tmp_path / "packages"
    beside.mkdir()
    (beside / "yaml").symlink_to(Path(yaml.__file__).parent)
    config = str(write_config(tmp_path))
    done = ran(tmp_path / "told", "holdfast_trainer", "train", config, beside=(beside,))
    _was_told(done, tmp_path / "told", "train", "torch")


def _was_told(done: subprocess.CompletedProcess[str], told: Path, who: str, lacks: str) -> None:
    why = f"the trainer needs {lacks}, which is not installed for {sys.executable}"
    assert done.stderr == f"{who}: {why}: pip install 'holdfast[trainer]'\n"
    assert done.returncode == EXIT_CONFIG_ERROR
    last = Termination.from_json(told.read_text())
    assert last is not None
    assert last.config_error, "a job of it ends with this attempt"
    assert why in last.error


def test_a_command_line_without_its_packages_says_so(tmp_path: Path) -> None:
    done = ran(tmp_path / "told", "holdfast_controller", "get")
    why = f"holdfast needs typer, which is not installed for {sys.executable}"
    assert (done.returncode, done.stderr) == (1, f"{why}: pip install 'holdfast[controller]'\n")
