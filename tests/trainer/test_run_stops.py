"""A notice stops all ranks at one step, saved, wherever it meets them; no other end overruns the grace."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from gangs import KILL, NOTICE, Gang, Workshop
from processes import Processes
from waiting import wait_until

from holdfast_controller.policy.classify import lost_its_peer
from holdfast_trainer.contract import RunDir, Termination
from holdfast_trainer.ending import EXIT_NOTICE

pytestmark = pytest.mark.long

SLOW = {"steps": 100_000, "pause": 0.02, "save_every": 10_000}


def assert_stopped_at_one_step(gang: Gang, codes: list[int]) -> int:
    assert codes == [0] * len(codes), gang.texts()
    messages = [gang.termination(rank) for rank in range(len(codes))]
    assert len(set(messages)) == 1, messages
    step = messages[0].step
    assert messages[0] == Termination("interrupted", step, step)
    stop = gang.history.stop(gang.attempt)
    assert (stop["outcome"], stop["step"], stop["durable_step"]) == ("interrupted", step, step)
    assert stop["digest"] == gang.history.events("checkpoint", gang.attempt)[-1]["digest"]
    assert gang.history.last_step(gang.attempt) == step, "a step was done after the agreed one"
    return step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_notice_while_steps_run(workshop: Workshop, ranks: int) -> None:
    gang = workshop.start(ranks=ranks, **SLOW)
    gang.wait_for_step(5)
    gang.signal(NOTICE)
    assert assert_stopped_at_one_step(gang, gang.wait()) >= 5


@pytest.mark.parametrize("noticed", [0, 1])
def test_a_notice_to_one_of_two_stops_both(workshop: Workshop, noticed: int) -> None:
    gang = workshop.start(ranks=2, **SLOW)
    gang.wait_for_step(3)
    gang.signal(NOTICE, [noticed])
    assert_stopped_at_one_step(gang, gang.wait())


def test_a_notice_of_more_than_ten_minutes_to_one_of_two_stops_both(workshop: Workshop) -> None:
    """Of this grace 600.003 s are for the save: that is what the other rank knows, and this one has less."""
    gang = workshop.start(ranks=2, **SLOW, hold_at=5, env={"HOLDFAST_GRACE_SECONDS": "666.67"})
    gang.wait_for_text("step 5", rank=1)
    gang.signal(NOTICE, [1])
    assert_stopped_at_one_step(gang, gang.wait(60))


def test_a_notice_in_the_first_step(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, **SLOW, hold_at=0)
    gang.wait_for_text("step 0", rank=1)
    gang.signal(NOTICE, [1])
    assert assert_stopped_at_one_step(gang, gang.wait()) in (1, 2)


def test_a_notice_before_the_first_step_does_no_step(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, **SLOW)
    gang.wait_for_text("tracked", rank=0)
    gang.signal(NOTICE)
    codes = gang.wait()
    if gang.termination().step:  # the notice came late: it met a step
        assert_stopped_at_one_step(gang, codes)
        return
    assert codes == [0, 0], gang.texts()
    assert gang.termination() == Termination("interrupted", 0, 0)
    assert workshop.finish(ranks=2, steps=8).stop()["step"] == 8


COMPILES_FOR_LONG = """
import time
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 2)
print("compiling", flush=True)
time.sleep(600)
run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
"""


def test_a_notice_while_the_model_compiles_ends_inside_the_grace_and_takes_nothing_back(
    workshop: Workshop, tmp_path: Path
) -> None:
    """What the first attempt saved is durable, whatever the second one had no time to load."""
    kept = workshop.start(steps=500, save_every=10, pause=0.02, hold_at=25)
    kept.wait_for_step(20)
    wait_until(lambda: kept.history.run.checkpoint(20).exists(), "step 20 to be durable")
    kept.signal(KILL)
    kept.wait()
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES_FOR_LONG)
    gang = workshop.start(script=script, arguments=[], env={"HOLDFAST_GRACE_SECONDS": "2"})
    gang.wait_for_text("compiling")
    gang.signal(NOTICE)
    assert gang.wait() == [EXIT_NOTICE], gang.texts()
    told = gang.termination()
    assert (told.outcome, told.durable_step) == ("interrupted", 20)
    assert told.error == "the grace period ended before all ranks could stop together"
    resumed = workshop.finish(steps=30, save_every=10)
    assert resumed.events("attempt_start", 3)[0]["resumed_step"] == 20


def test_a_notice_during_validation_does_not_wait_for_its_end(workshop: Workshop) -> None:
    """The validation is done again after the resume, from the random state and buffers it began with."""
    options = {"steps": 14, "save_every": 10_000, "validate_every": 6, "norm": True}
    untouched = workshop.finish("untouched", ranks=2, **options)
    gang = workshop.start(ranks=2, **options, validation_pause=1.0)
    gang.wait_for_text("validating", rank=1)
    gang.signal(NOTICE, [1])
    assert assert_stopped_at_one_step(gang, gang.wait()) == 6
    assert gang.texts().count("validating") < 8
    assert not gang.history.validations(), "a validation that was cut short has no figure"
    resumed = workshop.finish(ranks=2, **options)
    assert resumed.losses() == untouched.losses()
    assert resumed.validations() == untouched.validations()
    assert resumed.stop()["digest"] == untouched.stop()["digest"]


def test_a_validation_in_the_middle_of_a_step_never_saves_half_a_step(workshop: Workshop) -> None:
    """After the optimizer's turn a stop there would save step N with the parameters of N + 1."""
    options = {"steps": 12, "save_every": 10_000, "validate_late": True}
    untouched = workshop.finish("untouched", **options)
    gang = workshop.start(**options, validation_pause=0.05, hold_at=7)
    gang.wait_for_step(3)
    gang.signal(NOTICE)
    assert_stopped_at_one_step(gang, gang.wait())
    resumed = workshop.finish(**options)
    assert resumed.losses() == untouched.losses()
    assert resumed.stop()["digest"] == untouched.stop()["digest"]


