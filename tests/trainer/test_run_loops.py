"""However a loop over `run.steps` is written, and wherever it is left, each of its steps is done once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from gangs import NOTICE, Workshop

from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.steps_left import StepsLeft

EPOCHS = Path(__file__).parent / "epochs_script.py"


OVER_RANGE = """
import sys
import numpy as np
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
begin = run.track(model=model, optimizer=optimizer)
for step in range(begin, 3) if sys.argv[1] != "a fraction" else run.steps(np.ceil(5 / 2)):
    model(torch.ones(1, 2)).sum().backward()
    if sys.argv[1] == "and tells":
        run.log(loss=1.0)
    optimizer.step()
if sys.argv[1] == "a fraction":
    for step in run.steps(7 / 2):
        pass
"""


def test_a_loop_that_is_none_over_run_steps_is_told_what_it_lacks(workshop: Workshop, tmp_path: Path) -> None:
    """It ended well with nothing saved, and without a word, or was told to "add up the parts" of a loss. Of a
    number of steps that is no whole one all that it told of itself was refused."""
    script = tmp_path / "over_range.py"
    script.write_text(OVER_RANGE)
    gang = workshop.start("range", script=script, arguments=["says nothing"])
    assert gang.wait() == [0], gang.texts()
    assert gang.texts().count("an optimizer takes steps outside of `for step in run.steps(...)`") == 1
    gang = workshop.start("tells", script=script, arguments=["and tells"])
    assert gang.wait() == [1]
    assert "RuntimeError: run.log(loss=...) tells of a step: call it in a loop over run.steps" in gang.texts()
    gang = workshop.start("fraction", script=script, arguments=["a fraction"])
    assert gang.wait() == [1]
    assert "TypeError: 'float' object cannot be interpreted as an integer" in gang.texts()
    told = gang.termination().progress
    assert told is not None
    assert (told.step, told.total_steps) == (3, 3)
    assert "outside of" not in gang.texts()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_left_early_is_finished_with_what_it_did(workshop: Workshop, ranks: int) -> None:
    """`break` after the optimizer's turn: that step is done, and its state is what is saved."""
    whole = workshop.finish("whole", ranks=ranks, steps=13)
    history = workshop.finish(ranks=ranks, steps=40, break_at=12)
    assert (history.stop()["step"], history.stop()["durable_step"]) == (13, 13)
    assert history.losses() == whole.losses()
    assert history.stop()["digest"] == whole.stop()["digest"]


def test_a_loop_over_epochs_breaks_off_each_and_goes_on_with_the_step_after_it(workshop: Workshop) -> None:
    """That step was done again, on a state that it had changed, or ended the run: its loss was told.
    What is done between two epochs, such as a validation, is of the state after it, and no part of it."""
    for name in ("whole", "epochs"):
        gang = workshop.start(name, ranks=2, script=EPOCHS, arguments=[name])
        assert gang.wait() == [0, 0], gang.texts()
    whole, epochs = workshop.history("whole"), workshop.history("epochs")
    assert epochs.losses() == whole.losses()
    assert sorted(epochs.losses()) == list(range(1, 13))
    assert epochs.validations() == {step: float(step).hex() for step in (4, 8, 12)}
    saved = [sorted(one.name for one in run.run.checkpoints.iterdir()) for run in (whole, epochs)]
    assert saved[0] == saved[1] == ["step-00000004", "step-00000008", "step-00000012"]
    assert all(line["data_seconds"] is None for line in epochs.steps())
    assert len(list((epochs.run.path / "tensorboard").iterdir())) == 1, (
        "a file of an attempt, however many loops"
    )


HELD = """
import sys
import torch
from holdfast_trainer.run import Run

class Held:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

run = Run()
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight)
held = Held(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
run.track(model=model, held=held)
for leaves_at in (int(sys.argv[1]), 6):
    for step in run.steps(6):
        held.optimizer.zero_grad()
        loss = model(torch.ones(1, 2) + step).square().sum()
        loss.backward()
        run.log(loss=loss)
        held.optimizer.step()
        if step == leaves_at:
            break
"""


def test_a_step_of_an_optimizer_within_a_part_is_not_done_twice_either(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Left after it, the loop did that step again, on a state that it had changed."""
    script = tmp_path / "held.py"
    script.write_text(HELD)
    whole = workshop.start("whole", script=script, arguments=["6"])
    gang = workshop.start(script=script, arguments=["3"])
    assert whole.wait() == gang.wait() == [0], gang.texts()
    assert gang.history.losses() == whole.history.losses()
    assert gang.history.stop()["digest"] == whole.history.stop()["digest"]


LOOKS_AND_LEAVES = """
import sys
import torch
from holdfast_trainer.run import Run

looks_at, every, last = (int(word) for word in sys.argv[1:])
run = Run()
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)

