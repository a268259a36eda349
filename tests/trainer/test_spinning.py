"""Threads that wait for each other give their core away soon, unless the user wants it otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fresh_command import TORCHRUN, text_of
from gpt_runs import write_config

from holdfast_controller.local.ports import free_port
from holdfast_trainer.spinning import NAME, POLICY, SPINS, spin_briefly


@pytest.mark.parametrize("given", [{NAME: "7"}, {POLICY: "ACTIVE"}, {POLICY: "PASSIVE", NAME: "7"}])
def test_what_the_user_says_stays(given: dict[str, str]) -> None:
    environment = dict(given)
    spin_briefly(environment)
    assert environment == given


def told(command: list[str], directory: Path, **given: str) -> str:
    """How GNU's OpenMP says that it was set up, in every process of `command` that loads it."""
    assert torch.backends.openmp.is_available(), "it is loaded here, too"
    if "libgomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("this PyTorch is not built with GNU's OpenMP")
    return text_of(command, directory, (NAME, POLICY), OMP_DISPLAY_ENV="verbose", **given)


def test_the_library_hears_of_it_in_a_command(tmp_path: Path) -> None:
    estimate = ["holdfast_trainer", "diagnose", str(write_config(tmp_path)), "--gpu-memory", "24"]
    assert f"{NAME} = '{SPINS}'" in told(estimate, tmp_path)
    assert f"{NAME} = '7'" in told(estimate, tmp_path, **{NAME: "7"})


def test_the_library_hears_of_it_in_a_rank(tmp_path: Path) -> None:
    """It is loaded by torchrun, and the rank is a fork of that; or by the rank itself."""
    program = tmp_path / "program.py"
    program.write_text(f"import os, torch\nprint('rank has', os.environ[{NAME!r}])\n")
    words = [*TORCHRUN, f"--master-port={free_port()}", f"--log-dir={tmp_path}", "--", "--tee", "--"]
    text = told(["holdfast_trainer.torchrun", *words, sys.executable, str(program)], tmp_path)
    assert f"rank has {SPINS}" in text
    assert f"{NAME} = '{SPINS}'" in text