VALIDATES_AN_AVERAGE = """
import os, signal, sys
import torch
from holdfast_trainer.run import Run

class Average:  # torch's own cannot be made of what is in shards
    def __init__(self, model):
        self.means = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self):
        return {"means": self.means}

    def load_state_dict(self, state):
        self.means = state["means"]

    def parameters(self):
        return self.means

    def update_parameters(self, model):
        for mean, parameter in zip(self.means, model.parameters()):
            mean.lerp_(parameter.detach(), 0.5)

noticed, stops_at, in_shards = sys.argv[1] == "noticed", int(sys.argv[2]), sys.argv[3] == "in shards"
run = Run(checkpoint_every=4)
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
model = run.shard(model, []) if in_shards else run.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
average = Average(model) if in_shards else torch.optim.swa_utils.AveragedModel(model)
run.track(model=model, optimizer=optimizer, average=average)

def validate():
    pairs = list(zip(model.parameters(), average.parameters()))
    kept = [parameter.detach().clone() for parameter, _ in pairs]
    for parameter, mean in pairs:
        parameter.data.copy_(mean)
    for part in run.interruptible(range(3)):
        if noticed and part == 1 and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    for parameter, before in zip(model.parameters(), kept):
        parameter.data.copy_(before)

for step in run.steps(10):
    if step == 6:
        validate()
    loss = model(torch.randn(4, 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    average.update_parameters(model)
    if step + 1 == stops_at:
        break
if stops_at:
    validate()
"""


@pytest.mark.parametrize(
    ("cut", "stops_at", "stopped"), [("whole", 0, 7), ("whole", 4, 4), ("in shards", 0, 7)]
)
def test_a_notice_while_an_average_has_the_models_place_saves_the_model(
    workshop: Workshop, tmp_path: Path, cut: str, stops_at: int, stopped: int
) -> None:
    """In a validation within the loop, or once it was left: the average was saved as the model, and trained
    on without a word."""
    script = tmp_path / "validates_an_average.py"
    script.write_text(VALIDATES_AN_AVERAGE)
    untouched = workshop.finish("untouched", ranks=2, script=script, arguments=["", "0", cut])
    gang = workshop.start(ranks=2, script=script, arguments=["noticed", str(stops_at), cut])
    assert assert_stopped_at_one_step(gang, gang.wait()) == stopped
    resumed = workshop.finish(ranks=2, script=script, arguments=["", "0", cut])
    assert resumed.losses() == untouched.losses()
    assert resumed.stop()["digest"] == untouched.stop()["digest"]