def train(leaves_at):
    for step in run.steps(last):
        loss = model(torch.ones(1, 2) + step).square().sum()
        run.log(loss=loss, tokens=5)
        loss.backward()
        if step == leaves_at:
            return
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()

train(looks_at)
if last == 6:
    train(-1)
"""


def test_a_step_that_was_left_before_it_changed_anything_is_done_anew(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The loop looks at its loss and breaks off; the next one does that step. It was told that it "has told
    its loss already: add up the parts", and its gradients would have counted twice."""
    script = tmp_path / "looks_and_leaves.py"
    script.write_text(LOOKS_AND_LEAVES)
    whole = workshop.start("whole", script=script, arguments=["-1", "1", "6"])
    gang = workshop.start(script=script, arguments=["3", "1", "6"])
    assert whole.wait() == gang.wait() == [0], gang.texts()
    assert gang.history.losses() == whole.history.losses()
    assert sorted(gang.history.losses()) == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in gang.history.steps()] == [5] * 6
    assert gang.history.stop()["digest"] == whole.history.stop()["digest"]


def test_a_step_that_was_left_amid_gradients_that_add_up_is_not_done_twice(
    workshop: Workshop, tmp_path: Path
) -> None:
    """They are the sum of its own and of those before, so it cannot be done anew: the next loop says so, and
    where there is none the next resume."""
    script = tmp_path / "looks_and_leaves.py"
    script.write_text(LOOKS_AND_LEAVES)
    gang = workshop.start("two loops", script=script, arguments=["4", "3", "6"])
    assert gang.wait() == [1]
    assert "RuntimeError: step 5 was left after it had added to the gradients that optimizer" in gang.texts()
    assert workshop.finish(script=script, arguments=["4", "3", "5"]).stop()["step"] == 4
    resumed = workshop.finish(script=script, arguments=["-1", "3", "7"])
    told = resumed.events("attempt_start", 2)[0]
    assert told["resumed_step"] == 4
    assert told["differences"] == ["not deterministic: gradients that optimizer adds up"]


COUNTS_EACH_EPOCH = """
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for epoch in range(3):
    for step in run.steps(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def test_a_loop_that_asks_for_the_steps_of_an_epoch_again_is_told_what_they_count(
    workshop: Workshop, tmp_path: Path
) -> None:
    """It trained for one epoch of three, and ended well without a word."""
    script = tmp_path / "counts_each_epoch.py"
    script.write_text(COUNTS_EACH_EPOCH)
    gang = workshop.start(script=script)
    assert gang.wait() == [0], gang.texts()
    assert gang.texts().count("run.steps(4) has no step left, as a loop over these has ended before") == 1
    assert "Where each epoch has a loop, ask for (epoch + 1) * 4" in gang.texts()


NESTED = """
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)

def train(step):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

epoch = iter(run.steps(6))
for step in epoch:
    train(step)
    if step == 2:
        break  # and `epoch` is kept
try:
    for step in run.steps(6):
        train(step)
except RuntimeError as error:
    print(error, flush=True)
epoch.close()
for step in run.steps(6):
    print("goes on with", step, flush=True)
    train(step)
"""


def test_a_loop_in_a_loop_that_was_not_left_does_no_step_twice(workshop: Workshop, tmp_path: Path) -> None:
    """An iterator that somebody holds on to is not left by `break`: its step was done once more."""
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    gang = workshop.start(script=script)
    assert gang.wait() == [0], gang.texts()
    assert "is under way, and a step in it would be done twice: leave that one first" in gang.texts()
    assert [f"goes on with {step}" in gang.texts() for step in range(6)] == [False] * 3 + [True] * 3
    assert gang.history.stop()["step"] == 6


BAR = """
import sys
import time
import torch
from holdfast_trainer.run import Run

class Bar:  # as tqdm
    def __init__(self, iterable):
        self.iterable = iterable
    def __iter__(self):
        for one in self.iterable:
            yield one

run = Run(checkpoint_every=100)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
bar = Bar(run.steps(10))
for step in bar:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 5:
        break
if sys.argv[1] == "goes on":
    for step in bar:
        print("goes on with", step, flush=True)
if sys.argv[1] == "tests":
    for batch in run.interruptible(range(10**6)):
        print("tests", batch, flush=True)
        time.sleep(0.05)
if sys.argv[1] == "waits":
    print("the loop is watched:", run._watchdog.quiet()[1] is not None, flush=True)
