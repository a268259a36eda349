"""However a rank ends, what it says of itself is true: finished, failed, refused."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from fresh_command import text_of
from gangs import NOTICE, Workshop
from processes import Processes
from waiting import wait_until

from holdfast_trainer.contract import EXIT_CONFIG_ERROR, Termination, raise_fence
from holdfast_trainer.steps_left import StepsLeft

EPOCHS = Path(__file__).parent / "epochs_script.py"


def test_finished(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=12)
    assert gang.wait() == [0, 0], gang.texts()
    assert [gang.termination(rank) for rank in (0, 1)] == [Termination("finished", 12, 12)] * 2
    assert gang.history.stop()["outcome"] == "finished"
    assert [line["step"] for line in gang.history.events("checkpoint")] == [5, 10, 12]


def test_started_again_after_its_end_it_does_no_step(workshop: Workshop) -> None:
    """What comes after the loop is done again, and draws what it drew: samples from the model, say."""

    def last_words(log: str) -> str:
        return next(line for line in log.splitlines() if "done, and would draw from" in line)

    first = workshop.start(steps=12)
    assert first.wait() == [0], first.texts()
    again = workshop.start(steps=12)
    assert again.wait() == [0], again.texts()
    history = again.history
    where = history.run.path
    told = f"all 12 steps were done before; to begin anew, use another run directory than {where}\n"
    assert again.texts().count(told) == 1, "it ended at once, and nobody knew why"
    assert (history.steps(2), history.events("checkpoint", 2)) == ([], [])
    assert history.stop(2)["digest"] == history.stop(1)["digest"]
    assert last_words(again.ranks[0].text()) == last_words(first.ranks[0].text())
    last = again.termination().progress
    assert last is not None
    assert (last.step, last.total_steps, last.eta_seconds) == (12, 12, 0), "its size is known all the same"


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


UNHEARD = """
import logging
from holdfast_trainer.run import Run
Run()
logging.getLogger("holdfast").info("in run-ş")
"""


def test_what_the_log_has_no_characters_for_is_escaped(tmp_path: Path) -> None:
    """As a trace's path under PYTHONIOENCODING=ascii: there was a traceback instead."""
    (tmp_path / "program.py").write_text(UNHEARD)
    text = text_of(["program"], tmp_path, (), PYTHONIOENCODING="ascii")
    assert "in run-\\u015f\n" in text
    assert "Traceback" not in text


def test_a_run_whose_standard_error_is_closed_trains(processes: Processes, tmp_path: Path) -> None:
    """As a starter of daemons leaves it: the run ended at once, and had no place to say why."""
    (tmp_path / "program.py").write_text(UNHEARD)
    command = ["sh", "-c", f"exec {sys.executable} program.py 2>&-"]
    program = processes.start(command, cwd=tmp_path, stdout=subprocess.PIPE)
    told, _ = program.communicate(timeout=60)
    assert (program.returncode, told) == (0, "[rank 0] in run-ş\n")


def test_a_run_whose_program_has_closed_standard_output_trains(processes: Processes, tmp_path: Path) -> None:
    """As one does that is a daemon: the run ended with an error of its own."""
    last = "print('nobody hears')\nprint('done', file=sys.stderr)\n"
    (tmp_path / "program.py").write_text(f"import sys\nsys.stdout.close()\n{UNHEARD}{last}")
    program = processes.start([sys.executable, "program.py"], cwd=tmp_path, stderr=subprocess.PIPE)
    _, told = program.communicate(timeout=60)
    assert (program.returncode, told) == (0, "done\n")


def test_an_exception_is_told_with_its_traceback(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=40, fail_at=13, fail_rank=1)
    assert gang.wait() == [1, 1], gang.texts()
    message = gang.termination(1)
    assert (message.outcome, message.step, message.durable_step) == ("failed", 13, 10)
    assert "Traceback" in message.error
    assert "ZeroDivisionError: the loss of this step is no number" in message.error
    assert not message.config_error
    failure = gang.history.events("failure")[0]
    assert (failure["rank"], failure["step"]) == (1, 13)
    assert "ZeroDivisionError" in failure["error"]
    assert gang.history.stop()["outcome"] == "failed"
    assert "ZeroDivisionError" in gang.ranks[1].text()
    assert workshop.finish(ranks=2, steps=20).events("attempt_start", 2)[0]["resumed_step"] == 10


