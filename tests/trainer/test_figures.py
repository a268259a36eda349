"""An interval's report: memory and epoch are in the log, in /progress and for TensorBoard, and true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gangs import Workshop
from gpt_runs import start, write_config

from holdfast_trainer.contract import Progress, Termination
from holdfast_trainer.footprint import peak_memory
from holdfast_trainer.steplog import figures_of
from holdfast_trainer.telemetry import StepFigures, Telemetry


def test_memory_is_what_the_kernel_says_was_resident_at_most() -> None:
    before = peak_memory(torch.device("cpu"))
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM")]
    assert before == pytest.approx(int(line.split()[1]) * 1024, rel=0.05)


def test_a_training_tells_how_often_it_went_through_its_data(workshop: Workshop, tmp_path: Path) -> None:
    """624 windows of 16 tokens and 96 a step: an epoch is six and a half steps, whatever attempt did them."""
    words = ["train.global_batch=96", "train.steps=13", "optim.warmup_steps=1", "validation.every=0"]
    words += ["train.micro_batch=48", "train.tensorboard=true", "train.log_every=1", "model.dropout=0"]
    gang = start(workshop, write_config(tmp_path), *words)
    assert gang.wait(300) == [0], gang.texts()
    word = Termination.from_json((gang.history.run.path.parent / "run-1" / "rank-0.termination").read_text())
    assert word is not None
    assert word.progress is not None
    assert word.progress.epoch == pytest.approx(13 * 96 / 624)
    memory = word.progress.memory_bytes or 0
    assert memory > 100e6, "Python and torch alone take more"
    (said,) = [line for line in gang.texts().splitlines() if "step 13: loss " in line]
    done = 12 * 96 / 624  # the line is written within step 13
    assert re.search(rf"tokens/s, MFU \d+%, [\d.]+ GB, epoch {done:.2f}, \d+ s left", said), said
    (board,) = (gang.history.run.path / "tensorboard").iterdir()
    assert b"epoch" in board.read_bytes()
    assert b"memory, at most" in board.read_bytes()


def test_what_nobody_told_is_no_figure() -> None:
    telemetry = Telemetry(1, 1)
    telemetry.begin(0, 10, 0, None, None)
    telemetry.step(1, StepFigures(1.0, 1.0, 10, 1))
    assert telemetry.progress.epoch is None
    assert "epoch" not in telemetry.summary()
    assert not {"epoch", "memory, at most"} & set(figures_of(telemetry.progress))
    telemetry.memory(3_000_000_000)
    telemetry.steps_an_epoch = 4.0
    telemetry.step(2, StepFigures(1.0, 1.0, 10, 1))
    assert telemetry.progress.epoch == 0.5
    assert telemetry.summary() == "10 tokens/s, 3.00 GB, epoch 0.50, 8 s left"
    assert isinstance(telemetry.progress, Progress)
    assert telemetry.registry.get_sample_value("holdfast_epoch") == 0.5
    assert telemetry.registry.get_sample_value("holdfast_memory_peak_bytes") == 3e9
