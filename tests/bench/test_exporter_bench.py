"""bench/exporter: what it starts ends with it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from bench.exporter import SIZES
from bench.report import ROOT
from processes import Processes
from waiting import wait_until


def started(by: int) -> list[psutil.Process]:
    """The exporter's have no more environment than it gives them, so no mark."""
    return psutil.Process(by).children(recursive=True)


def test_sigterm_leaves_neither_processes_nor_files(processes: Processes) -> None:
    command = [sys.executable, "-m", "bench.exporter", "--rounds", "1000"]
    first, *_ = SIZES
    with TemporaryDirectory(prefix="hf") as place:  # a socket's path may not be as long as one of pytest's
        bench = processes.start(command, env={"TMPDIR": place}, cwd=ROOT, stdout=-1, stderr=-1)
        try:
            wait_until(
                lambda: bench.poll() is not None or len(started(bench.pid)) > first[1] + 1,
                "ranks and an exporter to run",
            )
            there = started(bench.pid) if bench.poll() is None else []
        finally:
            bench.terminate()
        _, told = bench.communicate(timeout=60)
        assert bench.returncode == 128 + signal.SIGTERM, told
        assert "Traceback" not in told
        assert there
        assert [one for one in there if one.is_running()] == []
        assert list(Path(place).iterdir()) == []