OWN_GROUP = """
import torch.distributed
from holdfast_trainer.run import Run

run = Run()
torch.distributed.init_process_group("gloo")
raise ZeroDivisionError("in a loop that has a group of its own")
"""


def test_an_exception_is_told_where_the_loop_has_set_up_torch_distributed_itself(
    workshop: Workshop, tmp_path: Path
) -> None:
    """A single rank needs none, and a script made for many, or accelerate, sets one up. Its log was empty:
    torch gathers in memory what is printed then, until a hook returns that does not."""
    script = tmp_path / "own_group.py"
    script.write_text(OWN_GROUP)
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [1]
    assert "ZeroDivisionError: in a loop that has a group of its own" in gang.texts()


@pytest.mark.parametrize(
    ("fail_as", "status"), [("ZeroDivisionError", 1), ("data", EXIT_CONFIG_ERROR), ("disk", 1)]
)
def test_an_error_while_a_save_is_under_way_loses_nothing_of_it(
    workshop: Workshop, fail_as: str, status: int
) -> None:
    """What is saved of step 5 is copied while step 6 computes, which meets the error."""
    gang = workshop.start(steps=40, save_every=5, fail_at=5, fail_as=fail_as)
    assert gang.wait() == [status], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.step, message.durable_step) == ("failed", 5, 5), message
    assert message.config_error == (status == EXIT_CONFIG_ERROR), "data that a disk did not give may come"
    assert workshop.finish(steps=12).events("attempt_start", 2)[0]["resumed_step"] == 5


def test_sys_exit_with_a_status_is_no_success(workshop: Workshop) -> None:
    gang = workshop.start(steps=40, exit_at=12, exit_status=3)
    assert gang.wait() == [3], gang.texts()
    assert gang.termination() == Termination("failed", 12, 10, "the program ended by sys.exit(3)")
    text = workshop.start(steps=40, exit_at=12, exit_status="no such file")
    assert text.wait() == [1]
    assert text.termination().error == "the program ended by sys.exit('no such file')"


