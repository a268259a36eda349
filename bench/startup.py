"""Where the time goes before the first step: what each process costs before it does its work.

Every subject is a fresh interpreter, timed from fork to exit by the parent. A job's start adds them up:
the CLI, then (in processes that follow one another) a supervisor for torchrun, torchrun, and what the rank
imports besides PyTorch, with which it is forked; a command that is no Python program is executed instead.
Code and libraries are in the page cache after the warm-up round: a machine's very first start takes longer,
and this does not measure it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from .report import ROOT, Measure, Report, ReportError, refuse_unwritable, run, take_turns

BIN = Path(sys.executable).parent
BARE = "python, nothing imported"

COMMANDS: Mapping[str, Sequence[str]] = {
    BARE: ("python", "-c", "pass"),
    "holdfast --help": ("holdfast", "--help"),
    "holdfast submit --help": ("holdfast", "submit", "--help"),
    "supervise -- true": ("python", "-m", "holdfast_trainer.supervise", "--", "true"),
    "holdfast_trainer --help": ("python", "-m", "holdfast_trainer", "--help"),
    "import holdfast_controller.api.app": ("python", "-c", "import holdfast_controller.api.app"),
    "import torch": ("python", "-c", "import torch"),
    "import torchrun": ("python", "-c", "import torch.distributed.run"),
    "import holdfast_trainer.train": ("python", "-c", "import holdfast_trainer.train"),
}


def timed(command: Sequence[str]) -> Measure:
    """Runs a tool of .venv to its end. Raises ReportError with its output where it fails."""

    def measure() -> Mapping[str, float]:
        words = [str(BIN / command[0]), *command[1:]]
        began = time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise ReportError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr[-500:]}")
        return {"start to exit": seconds}

    return measure


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="samples of each subject (default 5)")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds {rounds}: at least 1 is needed")
    refuse_unwritable(parser)

    console = Console()
    report = Report("startup")
    subjects = {name: timed(command) for name, command in COMMANDS.items()}
    with console.status("") as status:
        take_turns(report, subjects, {"start to exit": "s"}, rounds=rounds, heard=status.update)
    for name, subject in (
        ("cli_help_vs_bare_python", "holdfast --help"),
        ("supervise_vs_bare_python", "supervise -- true"),
    ):
        report.ratio(name, "start to exit", subject, BARE)
    report.ratio("train_vs_torch", "start to exit", "import holdfast_trainer.train", "import torch")
    report.finish(console)
    return 0


if __name__ == "__main__":
    sys.exit(run("startup", main))
