"""However a rank ends, what it says of itself is true: finished, failed, refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from gangs import NOTICE, Workshop
from waiting import wait_until

from holdfast_trainer.contract import EXIT_CONFIG_ERROR, Termination, raise_fence


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


TIDIES_UP = """
import os
import signal
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=1000)
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(10):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    if step == 4:
        break
os.kill(os.getpid(), signal.SIGTERM)
torch.distributed.destroy_process_group()
"""


def test_a_notice_saves_what_a_loop_that_was_left_has_done_though_the_program_has_ended_its_process_groups(
    workshop: Workshop, tmp_path: Path
) -> None:
    """As most scripts end. It failed, as PyTorch knew the group no more, and saved nothing."""
    script = tmp_path / "tidies_up.py"
    script.write_text(TIDIES_UP)
    gang = workshop.start(ranks=2, script=script)
    assert gang.wait() == [0, 0], gang.texts()
    said = gang.termination()
    assert (said.outcome, said.step, said.durable_step) == ("interrupted", 5, 5)


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