ENDS = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(9):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 4:
        exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        ("exit(3)", 3, "3"),
        ("sys.exit(256)", 1, "256"),
        ("quit('no such file')", 1, "'no such file'"),
        ("raise SystemExit(3)", 3, "3"),
        ("raise SystemExit('no such file')", 1, "'no such file'"),
    ],
)
def test_a_program_that_ends_with_a_status_in_another_way_has_not_finished_either(
    workshop: Workshop, tmp_path: Path, how: str, status: int, told: str
) -> None:
    """Its job had succeeded, and the state that made it end so was saved."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    gang = workshop.start(script=script, arguments=[how])
    assert gang.wait() == [status], gang.texts()
    assert gang.termination() == Termination("failed", 4, 4, f"the program ended by sys.exit({told})")


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


def test_a_last_save_that_fails_at_exit_is_no_success(workshop: Workshop) -> None:
    gang = workshop.start(steps=40, break_at=12, hold_at=12)
    gang.wait_for_text("step 12")
    run = gang.history.run
    wait_until(lambda: run.checkpoint(10).exists(), "step 10 to be durable")
    run.checkpoints.rename(run.path / "moved")
    run.checkpoints.write_text("in the way")
    gang.release()
    assert gang.wait() == [1], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.storage_unavailable) == ("failed", False)
    assert message.error.startswith("trained to step 13, but it is not durable: step 13 could not be saved: ")
    assert "done" in gang.texts()
    assert "checkpoint of step 13 failed: step 13 could not be saved" in gang.texts(), "nothing goes on"


def test_a_superseded_attempt_stops_and_its_successor_is_unharmed(workshop: Workshop) -> None:
    old = workshop.start(ranks=2, steps=100_000, pause=0.02, save_every=5)
    old.wait_for_step(7)
    raise_fence(old.history.run, 2)
    codes = old.wait()
    assert codes[0] == 1, old.texts()
    assert all(codes)
    message = old.termination()
    assert message.outcome == "failed"
    assert "attempt 1 was superseded by attempt 2" in message.error
    assert "training goes on" not in old.texts()
    new = workshop.finish(ranks=2, steps=30)
    assert (
        new.events("attempt_start", 2)[0]["resumed_step"] == old.history.events("checkpoint", 1)[-1]["step"]
    )


def test_a_rank_whose_peer_met_the_newer_attempt_first_says_so_too(workshop: Workshop) -> None:
    """It told of a connection that was closed, with a traceback."""
    old = workshop.start(ranks=2, steps=100_000, pause=0.02, save_every=100_000)
    old.wait_for_step(3)
    raise_fence(old.history.run, 2)
    old.signal(signal.SIGKILL, [1])
    assert old.wait() == [1, -9], old.texts()
    message = old.termination()
    assert (message.outcome, message.error.splitlines()) == (
        "failed",
        [f"attempt 1 was superseded by attempt 2: it may no longer write to {old.history.run.path}"],
    )
    assert "Traceback" not in old.ranks[0].text()


def test_an_old_attempt_that_starts_late_is_refused(workshop: Workshop) -> None:
    workshop.start("other", attempt=7, steps=3).wait()
    late = workshop.start("late", attempt=2, steps=3, run_dir=workshop.path / "other")
    assert late.wait() == [1]
    assert "attempt 2 was superseded by attempt 7: it may no longer write to" in late.termination().error
    assert "Traceback" not in late.texts()


# ---------------------------------------------------- last words without a run directory


@pytest.mark.parametrize("disk", ["fails", "hangs"])
def test_a_rank_whose_run_directory_is_gone_tells_its_failure_all_the_same(
    workshop: Workshop, disk: str
) -> None:
    """The termination message is not in it, and what was durable was known before."""
    gang = workshop.start(steps=40, disk_at=13, disk=disk, fail_at=13, hold_at=13)
    gang.wait_for_text("step 13")
    wait_until(lambda: len(gang.history.events("checkpoint")) == 2, "step 10 to be durable")
    gang.release()
    assert gang.wait() == [1], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.step, message.durable_step) == ("failed", 13, 10)
    assert "ZeroDivisionError: the loss of this step is no number" in message.error
    assert message.progress is not None
    assert message.progress.durable_step == 10


@pytest.mark.parametrize(("in_what", "durable"), [("pwrite", 5), ("rmdir", 10)])
def test_a_rank_whose_disk_hangs_in_a_save_tells_its_failure_all_the_same(
    workshop: Workshop, in_what: str, durable: int
) -> None:
    """It waited for that save for ever: for the removal of old ones too, when the new one was durable."""
    gang = workshop.start(steps=40, keep=1, disk_at=9, disk=in_what, fail_at=13, hold_at=9)
    wait_until(lambda: gang.history.events("checkpoint"), "step 5 to be durable")
    gang.release()
    assert gang.wait() == [1], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.step, message.durable_step) == ("failed", 13, durable)
    assert "ZeroDivisionError: the loss of this step is no number" in message.error
    assert gang.history.events("stop")[-1]["durable_step"] == durable


@pytest.mark.parametrize("disk", ["fails", "hangs"])
def test_the_end_of_the_grace_is_told_and_kept_without_a_run_directory(workshop: Workshop, disk: str) -> None:
    env = {"HOLDFAST_GRACE_SECONDS": "2"}
    gang = workshop.start(steps=40, disk_at=13, disk=disk, hang_at=13, hold_at=13, env=env)
    gang.wait_for_text("step 13")
    wait_until(lambda: len(gang.history.events("checkpoint")) == 2, "step 10 to be durable")
    gang.signal(NOTICE)
    assert gang.wait() == [143], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.step, message.durable_step) == ("interrupted", 13, 10)
    assert message.error == "the grace period ended before all ranks could stop together"


@pytest.mark.parametrize("broken", ["before_failure", "standing", "explain", "progress", "journal", "hook"])
def test_whatever_fails_on_the_way_to_the_last_words_they_are_said(workshop: Workshop, broken: str) -> None:
    """And a program that failed does not complete what its loop left undone, as one that ended would."""
    gang = workshop.start(script=Path(__file__).with_name("ending_script.py"), arguments=[broken])
    assert gang.wait() == [1], gang.texts()
    message = gang.termination()
    assert message.outcome == "failed"
    assert "KeyError: 'what really happened'" in message.error
    assert message.step == (0 if broken == "standing" else 7)
    assert "completed" not in gang.texts()


# ------------------------------------------------------------------- bad places


def test_a_run_directory_that_cannot_be_written(workshop: Workshop) -> None:
    (workshop.path / "file").write_text("not a directory")
    for path in (workshop.path / "file", workshop.path / "file" / "below", Path("/proc/holdfast")):
        gang = workshop.start(path.name + path.parent.name, ranks=2, run_dir=path)
        assert gang.wait() == [1, 1], gang.texts()
        for rank in (0, 1):
            message = gang.termination(rank)
            assert (message.outcome, message.step) == ("failed", 0)
            assert message.error.startswith(f"run directory {path} cannot be used: ")
            assert message.error.endswith("Name another one, or mend it")
            assert "Traceback" not in gang.ranks[rank].text()


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"HOLDFAST_PORT": "http"}, "environment HOLDFAST_PORT='http' is not a number"),
        ({"HOLDFAST_PORT": "99999"}, "environment HOLDFAST_PORT='99999' is not between 0 and 65535"),
        (
            {"HOLDFAST_CHECKPOINT_KEEP": "0"},
            "environment HOLDFAST_CHECKPOINT_KEEP='0' is not between 1 and inf",
        ),
        ({"HOLDFAST_GRACE_SECONDS": "30s"}, "environment HOLDFAST_GRACE_SECONDS='30s' is not a number"),
        (
            {"HOLDFAST_CHECKPOINT_EVERY": "5m"},
            "checkpoint.every '5m' is none of: auto, a number of steps (500), seconds (90s)",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_not_tried_again(
    workshop: Workshop, env: dict[str, str], error: str
) -> None:
    gang = workshop.start(steps=3, env=env)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    assert f"error: {error}" in gang.texts()
    assert gang.termination() == Termination("failed", 0, 0, error, config_error=True)


def test_another_configuration_is_refused_for_good(workshop: Workshop) -> None:
    workshop.finish(steps=6, config="a" * 64)
    gang = workshop.start(steps=6, config="b" * 64)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    message = gang.termination()
    assert (message.outcome, message.config_error) == ("failed", True)
    assert "was written under another configuration (aaaaaaaaaaaa, this is bbbbbbbbbbbb)" in message.error


def test_a_number_for_the_configuration_is_refused_at_once(workshop: Workshop) -> None:
    """As Python's hash() gives one, another in each process: the next attempt ended in a traceback."""
    gang = workshop.start(steps=6, config=5)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    error = "config_hash=5 is no text: give one, such as a hexdigest()"
    assert gang.termination() == Termination("failed", 0, 0, error, config_error=True)