"""


@pytest.mark.parametrize("then", ["waits", "goes on", "tests"])
def test_a_loop_over_a_bar_that_is_kept_in_a_variable_is_left_by_break(
    workshop: Workshop, tmp_path: Path, then: str
) -> None:
    """It passed for under way: what followed it counted as a step that hangs, and a notice in a test after it
    waited for the step's end, in vain, so that no step of the attempt was saved."""
    script = tmp_path / "bar.py"
    script.write_text(BAR)
    gang = workshop.start(script=script, arguments=[then])
    if then == "tests":
        gang.wait_for_text("tests 1")
        gang.signal(NOTICE)
    assert gang.wait() == [0], gang.texts()
    told, steps = gang.termination(), 10 if then == "goes on" else 6
    assert told.outcome == ("interrupted" if then == "tests" else "finished")
    assert (told.step, told.durable_step) == (steps, steps)
    if then == "waits":
        assert "the loop is watched: False" in gang.texts()
    assert [f"goes on with {step}" in gang.texts() for step in (5, 6)] == [False, then == "goes on"]


def test_steps_that_are_asked_for_one_by_one_are_of_one_loop_until_that_is_closed() -> None:
    """By `next`, which begins it and does not say when it ends; a `for` over what is left goes on with it."""
    loops: list[str] = []

    def loop() -> Generator[int]:
        loops.append("begun")
        try:
            yield from range(4)
        finally:
            loops.append("left")

    steps = StepsLeft(loop)
    steps.close()  # nothing was begun
    assert (next(steps), next(steps)) == (0, 1)
    assert list(steps) == [2, 3]
    assert (loops, next(steps, None)) == (["begun", "left"], None)
    steps.close()
    assert next(steps) == 0
    steps.close()
    assert loops == ["begun", "left"] * 2
    assert [list(steps) for _ in range(2)] == [[0, 1, 2, 3]] * 2, "each `for` has its own"


FORKS = """
import os, sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
model = torch.nn.Linear(1, 1)
run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
for step in run.steps(4):
    child = os.fork()
    if child == 0:
        sys.exit(3)  # unwinds the loop, as it would an interpreter's
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print("all steps are done")
"""


def test_a_child_that_is_forked_in_a_loop_leaves_it_without_a_trace(
    workshop: Workshop, tmp_path: Path
) -> None:
    """It waited for ever for a thread that only its parent has."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [0], gang.texts()
    assert gang.ranks[0].text().count("all steps are done") == 1
    assert gang.history.stop()["outcome"] == "finished"


FOLDS = """
import torch
from holdfast_trainer.run import Run

for fold in range(2):
    run = Run(run_dir=f"fold-{fold}")
    model = torch.nn.Linear(1, 1)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    done = sum(1 for step in run.steps(3))
    print("steps of this fold:", done)
"""


def test_a_second_training_in_one_process_does_not_take_the_first_ones_checkpoints_for_its_own(
    workshop: Workshop, tmp_path: Path
) -> None:
    """As a job has one run directory, the second fold was resumed at its end, and did no step."""
    script = tmp_path / "folds.py"
    script.write_text(FOLDS)
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    assert gang.ranks[0].text().count("steps of this fold: 3") == 1
    error = gang.termination(0).error
    assert "this process has a Run in" in error
    assert "HOLDFAST_RUN_DIR names it for the whole job, so make each training a job" in error

    alone = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert alone.stdout.count("steps of this fold: 3") == 2


RESTORES = """
import sys
import copy
import torch
from holdfast_trainer.run import Run

run = Run()
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
best = copy.deepcopy(model.state_dict())
for step in run.steps(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    if step == 4:
        break
if sys.argv[1] == "best":
    model.load_state_dict(best)
"""


@pytest.mark.parametrize("what", ["best", "last"])
def test_weights_that_are_put_back_after_early_stopping_are_told_to_be_no_steps(
    workshop: Workshop, tmp_path: Path, what: str
) -> None:
    """The last save is made as the program ends: of the best weights with the optimizer of the last step. Who
    went on to more steps trained on from there without a word."""
    script = tmp_path / "restores.py"
    script.write_text(RESTORES)
    first = workshop.start(script=script, arguments=[what, "9"])
    assert first.wait() == [0], first.texts()
    history = workshop.finish(script=script, arguments=[what, "7"])
    told = ["not deterministic: values that models were given after the end"] if what == "best" else []
    assert history.events("attempt_start", 2)[0]["differences"] == told
    assert history.events("attempt_start", 2)[0]["resumed_step"] == 5
