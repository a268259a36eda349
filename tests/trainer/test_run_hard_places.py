"""What a rank says is heard without a disk, a stream, or a group to say it by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fresh_command import text_of
from gangs import NOTICE, Workshop
from processes import Processes
from waiting import wait_until

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


LINGERS = """
import threading, time
from pathlib import Path
import torch
from holdfast_trainer import lingering
from holdfast_trainer.run import Run

def upload():
    while not Path("uploaded").exists():
        time.sleep(0.01)

lingering.PATIENCE_SECONDS = 0.1
run = Run()
run.track(model=torch.nn.Linear(2, 2))
for step in run.steps(5):
    if step == 2:
        break
threading.Thread(target=upload, name="uploader").start()
"""


def test_a_program_that_is_over_while_a_thread_of_it_is_not_says_so(
    processes: Processes, tmp_path: Path
) -> None:
    """The job went on for ever, without a word: Python waits for the thread before all that is left to do."""
    (tmp_path / "program.py").write_text(LINGERS)
    with (tmp_path / "log").open("wb") as out:
        program = processes.start([sys.executable, "program.py"], cwd=tmp_path, stdout=out)
    said = "Python waits for threads of it that are not: uploader (at program.py:"
    wait_until(
        lambda: program.poll() is not None or said in (tmp_path / "log").read_text(), "a word of the thread"
    )
    assert program.poll() is None, (tmp_path / "log").read_text()
    (tmp_path / "uploaded").touch()
    assert program.wait(60) == 0, (tmp_path / "log").read_text()


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