def test_another_model_is_refused(workshop: Workshop) -> None:
    workshop.finish(steps=6)
    gang = workshop.start(steps=6, size=48)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    message = gang.termination()
    assert message.config_error
    assert message.error.startswith("'model' is not what it was when the checkpoint of step 6 was written: ")
    assert "size mismatch for 0.weight" in message.error
    assert message.error.endswith(f"or use a new run directory; this one is {gang.history.run.path}")


def test_checkpoints_that_are_all_damaged_are_refused(workshop: Workshop) -> None:
    history = workshop.finish(ranks=2, steps=12)
    for part in history.run.checkpoints.glob("*/rank-1.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    gang = workshop.start(ranks=2, steps=20)
    assert gang.wait() == [1, 1]
    for rank in (0, 1):
        message = gang.termination(rank)
        assert message.error.startswith("none of the 3 checkpoints in")
        assert "rank-1.safetensors has" in message.error


def test_checkpoints_that_somebody_removed_are_missed(workshop: Workshop) -> None:
    """Somebody tidies up, or a rule of the bucket does: the run goes on from what is left, and says so."""
    history = workshop.finish(steps=10)
    for removed, step in ((history.run.checkpoint(10), 5), (history.run.checkpoints, 0)):
        shutil.rmtree(removed)
        gang = workshop.start(steps=10)
        assert gang.wait() == [0], gang.texts()
        start = gang.history.events("attempt_start", gang.attempt)[0]
        assert start["resumed_step"] == step
        (told,) = start["skipped"]
        assert told["checkpoint"] == "step-00000010"
        assert told["reason"].startswith(f"it is gone, though attempt {gang.attempt - 1} had it")
        assert "checkpoint of step 10 was passed over: it is gone" in gang.texts()
    assert workshop.finish(steps=10).events("attempt_start", 4)[0]["skipped"] == []


def test_another_world_size_goes_on_and_says_that_bits_may_differ(workshop: Workshop) -> None:
    first = workshop.start(ranks=2, steps=20, hold_at=12)
    first.wait_for_step(7)
    wait_until(lambda: first.history.run.checkpoint(5).exists(), "step 5 to be durable")
    workshop.end()
    history = workshop.finish(ranks=1, steps=20)
    assert history.events("attempt_start", 2)[0]["resumed_step"] in (5, 10)  # it ran on while it was killed
    assert history.stop()["step"] == 20
    log = (workshop.path / "run-2" / "rank-0.log").read_text()
    assert "the resume may not be bit-exact: ranks: 2 -> 1" in log
    assert history.events("attempt_start", 2)[0]["differences"] == ["ranks: 2 -> 1"]


def test_another_precision_goes_on_and_says_that_bits_may_differ(workshop: Workshop) -> None:
    """As `auto` gives it, where the next attempt gets another kind of machine."""
    assert workshop.finish(steps=12, bf16=True).events("attempt_start", 1)[0]["differences"] == []
    history = workshop.finish(steps=20)
    assert history.events("attempt_start", 2)[0]["differences"] == ["precision: bf16 -> fp32"]
    log = (workshop.path / "run-2" / "rank-0.log").read_text()
    assert "the resume may not be bit-exact: precision: bf16 -> fp32" in log


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


def test_ranks_that_torchrun_starts_again_do_not_mix_two_saves(workshop: Workshop) -> None:
    """The same attempt number twice: what the first left half-written is not counted as the second's."""
    first = workshop.start(ranks=2, steps=20, hold_at=9)
    first.wait_for_step(7)
    workshop.end()
    half = first.history.run.checkpoints / ".step-00000010.attempt-1.save-1"
    half.mkdir()
    (half / "rank-1.json").write_text('{"size": 1, "sha256": "00"}')
    again = workshop.start("again", ranks=2, attempt=1, steps=12, run_dir=first.history.run.path)
    assert again.wait() == [0, 0], again.texts()
    assert not half.exists()
    assert workshop.finish(ranks=2, steps=14, attempt=2).events("attempt_start", 2)[0]["skipped"] == []


HELPED_BY_A_THREAD = """
import sys, threading
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
helper = threading.Thread(target=sys.exit, args=(1,))
helper.start()
helper.join()
print("evaluated", flush=True)
"""


def test_a_helping_thread_that_ends_by_sys_exit_does_not_end_the_run(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Python goes on without it, and ends well: it was told as a failure of a run that had done all."""
    script = tmp_path / "helped.py"
    script.write_text(HELPED_BY_A_THREAD)
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [0], gang.texts()
    assert "evaluated" in gang.texts()
    assert (gang.termination().outcome, gang.termination().durable_step) == ("finished", 3)


def test_finished_counts_although_a_notice_came_last(workshop: Workshop) -> None:
    gang = workshop.start(steps=20, hold_at=19)
    gang.wait_for_text("step 19")
    gang.signal(NOTICE)
    assert gang.wait() == [0], gang.texts()
    message = gang.termination()
    assert (message.step, message.durable_step) == (20, 20)


IN_A_THREAD = """
import sys
import threading
import torch
from holdfast_trainer.run import Run

def begin():
    global run, model, optimizer
    run = Run(checkpoint_every=2)
    model = run.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.track(model=model, optimizer=optimizer)

def train():
    for step in run.steps(9):
        if step == 5:
            raise ZeroDivisionError("of a batch")
        loss = model(torch.ones(1, 2)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss)
        optimizer.step()

if sys.argv[1] == "begins":
    thread = threading.Thread(target=begin)
else:
    begin()
    thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("what", "ended_by", "steps"),
    [
        ("begins", "RuntimeError: make Run in the main thread, which alone hears of a notice", (0, 0)),
        ("trains", "ZeroDivisionError: of a batch", (5, 4)),
    ],
)
def test_what_ends_a_training_in_a_thread_ends_the_rank(
    workshop: Workshop, tmp_path: Path, what: str, ended_by: str, steps: tuple[int, int]
) -> None:
    """Python goes on without the thread, and ends with status 0: the job had succeeded."""
    script = tmp_path / "in_a_thread.py"
    script.write_text(IN_A_THREAD)
    gang = workshop.start(script=script, arguments=[what])
    assert gang.wait() == [1], gang.texts()
    told = gang.termination()
    assert (told.outcome, told.step, told.durable_step) == ("failed", *steps)
    assert ended_by in told.error


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