def test_a_validation_that_is_left_by_break_is_over(workshop: Workshop, tmp_path: Path) -> None:
    """A run that had left one after its last step ended as "validating"; one in a step said so until the step
    ended."""
    script = tmp_path / "leaves_a_validation.py"
    script.write_text(
        """
import torch
from holdfast_trainer.run import Run

run = Run()
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)

def validate():
    for part in run.interruptible(range(4)):
        if part == 2:
            break

for step in run.steps(4):
    if step == 3:
        validate()
    loss = model(torch.ones(1, 2)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
validate()
"""
    )
    gang = workshop.start(ranks=2, script=script)
    assert gang.wait() == [0, 0], gang.texts()
    last = gang.termination().progress
    assert last is not None
    assert (last.phase, last.step, last.durable_step) == ("finished", 4, 4)
    assert len(gang.history.losses()) == 4, "the sums that were under way took no loss along"


def test_a_notice_during_a_save(workshop: Workshop) -> None:
    """Every step saves, so whenever the notice comes a save is in flight."""
    gang = workshop.start(ranks=2, steps=5000, save_every=1, size=4096)
    gang.wait_for_step(4)
    gang.signal(NOTICE)
    assert_stopped_at_one_step(gang, gang.wait())


def test_a_stop_whose_save_fails_says_which_step_is_durable(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=500, pause=0.05, save_every=10, hold_at=15)
    gang.wait_for_step(12)
    run = gang.history.run
    wait_until(lambda: run.checkpoint(10).exists(), "step 10 to be durable")
    run.checkpoints.chmod(0o755)
    moved = run.path / "moved"
    run.checkpoints.rename(moved)
    run.checkpoints.write_text("in the way")
    gang.signal(NOTICE)
    assert gang.wait() == [0, 0], gang.texts()
    run.checkpoints.unlink()
    moved.rename(run.checkpoints)
    message = gang.termination(1)
    assert (message.outcome, message.durable_step) == ("interrupted", 0)
    assert f"step {message.step} could not be saved: " in message.error
    assert "Not a directory" in message.error or "File exists" in message.error
    assert workshop.finish(ranks=2, steps=30).events("attempt_start", 2)[0]["resumed_step"] == 10


def test_a_save_that_failed_on_one_rank_is_made_again_by_all(workshop: Workshop) -> None:
    """The save of step 10 fails on rank 0 alone; the notice meets the validation that follows."""
    gang = workshop.start(
        ranks=2, steps=500, save_every=10, pause=0.05, validate_every=10, validation_pause=1.0, hold_at=5
    )
    gang.wait_for_step(1)
    blocked = gang.history.run.checkpoints / ".step-00000010.attempt-1.save-1" / "rank-0.safetensors"
    blocked.mkdir(parents=True)
    gang.release()
    gang.wait_for_text("validating", rank=1)
    gang.wait_for_text("checkpoint of step 10 failed, training goes on")
    gang.signal(NOTICE, [1])
    assert assert_stopped_at_one_step(gang, gang.wait()) == 10
    assert [line["step"] for line in gang.history.events("checkpoint_failed")] == [10]


# ------------------------------------------------- no agreement, and little time


def wait_until_quiet(gang: Gang, rank: int, seconds: float = 0.5) -> None:
    """Until a rank that tells of every step has told of none for a while: it waits for a peer."""
    seen: list[tuple[float, str]] = [(time.monotonic(), "")]

    def quiet() -> bool:
        text = gang.ranks[rank].text()
        if text != seen[-1][1]:
            seen.append((time.monotonic(), text))
        return time.monotonic() - seen[-1][0] > seconds

    wait_until(quiet, f"rank {rank} to wait for its peer")


def test_a_rank_whose_peer_hangs_ends_inside_the_grace(workshop: Workshop) -> None:
    """Rank 1 is frozen; rank 0 waits for it in C, where Python runs no signal handler."""
    gang = workshop.start(
        ranks=2, steps=100_000, pause=0.02, save_every=5, env={"HOLDFAST_GRACE_SECONDS": "2"}
    )
    gang.wait_for_step(12)
    gang.ranks[1].signal(signal.SIGSTOP)
    wait_until_quiet(gang, 0)
    gang.signal(NOTICE, [0])
    assert gang.ranks[0].wait() == 143  # by itself: there is nobody to kill it, and gloo waits for minutes
    message = gang.termination(0)
    assert message.outcome == "interrupted"
    assert message.error == "the grace period ended before all ranks could stop together"
    assert message.durable_step % 5 == 0
    assert message.durable_step >= 5
    stop = gang.history.stop()
    assert (stop["outcome"], stop["durable_step"]) == ("interrupted", message.durable_step)


