"""Which checkpoints stay: those kept for good, and the best by validation loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from gangs import Workshop
from gpt_runs import start, write_config


def test_what_is_to_be_kept_is_saved_whatever_the_cadence(workshop: Workshop) -> None:
    """Round steps for good, and the best by validation; by the clock none of these would be saved."""
    options = {"save_every": "1000s", "keep": 1, "keep_every": 10, "keep_best": 1, "validate_every": 7}
    history = workshop.finish(ranks=2, steps=30, **options)
    losses = {step: float.fromhex(loss) for step, loss in history.validations().items()}
    assert sorted(losses) == [7, 14, 21, 28]
    best = min(losses, key=lambda step: losses[step])
    assert {step for step in range(31) if history.run.checkpoint(step).exists()} == {10, 20, 30, best}


@pytest.mark.parametrize("last_is_best", [True, False])
def test_a_validation_after_the_last_step_is_weighed_too(workshop: Workshop, last_is_best: bool) -> None:
    """It comes when that step is durable; with two to stay for their loss, the worst of three goes."""
    options = {"save_every": "1000s", "keep": 1, "keep_best": 2, "validate_every": 7}
    last_loss = 0.0 if last_is_best else 1e9
    history = workshop.finish(ranks=2, steps=30, **options, last_loss=last_loss)
    losses = {step: float.fromhex(loss) for step, loss in history.validations().items()}
    assert sorted(losses) == [7, 14, 21, 28, 30]
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert (30 in best) is last_is_best
    assert {step for step in range(31) if history.run.checkpoint(step).exists()} == {*best, 30}


def test_the_best_stays_the_best_where_a_run_that_had_ended_gets_more_steps(workshop: Workshop) -> None:
    """Its loss came after its save, so no manifest has it, and the steps that were added removed it."""
    options = {"save_every": "1000s", "keep": 1, "keep_best": 1, "validate_every": 7}
    history = workshop.finish(steps=30, **options, last_loss=0.0)
    assert {step for step in range(31) if history.run.checkpoint(step).exists()} == {30}
    history = workshop.finish(steps=45, **options)
    assert {step for step in range(46) if history.run.checkpoint(step).exists()} == {30, 45}


LEFT_AND_VALIDATED = """
import torch
from holdfast_trainer.run import Run

run = Run()
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(9):
    loss = model(torch.ones(1, 2)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    if step == 4:
        break
if run.rank == 0:
    run.log(val_loss=0.5)
"""


def test_rank_0_alone_may_tell_a_validation_loss_of_a_loop_that_was_left(
    workshop: Workshop, tmp_path: Path
) -> None:
    script = tmp_path / "left_and_validated.py"
    script.write_text(LEFT_AND_VALIDATED)
    history = workshop.finish(ranks=2, script=script)
    assert list(history.validations()) == [5]
    assert (history.stop()["step"], history.stop()["durable_step"]) == (5, 5)


VALIDATES_AT_THE_BOTTOM = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every="1000s", keep=1, keep_best=1, validate_every=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[1])):
    loss = model(torch.ones(1, 2)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    if (step + 1) % 2 == 0:
        run.log(val_loss=abs(step + 1 - 4))
"""


def test_a_validation_at_the_bottom_of_a_step_is_of_the_state_after_it(
    workshop: Workshop, tmp_path: Path
) -> None:
    """It was told of the step before, of which there is no checkpoint: the best one was removed. The next
    attempt knows the best one too, though that was the last to be saved."""
    script = tmp_path / "validates_at_the_bottom.py"
    script.write_text(VALIDATES_AT_THE_BOTTOM)
    workshop.finish(script=script, arguments=["4"])
    history = workshop.finish(script=script, arguments=["9"])
    assert sorted(history.validations()) == [2, 4, 6, 8]
    assert [step for step in range(10) if history.run.checkpoint(step).exists()] == [4, 9]


def test_losses_of_other_batches_are_said_to_be_no_measure_of_the_best(
    workshop: Workshop, tmp_path: Path
) -> None:
    """They were compared without a word: of a loss over other text lower is not better."""
    file, told = write_config(tmp_path), "before this it was validation.batches=2: which checkpoints are the"
    for batches in (2, 2, 3):
        settings = ["train.steps=10", "checkpoint.keep_best=1", f"validation.batches={batches}"]
        gang = start(workshop, file, *settings)
        assert gang.wait() == [0], gang.texts()
        assert (told in gang.ranks[0].text()) == (batches == 3)
    assert "may not be bit-exact" not in gang.ranks[0].text(), "it trains on as before"
