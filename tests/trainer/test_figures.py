"""An interval's report: memory and epoch are in the log, in /progress and for TensorBoard, and true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gangs import Workshop
from gpt_runs import start, write_config

from holdfast_trainer.contract import Progress, Termination
from holdfast_trainer.epochs import Epoch, Epochs
from holdfast_trainer.footprint import peak_memory
from holdfast_trainer.sizes import share_text
from holdfast_trainer.steplog import figures_of
from holdfast_trainer.telemetry import StepFigures, Telemetry
from holdfast_trainer.verdict import Interval


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
    rates = r"[\d,.]+ ms a step, [\d,]+ tokens/s, [\d,.]+ samples/s, MFU [\d.]+%"
    left = rf"[\d.]+ GB, epoch {done:.2f}, \d+ s left"
    loss = f"{float.fromhex(gang.history.losses()[12]):.4f} of step 12"
    assert re.search(rf"step 13: loss {loss}, {rates}, (CPU \d+% busy, )?{left}", said), said
    epochs = {line["step"]: line for line in gang.history.steps() if "epoch" in line}
    assert {step: (line["epoch"], line["epoch_steps"]) for step, line in epochs.items()} == {
        7: (1, 7),
        13: (2, 6),
    }
    losses = [line["loss"] for line in gang.history.steps()]
    assert epochs[13]["epoch_loss"] == pytest.approx(sum(losses[7:]) / 6)
    assert epochs[7]["epoch_samples"] == 7 * 96
    assert re.search(
        r"epoch 1, its 7 steps: loss [\d.]+, [\d.]+ s, [\d,]+ tokens/s, .*MFU [\d.]+%, CPU \d+% busy",
        gang.texts(),
    )
    assert all(0 < line["epoch_cpu_utilization"] < 4 for line in epochs.values()), epochs
    (board,) = (gang.history.run.path / "tensorboard").iterdir()
    assert b"epoch" in board.read_bytes()
    assert b"memory, at most" in board.read_bytes()


TWO_LOOPS = """
import time
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
run.steps_an_epoch = 2
def train(total):
    for step in run.steps(total):
        with run.span("data"):
            batch = torch.ones(3, 2)
        model(batch).sum().backward()
        optimizer.step()
        run.log(tokens=6, samples=3)
train(4)
with run.span("data"):  # an hour of another's
    seconds = time.perf_counter
    time.perf_counter = lambda: seconds() + 3600
train(8)
"""


def test_an_hour_between_two_loops_is_no_step_s(workshop: Workshop, tmp_path: Path) -> None:
    script = tmp_path / "two_loops.py"
    script.write_text(TWO_LOOPS)
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [0], gang.texts()
    now = gang.termination().progress
    assert now is not None
    assert (now.step, now.phase) == (8, "finished")
    assert (now.step_seconds or 0) < 3600 / 8
    assert (now.tokens_per_second or 0) > 8 * 6 / 3600
    assert (now.data_wait_fraction or 0) <= 1
    told = {line["step"]: line["epoch_seconds"] for line in gang.history.steps() if "epoch_seconds" in line}
    assert sorted(told) == [2, 4, 6, 8]
    assert sum(told.values()) < 3600


LEFT_IN_AN_EPOCH = """
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.steps_an_epoch = 6
run.track(model=model, optimizer=optimizer)
while run.step < 12:
    for step in run.steps(12):
        loss = model(torch.ones(3, 2)).sum() * 0 + step
        loss.backward()
        optimizer.step()
        run.log(loss=loss, samples=3)
        if step % 4 == 3:
            break
    run.log(val_loss=1.0)