def test_a_peer_lost_while_notice_runs_is_an_interruption(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=500, save_every=5, hold_at=13)
    gang.wait_for_text("step 13", rank=0)
    wait_until(lambda: gang.history.run.checkpoint(10).exists(), "step 10 to be durable")
    gang.ranks[0].signal(NOTICE)
    gang.ranks[1].signal(KILL)
    gang.release()
    assert gang.wait() == [143, -9], gang.texts()
    message = gang.termination(0)
    assert (message.outcome, message.step, message.durable_step) == ("interrupted", 13, 10)
    assert message.error.startswith("a peer was lost before all ranks could stop together: ")


def test_a_peer_lost_without_notice_is_told_as_what_it_is(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=100_000, pause=0.02, save_every=5)
    gang.wait_for_step(12)
    gang.signal(KILL, [1])
    assert gang.wait() == [1, -9], gang.texts()
    message = gang.termination(0)
    assert message.outcome == "failed"
    assert "gloo" in message.error
    assert workshop.finish(ranks=2, steps=40, save_every=5).stop()["step"] == 40


def test_ctrl_c_saves_and_a_second_one_does_not_wait(workshop: Workshop) -> None:
    gang = workshop.start(**SLOW)
    gang.wait_for_step(3)
    gang.signal(signal.SIGINT)
    assert_stopped_at_one_step(gang, gang.wait())

    hasty = workshop.start(**SLOW, pause_at=40, pause_seconds=30)
    hasty.wait_for_text("step 40")
    hasty.signal(signal.SIGINT)
    while hasty.ranks[0].poll() is None:
        hasty.signal(signal.SIGINT)
        time.sleep(0.05)
    assert hasty.wait() == [130]
    assert "step 41" not in hasty.ranks[0].text()
    assert hasty.termination().error == "interrupted from the keyboard"


