"""The benchmark of checkpoints runs, measures every subject, and computes its ratios from the rows beside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.checkpoint import LIMITS, OURS, PEERS, VARIANTS
from bench.report import ROOT
from processes import Processes

RATIOS = {
    "stall_vs_dcp_async",
    "stall_vs_copy_limit",
    "stall_vs_torch_save",
    "synchronous_vs_overlapped_stall",
    "synchronous_vs_overlapped_step_after",
    "process_vs_threads_stall",
    "process_vs_threads_durable",
    "process_vs_threads_durable_while_training",
    "process_vs_threads_step_after",
    "throughput_after_save",
    "durable_vs_disk_limit",
    "durable_while_training_vs_disk_limit",
    "load_vs_read_limit",
    "peak_memory_vs_state",
}


def bench(processes: Processes, *arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "bench.checkpoint", *map(str, arguments)]
    process = processes.start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=1700)
    return process.returncode, out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_subject_is_measured(processes: Processes, tmp_path: Path) -> None:
    status, out = bench(
        processes, "--small", "--variants", "--place", tmp_path / "disk", "--out", tmp_path / "out"
    )
    assert status == 0, out
    body = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    subjects = (LIMITS, OURS, *VARIANTS, *PEERS)
    assert {row["subject"] for row in body["rows"]} == {f"{name} tiny" for name in subjects}
    assert set(body["ratios"]) == RATIOS
    figures = {(row["subject"], row["metric"]): row["median"] for row in body["rows"]}
    ours = figures[f"{OURS} tiny", "stall"]
    assert body["ratios"]["stall_vs_torch_save"] == ours / figures["torch.save tiny", "stall"]
    assert all(figures[f"{name} tiny", "durable"] > 0 for name in (OURS, *PEERS))
    assert list((tmp_path / "disk").iterdir()) == [], "what was written is removed"


def test_no_round_is_no_measurement(processes: Processes) -> None:
    status, out = bench(processes, "--rounds", "0")
    assert status == 2
    assert "--rounds 0: at least 1 is needed" in out