"""


def test_an_epoch_in_which_a_loop_was_left_and_gone_on_with_is_told_whole(
    workshop: Workshop, tmp_path: Path
) -> None:
    """For a validation at every fourth step, say. Of the first epoch two steps were told: the others had been
    done by attempts before, of which there were none."""
    script = tmp_path / "left.py"
    script.write_text(LEFT_IN_AN_EPOCH)
    history = workshop.finish(script=script, arguments=[])
    told = [line for line in history.steps() if "epoch" in line]
    assert [(line["epoch"], line["epoch_steps"], line["epoch_samples"]) for line in told] == [
        (1, 6, 18),
        (2, 6, 18),
    ]
    assert [line["epoch_loss"] for line in told] == [2.5, 8.5]


@pytest.mark.parametrize(
    ("length", "done", "told"),
    [
        pytest.param(3.0, 0, [(3, 1, 3, True), (6, 2, 3, True)], id="whole steps"),
        pytest.param(2.5, 0, [(3, 1, 3, True), (5, 2, 2, True)], id="a step of two epochs is of the first"),
        pytest.param(3.0, 4, [(6, 2, 2, False)], id="some were done by attempts before"),
        pytest.param(3.0, 3, [(6, 2, 3, True)], id="one had just ended"),
        pytest.param(0.5, 4, [(5, 10, 1, True), (6, 12, 1, True)], id="several in a step: the last"),
        pytest.param(0.1 * 3, 0, [(n, int(n / 0.3 + 1e-9), 1, True) for n in range(1, 7)], id="a float"),
    ],
)
def test_the_figures_of_an_epoch_are_of_its_steps(
    length: float, done: int, told: list[tuple[int, int, int, bool]]
) -> None:
    epochs = Epochs(length, done)
    ended = [(step, epochs.add(step, 2.0, 100, 10, float(step))) for step in range(done + 1, 7)]
    found = [(step, one) for step, one in ended if one is not None]
    assert [(step, one.number, one.steps, one.whole) for step, one in found] == told
    for step, one in found:
        assert (one.seconds, one.tokens, one.samples) == (2.0 * one.steps, 100 * one.steps, 10 * one.steps)
        assert one.loss == step - (one.steps - 1) / 2


def test_what_is_told_of_an_epoch() -> None:
    begun_before = Epoch(2, 4, False, 8.0, 4000, 80, 1.25)
    assert begun_before.sentence(val_loss=1.5, mfu=0.41, memory_bytes=3_000_000_000) == (
        "epoch 2, 4 of its steps (the others were done by attempts before): loss 1.2500, "
        "validation loss 1.5000, 8.0 s, 500 tokens/s, 10.0 samples/s, MFU 41%, 3.00 GB"
    )
    assert replace(begun_before, busy=("gpu", 0.934)).sentence(mfu=0.41).endswith("MFU 41%, GPU 93% busy")
    assert replace(begun_before, busy=("gpu", 0.934)).fields["epoch_gpu_utilization"] == 0.934
    nothing_told = Epoch(1, 3, True, 1.5, 0, 0, None)
    assert nothing_told.sentence() == "epoch 1, its 3 steps: 1.5 s"
    assert "epoch_loss" not in nothing_told.fields


def test_the_time_left_has_the_validations_and_saves_that_are_to_come_and_no_others() -> None:
    """Steps of a tenth of a second, validated every 100th for 20 seconds, saved every 250th for 5: after one
    validation it is off by less than another one, in the steps after it as in those where it is long ago."""
    telemetry, total = Telemetry(1, 1), 5000
    telemetry.begin(0, total, 0, None, None)
    between = {n: {"validation": 20.0} for n in range(100, total, 100)}
    for n in range(250, total, 250):
        between[n] = between.get(n, {}) | {"checkpoint": 5.0}
    walls = [0.1 + sum(between.get(n, {}).values()) for n in range(total)]
    walls[0] = 60.0  # compiles
    off = []
    for done, wall in enumerate(walls, 1):
        telemetry.step(done, wall, wall)
        telemetry.timed(wall, between.get(done - 1, {}))
        assert telemetry.progress.eta_seconds is not None
        off.append(telemetry.progress.eta_seconds - sum(walls[done:]))
    assert off[-1] == 0
    assert off[50] == pytest.approx(-sum(sum(body.values()) for body in between.values())), (
        "none has come yet"
    )
    assert max(map(abs, off[251:])) < 26


@pytest.mark.parametrize("first", [0, 1, 10, 50, 100])
def test_the_time_left_is_right_wherever_an_attempt_began_between_two_validations(first: int) -> None:
    """After a resume just before one the time left was 38 times too long, then 1.4 times until the third. A
    save goes on in the step after that in which it began."""
    total, own = 5000, 1.0
    telemetry = Telemetry(2, 1)
    telemetry.begin(0, total, 0, None, None)
    between: dict[int, dict[str, float]] = {n: {"validation": 60.0} for n in range(first, total, 100)}
    for n in range(first, total, 250):
        between[n] = between.get(n, {}) | {"checkpoint": 2.0}
        between[n + 1] = between.get(n + 1, {}) | {"checkpoint": 1.0}
    walls = [own + sum(between.get(n, {}).values()) for n in range(total)]
    for done in range(1, first + 600):
        telemetry.step(done, walls[done - 1], walls[done - 1])
        telemetry.timed(walls[done - 1], between.get(done - 1, {}))
        shown, left = telemetry.progress.eta_seconds, sum(walls[done:])
        assert shown is not None
        if first < done <= first + 100:
            assert shown < 3 * left, "one came, and nobody knows how often more do"
        elif done > first + 251:
            assert shown == pytest.approx(left, rel=0.03), done


@pytest.mark.parametrize("came", [[1], [10, 20]])
def test_the_time_left_shrinks_where_no_validation_comes_any_more(came: list[int]) -> None:
    """Such as one of the untrained model alone, or of a script that validates as its loss falls."""
    telemetry = Telemetry(1, 1)
    telemetry.begin(0, 2000, 0, None, None)
    for done in range(1001):
        spans = {"validation": 100.0} if done in came else {}
        telemetry.step(done + 1, 1.0, wall := 1.0 + sum(spans.values()))
        telemetry.timed(wall, spans)
    assert telemetry.progress.eta_seconds == pytest.approx(999 + 100, rel=0.03)


@pytest.mark.parametrize(
    ("loss", "said"),
    [(2.94781, "2.9478"), (0.000123456, "0.0001235"), (0.0, "0.0000"), (12345.6, "1.235e+04")],
)
def test_a_small_loss_is_not_logged_as_none(loss: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(1, 1)
    telemetry.loss(loss, 7)
    assert telemetry.summary() == f"loss {said} of step 7"
    epoch = Epoch(number=1, steps=7, whole=True, seconds=1.0, tokens=0, samples=0, loss=loss)
    assert f"loss {said}, " in epoch.sentence(loss, None, None)
    assert f"validation loss {said}" in epoch.sentence(loss, None, None)


def test_a_small_share_or_rate_is_not_logged_as_none() -> None:
    """A tiny model on a large GPU had an MFU of 0 %, and one that takes a minute a sample 0.0 a second."""
    telemetry = Telemetry(1, 1)
    telemetry.begin(0, 10, 0, 2.0, 1000.0)
    telemetry.worked(StepFigures(60.0, 120, 1))
    telemetry.utilization("gpu", 0.004)
    assert telemetry.summary() == "2 tokens/s, 0.017 samples/s, MFU 0.4%, GPU 0.4% busy"
    epoch = Epoch(1, 7, True, 60.0, 0, 1, None, ("gpu", 0.004))
    assert epoch.sentence(mfu=0.004).endswith("60.0 s, 0.017 samples/s, MFU 0.4%, GPU 0.4% busy")
    assert Interval(1, 1.0, mfu=0.004).rate("GPU") == " at 0.4% of what the GPU can multiply"
    assert [share_text(share) for share in (0.0, 2e-5, 0.005, 0.934, 1.0)] == [
        "0%", "0.002%", "0.5%", "93%", "100%",
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [float("nan"), float("inf"), 0, -3])
def test_an_epoch_of_no_number_of_steps_is_refused(steps: float) -> None:
    with pytest.raises(ValueError, match=rf"run.steps_an_epoch is {steps}: give a number above 0, or None"):
        Epochs(steps, 0)


def test_what_nobody_told_is_no_figure() -> None:
    telemetry = Telemetry(1, 1)
    telemetry.begin(0, 10, 0, None, None)
    telemetry.step(1, 1.0, 1.0)
    telemetry.worked(StepFigures(1.0, 10, 1))
    assert telemetry.progress.epoch is None
    assert "epoch" not in telemetry.summary()
    assert not {"epoch", "memory, at most"} & set(figures_of(telemetry.progress))
    telemetry.memory(3_000_000_000)
    telemetry.steps_an_epoch = 4.0
    telemetry.step(2, 1.0, 1.0)
    telemetry.worked(StepFigures(1.0, 10, 1))
    telemetry.timed(1.0, {})
    assert telemetry.progress.epoch == 0.5
    assert telemetry.summary() == (
        "1,000.0 ms a step, 10 tokens/s, 1.0 samples/s, 3.00 GB, epoch 0.50, 8 s left"
    )
    assert isinstance(telemetry.progress, Progress)
    assert telemetry.registry.get_sample_value("holdfast_epoch") == 0.5
    assert telemetry.registry.get_sample_value("holdfast_memory_peak_bytes") == 3e9