PRINTS_EACH_STEP = """
import torch
from holdfast_trainer.run import Run

run = Run(run_dir="run", checkpoint_every=100_000)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run.track(model=model, optimizer=optimizer)
for step in run.steps(100_000):
    loss = model(torch.ones(2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    print("step", step, flush=True)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_ctrl_c_saves_where_it_ends_first_what_reads_the_output(
    processes: Processes, tmp_path: Path, unbuffered: str
) -> None:
    """As `python loop.py | tee log`: the loop's next print raised, and all since the last save was lost."""
    (tmp_path / "loop.py").write_text(PRINTS_EACH_STEP)
    loop = processes.start(
        [sys.executable, "loop.py"],
        cwd=tmp_path,
        env={"PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert loop.stdout is not None
    assert loop.stderr is not None
    with loop.stderr:
        with loop.stdout:
            assert any(line == "step 20\n" for line in loop.stdout)
        loop.send_signal(signal.SIGINT)
        told = loop.stderr.read()
    assert loop.wait(60) == 0, told
    saved = [step for step in RunDir(tmp_path / "run").checkpoints.iterdir() if step.name.startswith("step-")]
    assert [f"stopped on notice after step {int(path.name[5:])}\n" for path in saved] == [
        line.removeprefix("[rank 0] ") for line in told.splitlines(keepends=True) if "stopped" in line
    ]
    assert "Traceback" not in told


LEAVES_BY_ITSELF = """
import os, signal, sys, time
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=4)
noticed = False

def handler(number, frame):
    global noticed
    noticed = True
    if sys.argv[1].startswith("exit"):
        sys.exit(int(sys.argv[1].removeprefix("exit ")))

signal.signal(signal.SIGTERM, handler)
model = run.wrap(torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(16):
    while os.path.exists(os.environ.get("HOLD", "")) and step >= int(os.environ["HOLD_AT"]):
        time.sleep(0.005)
    if noticed and sys.argv[1] == "break":
        break
    loss = model(torch.full((4, 2), float(step))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "status", "durable"), [("break", 0, 10), ("exit 0", 143, 8), ("exit 1", 143, 8)]
)
def test_a_loop_that_leaves_by_itself_on_notice_is_interrupted_and_goes_on(
    workshop: Workshop, tmp_path: Path, how: str, status: int, durable: int
) -> None:
    """By a handler of its own for SIGTERM. It was told as finished, with 10 of 16 steps, and never started
    again; or as failed. A `break` leaves whole steps behind, which are saved; sys.exit may cut one anywhere.
    """
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES_BY_ITSELF)
    options = {"script": script, "arguments": [how]}
    untouched = workshop.finish("untouched", **options)
    gang = workshop.start(**options, hold_at=10)
    gang.wait_for_step(10)
    wait_until(lambda: gang.history.run.checkpoint(8).exists(), "step 8 to be durable")
    gang.signal(NOTICE)
    assert gang.wait() == [status], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.step, message.durable_step) == ("interrupted", 10, durable), message
    if how != "break":
        assert (
            message.error
            == f"on notice the program ended by sys.{how[:4]}({how[5:]}), in the middle of a step"
        )
        assert "which is not saved: leave SIGTERM to Run" in gang.texts()
    history = workshop.finish(**options)
    assert history.events("attempt_start", 2)[0]["resumed_step"] == durable
    assert history.losses() == untouched.losses()
    assert sorted(history.losses()) == list(range(1, 17))


EPOCH_BY_EPOCH = """
import functools, os, signal, sys, time
import torch
from holdfast_trainer.run import Run

class Leaves:
    def __call__(self, *_):
        sys.exit(int(sys.argv[1]))

run = Run(checkpoint_every=100)
if sys.argv[1:]:
    leave = Leaves()
    handlers = {"function": lambda *_: leave(), "partial": functools.partial(leave, 1), "object": leave}
    signal.signal(signal.SIGTERM, handlers[sys.argv[2]])
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
done = run.track(model=model, optimizer=optimizer)
print("step", done, "tracked", flush=True)
for epoch in range(done // 5, 3):
    while os.path.exists(os.environ.get("HOLD", "")) and 5 * epoch >= int(os.environ["HOLD_AT"]):
        time.sleep(0.005)
    if run.noticed:
        break
    for step in run.steps((epoch + 1) * 5):
        loss = model(torch.full((4, 2), step / 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss)
        optimizer.step()
    print("validated after step", run.step, flush=True)
if done == 15 or not run.noticed:
    print("exported", flush=True)
"""


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_a_program_that_leaves_between_two_epochs_on_notice_is_interrupted(
    workshop: Workshop, tmp_path: Path, epochs: int
) -> None:
    """Each epoch has a loop, and the notice comes outside of one. It was told as finished, with a third of
    the steps or none, and never started again."""
    script = tmp_path / "epochs.py"
    script.write_text(EPOCH_BY_EPOCH)
    gang = workshop.start(script=script, arguments=[], hold_at=5 * epochs)
    gang.wait_for_text(f"validated after step {5 * epochs}" if epochs else "step 0 tracked")
    gang.signal(NOTICE)
    assert gang.wait() == [0], gang.texts()
    message = gang.termination()
    told = message.outcome, message.step, message.durable_step
    assert told == ("interrupted", 5 * epochs, 5 * epochs), message
    assert "exported" not in gang.texts()
    history = workshop.finish(script=script, arguments=[])
    assert history.events("attempt_start", 2)[0]["resumed_step"] == 5 * epochs
    assert sorted(history.losses()) == list(range(1, 16))


@pytest.mark.parametrize(
    ("epochs", "status", "kind"),
    [(0, 0, "function"), (0, 1, "object"), (1, 0, "partial"), (1, 1, "function")],
)
def test_a_handler_that_leaves_outside_of_a_loop_on_notice_is_an_interruption(
    workshop: Workshop, tmp_path: Path, epochs: int, status: int, kind: str
) -> None:
    """It was told as finished, and never started again, or as a failure of the job's own."""
    script = tmp_path / "epochs.py"
    script.write_text(EPOCH_BY_EPOCH)
    gang = workshop.start(script=script, arguments=[str(status), kind], hold_at=5 * epochs)
    gang.wait_for_text(f"validated after step {5 * epochs}" if epochs else "step 0 tracked")
    gang.signal(NOTICE)
    assert gang.wait() == [143 if status else 0], gang.texts()
    message = gang.termination()
    told = message.outcome, message.step, message.durable_step
    assert told == ("interrupted", 5 * epochs, 5 * epochs), message
    assert sorted(workshop.finish(script=script, arguments=[]).losses()) == list(range(1, 16))


WITH_A_WORKER = """
import os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from holdfast_trainer.run import Run

run = Run(checkpoint_every=4)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
batches = iter(DataLoader(TensorDataset(torch.ones(64, 1)), 2, num_workers=1, generator=torch.Generator()))
for step in run.steps(16):
    while os.path.exists(os.environ.get("HOLD", "")) and step >= int(os.environ["HOLD_AT"]):
        time.sleep(0.005)
    model(next(batches)[0]).sum().backward()
    optimizer.step()
"""


def test_a_worker_that_ends_of_the_notice_is_no_fault_of_the_job(workshop: Workshop, tmp_path: Path) -> None:
    """As one that was spawned does where torchrun, or Ctrl-C, signals all processes of a rank: it was told as
    a failure for want of memory."""
    script = tmp_path / "with_a_worker.py"
    script.write_text(WITH_A_WORKER)
    gang = workshop.start(script=script, arguments=[], hold_at=10)
    gang.wait_for_step(10)
    wait_until(lambda: gang.history.run.checkpoint(8).exists(), "step 8 to be durable")
    (worker,) = psutil.Process(gang.ranks[0].pid).children()
    gang.ranks[0].signal(NOTICE)
    worker.kill()
    assert gang.wait() == [EXIT_NOTICE], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.step, message.durable_step) == ("interrupted", 10, 8)
    assert message.error.startswith("the notice met a process that loads data too: rank 0 lost a process")


UNGUARDED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
data = TensorDataset(torch.ones(64, 1))
for step, (inputs,) in zip(run.steps(6), DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn")):
    model(inputs).sum().backward()
    optimizer.step()
"""


def test_a_worker_that_imports_the_program_does_not_train(workshop: Workshop, tmp_path: Path) -> None:
    """Its `Run` joined the attempt as the rank that had started it, and wrote to its ledger."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [1], gang.texts()
    assert "imports this program and came to Run(): it would train a second time. Put" in gang.texts()
    assert len(gang.history.events("attempt_start")) == 1
    assert gang.termination().error.startswith("rank 0 lost a process that loads data in step 1: DataLoader")


WITH_A_WORKER_THAT_READS_FOR_EVER = """
import os, threading
import torch
from torch.utils.data import DataLoader, Dataset
from holdfast_trainer.run import Run

class Stuck(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 20 and os.environ["RANK"] == "0":
            print("reading", flush=True)
            threading.Event().wait()
        return torch.ones(1)

run = Run(checkpoint_every=4)
model = run.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
batches = iter(DataLoader(Stuck(), 2, num_workers=1, generator=torch.Generator()))
for step in run.steps(32):
    model(next(batches)).sum().backward()
    optimizer.step()
"""


def test_a_worker_does_not_outlive_its_rank(workshop: Workshop, tmp_path: Path) -> None:
    """torch's worker looks for its parent between two batches alone. One that read from a disk that did not
    answer stayed for ever where its rank was killed, and with it the rank's connections: the other rank did
    not learn that it was gone."""
    script = tmp_path / "with_a_worker.py"
    script.write_text(WITH_A_WORKER_THAT_READS_FOR_EVER)
    gang = workshop.start(ranks=2, script=script, arguments=[])
    gang.wait_for_text("reading", rank=0)
    workers = psutil.Process(gang.ranks[0].pid).children()
    gang.signal(KILL, [0])
    _, left = psutil.wait_procs(workers, 60)
    for worker in left:
        worker.kill()
    assert not left
    assert gang.ranks[1].wait(60) == 1
    said = gang.termination(1)
    assert lost_its_peer(said, ()), said.error


def test_a_second_notice_changes_nothing(workshop: Workshop) -> None:
    gang = workshop.start(**SLOW)
    gang.wait_for_step(3)
    gang.signal(NOTICE)
    gang.signal(NOTICE)
    gang.signal(signal.SIGINT)
    assert_stopped_at_one_step(gang, gang.wait())
