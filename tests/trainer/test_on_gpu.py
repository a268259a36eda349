"""On a real GPU, where there is one: a training under torchrun is killed and given notice, and ends with the
bits of its twin that nobody touched; tune says what only a GPU has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from gangs import History
from gpt_runs import write_config
from gpus import gpu
from processes import Processes
from waiting import wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer.contract import RunDir

__all__ = ["gpu"]

pytestmark = pytest.mark.slow

STEPS = 1200
"""Of which enough are left when one of the first hundreds is hit."""


@dataclass
class Runs:
    """Runs of one configuration, an attempt at a time, as the engines start them: torchrun, a forked rank."""

    processes: Processes
    path: Path
    config: Path
    words: tuple[str, ...]
    env: Mapping[str, str]

    def history(self, run: str) -> History:
        return History(RunDir(self.path / run))

    def start(self, run: str, attempt: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "holdfast_trainer.torchrun", "--nnodes=1", "--node-rank=0"]
        command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command += ["--monitor-interval=0.1", "--shutdown-timeout=60", "--", "--die-with-parent", "--"]
        command += [sys.executable, "-m", "holdfast_trainer", "train", "--config", str(self.config)]
        env = {
            "HOLDFAST_RUN_DIR": str(self.path / run),
            "HOLDFAST_ATTEMPT": str(attempt),
            "HOLDFAST_GRACE_SECONDS": "60",
            **self.env,
        }
        with open(self.log(run, attempt), "w") as log:
            words = [*command, *self.words]
            return self.processes.start(words, env=env, stdout=log, stderr=subprocess.STDOUT)

    def log(self, run: str, attempt: int) -> Path:
        return self.path / f"{run}-{attempt}.log"

    def reaches(self, run: str, attempt: int, step: int) -> None:
        there = self.history(run)
        wait_until(lambda: there.last_step(attempt) >= step, f"step {step}; see {self.log(run, attempt)}")

    def finishes(self, run: str, attempt: int, started: subprocess.Popen[str]) -> dict[str, Any]:
        assert started.wait(600) == 0, self.log(run, attempt).read_text()[-4000:]
        stop = self.history(run).stop(attempt)
        assert (stop["outcome"], stop["step"]) == ("finished", STEPS)
        return stop


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_killed_and_given_notice_a_gpu_run_is_the_untouched_one(
    precision: str, gpu: dict[str, str], processes: Processes, tmp_path: Path
) -> None:
    words = (f"train.precision={precision}", f"train.steps={STEPS}", "train.micro_batch=6")
    words += ("validation.every=100", "checkpoint.every=40")
    runs = Runs(processes, tmp_path, write_config(tmp_path), words, gpu)
    twin = runs.finishes("twin", 1, runs.start("twin", 1))

    killed = runs.start("run", 1)
    runs.reaches("run", 1, 100)
    for process in [*psutil.Process(killed.pid).children(recursive=True), psutil.Process(killed.pid)]:
        process.kill()
    killed.wait()

    noticed = runs.start("run", 2)
    runs.reaches("run", 2, 300)
    noticed.send_signal(signal.SIGTERM)
    noticed.wait(120)
    stop = runs.history("run").stop(2)
    assert (stop["outcome"], stop["durable_step"]) == ("interrupted", stop["step"]), "nothing is lost"

    last = runs.finishes("run", 3, runs.start("run", 3))
    assert runs.history("run").losses() == runs.history("twin").losses()
    assert runs.history("run").validations() == runs.history("twin").validations()
    assert last["digest"] == twin["digest"]
    assert "cuda" in runs.log("run", 3).read_text(), "it computed on the GPU"


def test_tune_tells_what_tf32_buys(gpu: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast_trainer", "tune", str(write_config(tmp_path)), "-o=json"]
    command += ["--rounds=1", "--steps=1", "--seconds=0", "--no-compile", f"--out={tmp_path / 'out'}"]
    tuning = subprocess.run(command, env={**os.environ, **gpu}, capture_output=True, text=True, check=False)
    assert tuning.returncode == 0, tuning.stderr
    speeds = {row["name"]: row["median"] for row in json.loads(tuning.stdout)["rows"]}
    if "TF32" not in speeds:
        pytest.skip("needs a GPU with TF32: compute capability 8.0 (Ampere)")
    assert speeds["TF32"] > 0
    assert speeds["all on but TF32"] > 0
