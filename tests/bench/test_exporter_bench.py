"""bench/exporter: what it starts ends with it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
from bench.exporter import SIZES
from bench.report import ROOT
from processes import Processes
from waiting import wait_until


def started(by: int) -> list[psutil.Process]:
    """The exporter's have no more environment than it gives them, so no mark."""
    return psutil.Process(by).children(recursive=True)


def test_sigterm_leaves_neither_processes_nor_files(processes: Processes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.exporter", "--rounds", "1000"]
    bench = processes.start(command, env={"TMPDIR": str(tmp_path)}, cwd=ROOT, stdout=-1, stderr=-1)
    first, *_ = SIZES
    try:
        wait_until(lambda: len(started(bench.pid)) > first[1] + 1, "ranks and an exporter to run", 60)
        there = started(bench.pid)
    finally:
        bench.terminate()
    _, told = bench.communicate(timeout=60)
    assert bench.returncode == 128 + signal.SIGTERM, told
    assert "Traceback" not in told
    assert [one for one in there if one.is_running()] == []
    assert list(tmp_path.iterdir()) == []
