"""A command of the trainer in a process of its own, whose environment lacks what this one's was given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

TORCHRUN = ["--nproc-per-node=1", "--rdzv-backend=static", "--master-addr=127.0.0.1", "--max-restarts=0"]


def text_of(command: list[str], directory: Path, without: Collection[str], **given: str) -> str:
    """All that `python -m COMMAND` and its ranks print; it must end well. `given` is added to what is
    inherited, `without` is not inherited."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env={**inherited, **given},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
