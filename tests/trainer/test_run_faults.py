"""Faults that a traceback does not explain: no number, no memory, ranks that are not alike.

Each ends all ranks, says what to change, and leaves the newest good checkpoint as it was.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asked import address_of, get, series
from gangs import Workshop
from gpu_queue import StandInQueue

from holdfast_controller.policy.classify import lost_its_peer
from holdfast_trainer.alike import differing
from holdfast_trainer.contract import EXIT_CONFIG_ERROR, RunDir
from holdfast_trainer.faults import NoGpu, Offered, is_out_of_memory, non_finite_step, out_of_memory
from holdfast_trainer.interruption import Exchange, Notice
from holdfast_trainer.late import Late
from holdfast_trainer.ledger import Journal, trained_before
from holdfast_trainer.overflow import LIMIT, Overflow
from holdfast_trainer.parallel import Gang, device_for

CPU = torch.device("cpu")


def test_a_loss_that_is_no_number_stops_all_ranks_before_it_is_saved(workshop: Workshop) -> None:
    """Step 15 would be saved; its loss is not a number on rank 1 alone."""
    gang = workshop.start(ranks=2, steps=40, save_every=5, bad_at=14, bad_rank=1)
    assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
    for rank in (0, 1):
        told = gang.termination(rank)
        assert (told.outcome, told.step, told.durable_step, told.config_error) == ("failed", 15, 10, True)
        assert told.error.startswith(
            "step 15: the loss of rank 1 is nan on its batch of step 14. Training stopped here and did not "
            "save this state: the checkpoint of step 10 is the newest. A retry would meet the same bits."
        )
    assert "Traceback" not in gang.texts()
    assert [line["step"] for line in gang.history.events("checkpoint")] == [5, 10]
    # The data was mended: the run goes on from before the fault, and ends as if it had never been.
    mended = workshop.finish(ranks=2, steps=20)
    assert mended.events("attempt_start", 2)[0]["resumed_step"] == 10


def test_a_gradient_that_is_no_number_stops_them_too(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=40, save_every=5, bad_at=14, bad="gradient")
    assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
    assert "step 15: the gradient norm is inf, and every loss is finite." in gang.termination().error
    assert gang.termination().durable_step == 10


def test_a_gradient_norm_that_is_told_by_itself_stops_them_as_well(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Its state was saved, with weights that are no numbers, and every attempt after that met them."""
    script = tmp_path / "tells_apart.py"
    script.write_text(
        """
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(9):
    loss = model(torch.ones(1, 2)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    if step == 3:
        model.weight.grad.fill_(float("nan"))
    run.log(grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
"""
    )
    gang = workshop.start(script=script)
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    assert "step 4: the gradient norm is nan, and every loss is finite." in gang.termination().error
    assert [line["step"] for line in gang.history.events("checkpoint")] == [2]


CATCHES = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
try:
    for step in run.steps(9):
        for _ in run.interruptible(range(sys.argv[1] == "validates")):
            pass
        loss = model(torch.ones(1, 2)).square().sum() * (float("nan") if step == 4 else 1)
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss)
        optimizer.step()
except Exception as error:
    print("caught", error, flush=True)
"""


@pytest.mark.parametrize("how", ["plain", "validates"])
def test_a_script_that_catches_what_its_loop_ended_with_has_not_finished(
    workshop: Workshop, tmp_path: Path, how: str
) -> None:
    """As one that sends its errors elsewhere. The state that the message says is not saved was saved as the
    program ended, and the job had succeeded."""
    script = tmp_path / "catches.py"
    script.write_text(CATCHES)
    gang = workshop.start(ranks=2, script=script, arguments=[how])
    assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
    assert "caught step 5: the loss of rank 0 is nan" in gang.texts()
    told = gang.termination()
    assert (told.outcome, told.durable_step, told.config_error) == ("failed", 4, True)
    assert [line["step"] for line in gang.history.events("checkpoint")] == [2, 4]


def test_a_batch_that_its_script_cannot_describe_does_not_hide_the_loss(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The script's error was told in its place, and tried again; where one rank met it the others waited."""
    script = tmp_path / "cannot_describe.py"
    script.write_text(
        """
import torch
from holdfast_trainer.run import Run

run = Run()
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
run.describe_batches(["files 3 and 7"][run.rank :].__getitem__)
for step in run.steps(3):
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    run.log(loss=float("nan") if step == 0 else loss)
    optimizer.step()
"""
    )
    gang = workshop.start(ranks=2, script=script)
    assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
    assert gang.termination(1).error.startswith(
        "step 1: the loss of rank 0 is nan on files 3 and 7; the loss of rank 1 is nan on its batch of step "
        "0, which nobody can describe (IndexError: list index out of range). Training stopped here"
    )


def test_what_a_loop_tells_that_is_no_number_is_refused_where_it_tells_it(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The step's end said that a float could not be made, not of what; of less than no tokens, that a counter
    could not go down."""
    script = tmp_path / "tells_anything.py"
    script.write_text(
        """
import numpy
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1)
run.track(model=model)
several = torch.ones(3, dtype=torch.int64)
wrong = [
    {"loss": "0,25"}, {"loss": [0.25]}, {"loss": torch.tensor(1j)}, {"grad_norm": several},
    {"val_loss": "low"}, {"tokens": -2}, {"samples": float("nan")}, {"tokens": several}, {"tokens": 10**400},
]
for step in run.steps(1):
    for given in wrong:
        try:
            run.log(**given)
        except (TypeError, ValueError) as refused:
            print(f"{type(refused).__name__}: {refused}")
    seen = torch.tensor(3)
    run.log(loss=numpy.float32(0.5), tokens=seen, samples=numpy.int64(2))
    seen.zero_()
print("told", run.summary())
"""
    )
    gang = workshop.start(script=script)
    assert gang.wait() == [0], gang.texts()
    told = [line for line in gang.texts().splitlines() if "Error: " in line]
    ofs = "a tensor of torch.int64 with shape [3]"
    assert [line[:100] for line in told] == [
        "TypeError: run.log(loss=...) was given '0,25': tell one number",
        "TypeError: run.log(loss=...) was given [0.25]: tell one number",
        "TypeError: run.log(loss=...) was given a tensor of torch.complex64 with shape []: tell one number",
        f"TypeError: run.log(grad_norm=...) was given {ofs}: tell one number",
        "TypeError: run.log(val_loss=...) was given 'low': tell one number",
        "ValueError: run.log(tokens=-2): tell on how many this step has worked, 0 or more",
        "ValueError: run.log(samples=nan): tell on how many this step has worked, 0 or more",
        f"TypeError: run.log(tokens=...) was given {ofs}: tell one number",
        f"TypeError: run.log(tokens=...) was given 1{'0' * 58}",
    ]
    (line,) = gang.history.steps()
    assert (line["loss"], line["tokens"]) == (0.5, 3)


def test_ranks_that_are_not_alike_do_not_begin(workshop: Workshop) -> None:
    for number, (odd, message) in enumerate(
        [
            ({"seed": 7}, "the seed differs among the ranks: '1337' on rank 0, '7' on rank 1; start all"),
            (
                {"config": "b"},
                "the configuration's hash differs among the ranks: '' on rank 0, 'b' on rank 1",
            ),
            ({"steps": 41}, "the number of steps differs among the ranks: '40' on rank 0, '41' on rank 1"),
        ]
    ):
        gang = workshop.start(f"odd-{number}", ranks=2, steps=40, of_rank_1=odd)
        assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
        assert message in gang.termination(0).error
        assert gang.termination(0).error == gang.termination(1).error
        assert gang.history.steps() == []


def test_a_model_of_another_shape_is_named_before_gradients_are_mixed(workshop: Workshop) -> None:
    """One rank: DDP itself refuses shapes that differ, so the models are compared where it is not used."""
    from holdfast_trainer.training_state import TrainingState

    small, large = (TrainingState({"model": torch.nn.Linear(4, size)}, 0).describe() for size in (4, 5))
    assert small.startswith("model (")
    (line,) = differing([{"the tracked state": small}, {"the tracked state": large}])
    assert line.startswith("the tracked state differs among the ranks: 'model (")


def test_optimizers_whose_parameters_have_another_order_on_each_rank_do_not_begin(
    workshop: Workshop, tmp_path: Path
) -> None:
    """They train well. But a checkpoint has their moments by number, each of one of the ranks: after a resume
    the ranks came apart, and ended, for good, with the advice to put the model under DDP."""
    script = tmp_path / "sorts_by_set.py"
    script.write_text(
        """
import torch
from holdfast_trainer.run import Run

run = Run()
model = run.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
optimizer = torch.optim.Adam(list(model.parameters())[:: 1 - 2 * run.rank])
run.track(model=model, optimizer=optimizer)
for step in run.steps(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
    )
    gang = workshop.start(ranks=2, script=script)
    assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
    assert gang.termination(0).error.startswith(
        "the order of the parameters of optimizer (sort them: a set's is another in each process) differs "
        "among the ranks: '"
    )


def test_parameters_that_an_optimizer_is_given_in_the_loop_are_told_before_a_resume_is_refused(
    workshop: Workshop, tmp_path: Path
) -> None:
    """A loop that unfreezes a layer in its third step, and gives it to the optimizer then: its first
    interruption was its end, with the advice to build the optimizer as it was, which no script can do whose
    groups come with the step. What can be done is told as they come, and goes on from the same checkpoint."""
    script = tmp_path / "unfreezes.py"
    script.write_text(
        """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
first, last = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(last.parameters(), 0.1)
if sys.argv[1] == "before":
    optimizer.add_param_group({"params": list(first.parameters())})
run.track(model=torch.nn.Sequential(first, last), optimizer=optimizer)
for step in run.steps(int(sys.argv[2])):
    if step == 2 and sys.argv[1] == "later":
        optimizer.add_param_group({"params": list(first.parameters())})
    first.requires_grad_(step >= 2)
    optimizer.zero_grad()
    last(first(torch.ones(1, 2))).sum().backward()
    optimizer.step()
"""
    )
    gang = workshop.start(script=script, arguments=["later", "4"])
    assert gang.wait() == [0], gang.texts()
    told = "optimizer was given parameters after run.track: a resume is refused, as it loads optimizer where"
    assert gang.texts().count(told) == 1

    gang = workshop.start(script=script, arguments=["later", "6"])
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    assert gang.termination().error.startswith(
        "'optimizer' is not what it was when the checkpoint of step 4 was written: its groups had [2, 2] "
        "parameters, and have [2] now (what a loop gives it later is to be there before run.track, frozen)."
    )

    gang = workshop.start(script=script, arguments=["before", "6"])
    assert gang.wait() == [0], gang.texts()
    assert gang.history.events("attempt_start", 3)[0]["resumed_step"] == 4


@pytest.mark.parametrize("state", ["stays", "goes"])
def test_parameters_that_are_taken_from_an_optimizer_are_told_with_what_can_be_done(
    workshop: Workshop, tmp_path: Path, state: str
) -> None:
    """What torch says where their state stays is the number of an object, and the job was tried again."""
    script = tmp_path / "freezes.py"
    script.write_text(
        """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
groups = [{"params": list(last.parameters())}, {"params": list(first.parameters())}]
optimizer = torch.optim.Adam(groups, 0.1)
run.track(model=torch.nn.Sequential(first, last), optimizer=optimizer)
for step in run.steps(int(sys.argv[1])):
    if step == 1:
        for parameter in optimizer.param_groups.pop()["params"]:
            if sys.argv[2] == "goes":
                del optimizer.state[parameter]
    optimizer.zero_grad()
    last(first(torch.ones(1, 2))).sum().backward()
    optimizer.step()
"""
    )
    gang = workshop.start(script=script, arguments=["2", state])
    codes = gang.wait()
    told = "parameters were taken from optimizer after run.track: a resume is refused, as it loads optimizer"
    assert gang.texts().count(told) == 1
    if state == "stays":
        assert codes == [EXIT_CONFIG_ERROR], gang.texts()
        assert gang.termination().error == (
            "optimizer cannot give its state to be saved: it has that of 2 parameters which are in none of "
            "its groups any more. Leave them there and freeze them, by requires_grad_(False)"
        )
        return
    assert codes == [0], gang.texts()
    gang = workshop.start(script=script, arguments=["4", state])
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    said = "had [2] parameters, and have [2, 2] now (what a loop took from it is to stay there, frozen)"
    assert said in gang.termination().error


COUNTS = """
import sys
import torch
from holdfast_trainer.run import Run

class Tally:
    def __init__(self):
        self.seen = []

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)

run = Run(checkpoint_every=2)
model, tally = torch.nn.Linear(2, 1), Tally()
if sys.argv[1] == "begins":
    tally.seen = set()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer, tally=tally)
for step in run.steps(8):
    tally.seen = {step} if step > 2 else [step]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("how", "durable"), [("begins", 0), ("goes on", 2)])
def test_what_cannot_be_saved_is_told_in_a_line_and_not_tried_again(
    how: str, durable: int, workshop: Workshop, tmp_path: Path
) -> None:
    """Each retry met the same, under a traceback."""
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    gang = workshop.start(script=script, arguments=[how])
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    said = gang.termination()
    assert said.error.endswith(
        "parts.tally.seen: a set cannot be saved; keep tensors, numbers, strings, lists and dicts"
    )
    assert (said.config_error, said.durable_step) == (True, durable)
    assert "Traceback" not in gang.texts()


WRAPPED = 'model = run.wrap(raw, settle=(lambda net: loss_of(net, 0, 0)) if options["settle"] else None)\n'
TRACKED = "run.track(model=model, "
STEPPED = "        scheduler.step()\n"
EMA = "ema = torch.optim.swa_utils.AveragedModel(raw)\n"
OF_ONE_RANK = "        if run.rank == 0:\n            ema.update_parameters(raw)\n"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model", {WRAPPED: "model = raw\n"}),
        ("ema", {TRACKED: f"{EMA}{TRACKED}ema=ema, ", STEPPED: STEPPED + OF_ONE_RANK}),
    ],
    ids=["never wrapped", "an average of rank 0's alone"],
)
def test_a_model_that_each_rank_has_of_its_own_is_not_saved_as_one_of_all(
    workshop: Workshop, tmp_path: Path, name: str, changes: dict[str, str]
) -> None:
    """The parts of a checkpoint are written by all ranks together: it was a mixture, and nobody was told."""
    source = (Path(__file__).parent / "loop_script.py").read_text()
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    loop = tmp_path / "loop_apart.py"
    loop.write_text(source)
    gang = workshop.start(ranks=2, script=loop, steps=20, save_every=5)
    assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
    told = gang.termination()
    assert (told.outcome, told.step, told.durable_step, told.config_error) == ("failed", 5, 0, True)
    assert told.error.startswith(f"the parameters of {name} are not the same on all ranks, and a checkpoint")
    assert gang.history.events("checkpoint") == []
    assert workshop.finish("alone", script=loop, steps=20).stop()["step"] == 20


def test_a_rank_whose_model_becomes_another_ends_the_attempt_and_not_the_run(workshop: Workshop) -> None:
    """As where a device computes wrong: its part of a checkpoint would have poisoned the whole."""
    untouched = workshop.finish("untouched", ranks=2, steps=20, save_every=5)
    gang = workshop.start(ranks=2, steps=20, save_every=5, stray_at=11, stray_by=0.5)
    assert gang.wait() == [1, 1], gang.texts()
    told = gang.termination(0)
    assert (told.outcome, told.step, told.durable_step, told.config_error) == ("failed", 15, 10, False)
    assert told.error == gang.termination(1).error
    assert told.error.startswith("step 15: the parameters of model have come apart: on rank 1 they are not ")
    assert "as they were at step 10. This state was not saved: the checkpoint of step 10 is" in told.error
    assert [line["step"] for line in gang.history.events("checkpoint")] == [5, 10]
    again = workshop.finish(ranks=2, steps=20, save_every=5)
    assert again.stop()["digest"] == untouched.stop()["digest"] != ""


def test_ranks_that_round_apart_go_on_and_a_resume_says_that_it_is_not_exact(workshop: Workshop) -> None:
    options: dict[str, Any] = {"ranks": 2, "steps": 20, "save_every": 5}
    gang = workshop.start(**options, stray_at=6, stray_by=1e-5, exit_at=14)
    assert gang.wait() == [3, 3], gang.texts()
    apart = "parameters of model that are not the same on rank 1"
    assert gang.texts().count(f"{apart} were the same to the bit at step 5") == 1, "once, not at each save"
    assert [line["step"] for line in gang.history.events("checkpoint")] == [5, 10]
    again = workshop.finish(**options)
    [start] = again.events("attempt_start", 2)
    assert (start["resumed_step"], start["differences"]) == (10, [f"not deterministic: {apart}"])


DATA_ENDS = """
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
model = run.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
batches = iter([torch.ones(1, 1)] * (6 - run.rank))
for step in run.steps(6):
    model(next(batches)).sum().backward()
    optimizer.step()
"""


def test_a_rank_with_fewer_batches_than_steps_says_so(workshop: Workshop, tmp_path: Path) -> None:
    """As of a dataset that each rank reads its own files of: "StopIteration" was all that the job said."""
    script = tmp_path / "data_ends.py"
    script.write_text(DATA_ENDS)
    gang = workshop.start(ranks=2, script=script, arguments=[])
    assert gang.wait() == [1, 1], gang.texts()
    told = gang.termination(1)
    assert (told.outcome, told.step, told.durable_step, told.config_error) == ("failed", 5, 4, False)
    assert told.error.startswith("rank 1, step 6: an iterator has no more for it (StopIteration). Ask run")
    assert "model(next(batches)).sum().backward()" in gang.ranks[1].text(), "where it was is in the log"
    assert lost_its_peer(gang.termination(0), ())


def test_memory_that_never_sufficed_is_not_asked_for_again(workshop: Workshop) -> None:
    gang = workshop.start("never", steps=40, fail_at=0, fail_as="memory")
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    told = gang.termination()
    assert told.config_error
    assert told.error.startswith("rank 0 ran out of memory in step 1: ")
    assert "No step has fitted, so none will: this is not tried again. Give a forward pass" in told.error
    assert "Traceback" in gang.texts(), "where it was is in the log"


def test_memory_that_ran_out_in_the_middle_is_a_failure_that_may_be_tried_again(workshop: Workshop) -> None:
    gang = workshop.start(steps=40, save_every=5, fail_at=13, fail_as="memory")
    assert gang.wait() == [1], gang.texts()
    told = gang.termination()
    assert (told.outcome, told.durable_step, told.config_error) == ("failed", 10, False)
    assert told.error.startswith("rank 0 ran out of memory in step 14: ")
    assert "not tried again" not in told.error


def test_memory_that_sufficed_on_an_earlier_device_is_asked_for_again(workshop: Workshop) -> None:
    """The first attempt had a larger device, or one to itself. The third has no room for the model itself."""
    workshop.start(steps=40, save_every=5, fail_at=7).wait()
    for at, where in ((5, "in step 6"), (-1, "before its first step")):
        env = {"NO_ROOM_FOR_MODEL": "yes"} if at < 0 else {}
        gang = workshop.start(steps=40, fail_at=at, fail_as="memory", env=env)
        assert gang.wait() == [1], gang.texts()
        told = gang.termination()
        assert not told.config_error
        assert told.error.startswith(f"rank 0 ran out of memory {where}: ")
        assert "Steps of earlier attempts fitted, on this device or with more memory; " in told.error
        assert "GB were free for it here. Give a forward pass a smaller batch" in told.error


@pytest.mark.parametrize("kind", ["looped", "fused"])
def test_gradients_that_overflow_at_every_scale_end_the_run(workshop: Workshop, kind: str) -> None:
    """fp16: the loss is finite, and no step changes a weight. A fused optimizer skips by itself, unseen."""
    gang = workshop.start(steps=400, save_every=60, overflow=kind, hold_at=20)
    gang.wait_for_step(20)
    metrics = series(get(address_of(gang), "/metrics"))
    assert metrics["holdfast_skipped_steps_total"] == 20 - (kind == "fused"), "a fused one shows late"
    gang.release()
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    told = gang.termination()
    assert (told.outcome, told.durable_step, told.config_error) == ("failed", 60, True)
    assert told.step == LIMIT + (kind == "fused")
    assert "gradients in fp16 were not finite in 100 steps in a row, at a lower scale" in told.error
    assert "none of these steps changed a weight. Training stopped here: the checkpoint of" in told.error


# ------------------------------------------------------------------ decisions


@pytest.mark.parametrize(
    ("scales", "in_a_row"),
    [
        ([(8.0, True), (8.0, True), (16.0, True)], [0, 0, 0]),
        ([(8.0, True), (4.0, True), (2.0, True), (2.0, True)], [0, 1, 2, 0]),
        ([(8.0, False), (4.0, False), (4.0, False), (2.0, False), (2.0, True)], [0, 1, 1, 2, 0]),
        ([(None, True), (None, False)], [0, 0]),
    ],
    ids=["none", "fused, of the step before", "looped, with gradients gathered between", "no scaler"],
)
def test_a_skipped_step_shows_in_the_scale(
    scales: list[tuple[float | None, bool]], in_a_row: list[int]
) -> None:
    """Of a GPU the same, a look later: what is on its way is not waited for."""
    overflow, told = Overflow(), []
    for scale, stepped in scales:
        overflow.look(None if scale is None else Late(scale), stepped=stepped)
        told.append(overflow.in_a_row)
    assert told == in_a_row

    queue = StandInQueue()
    overflow, told = Overflow(), []
    for scale, stepped in scales:
        overflow.look(None if scale is None else queue.late(scale), stepped=stepped)
        assert queue.waiting == (0 if scale is None else 1)
        told.append(overflow.in_a_row)
    if scales[0][0] is not None:
        assert told == [0, *in_a_row[:-1]]


def test_what_is_said_of_a_step() -> None:
    told = [
        Offered(1.0, 2.0),
        Offered(math.inf, 2.0, "rows 8 to 15"),
        Offered(math.nan, 2.0, "rows 16 to 23"),
    ]
    error = non_finite_step(7, told, 0, deterministic=False)
    assert "the loss of rank 1 is inf on rows 8 to 15; the loss of rank 2 is nan on rows 16 to 23." in str(
        error
    )
    assert "nothing was saved yet" in str(error)
    assert "A retry" not in str(error)
    assert error.mendable


@pytest.mark.parametrize(
    ("local_rank", "gpus", "expected"),
    [(0, 0, "cpu"), (3, 0, "cpu"), (0, 1, "cuda:0"), (3, 4, "cuda:3")],
)
def test_each_rank_has_a_gpu_of_its_own(local_rank: int, gpus: int, expected: str) -> None:
    assert str(device_for(7, local_rank, gpus)) == expected


def test_a_rank_for_which_no_gpu_is_left_says_so() -> None:
    with pytest.raises(NoGpu, match=r"rank 7 \(LOCAL_RANK=3\) has no GPU: 3 of them are visible") as error:
        device_for(7, 3, 3)
    assert "Start no more ranks on a machine than it has GPUs (the job's `gpus`)" in str(error.value)
    assert error.value.mendable, "a machine that lost one is not the only one"


NCCL_SAYS = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.26.2\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported late"),
            True,
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (torch.distributed.DistBackendError(f"{NCCL_SAYS}Cuda failure 2 'out of memory'"), True),
        (torch.distributed.DistBackendError(f"{NCCL_SAYS}Cuda failure 'out of memory'"), True),
        (torch.distributed.DistBackendError(f"{NCCL_SAYS}Cuda failure 999 'unknown error'"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_an_empty_message_has_the_error_s_name() -> None:
    said = str(out_of_memory(MemoryError(), 3, 9, CPU, "Buy more", fitted=True))
    assert said == "rank 3 ran out of memory in step 9: MemoryError. Buy more"


@pytest.mark.parametrize(
    ("fitted", "before", "mendable", "said"),
    [
        (True, False, True, "step 9: no room. Buy more"),
        (True, True, True, "step 9: no room. Buy more"),
        (False, True, True, "Steps of earlier attempts fitted, on this device or with more memory"),
        (False, False, False, "No step has fitted, so none will: this is not tried again. Buy more"),
    ],
)
def test_where_memory_is_short_what_fitted_before_counts(
    fitted: bool, before: bool, mendable: bool, said: str
) -> None:
    error = out_of_memory(MemoryError("no room"), 0, 9, CPU, "Buy more", fitted=fitted, fitted_before=before)
    assert error.mendable is mendable
    assert said in str(error)


@pytest.mark.parametrize(
    ("free", "mendable", "said"),
    [
        (20, True, "Peak 9.0 of 80.0 GB. About 50.0 GB of it are other processes' (nvidia-smi lists them)"),
        (61, False, "Peak 9.0 of 80.0 GB. No step has fitted, so none will: this is not tried again."),
    ],
)
def test_a_gpu_that_others_have_filled_is_told_from_one_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, free: int, mendable: bool, said: str
) -> None:
    """The job ended for good, as if no GPU of that size would do."""
    gb = 10**9
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * gb))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 9 * gb)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 * gb)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * gb, 80 * gb))
    gpu, fault = torch.device("cuda", 0), torch.OutOfMemoryError("CUDA out of memory.")
    error = out_of_memory(fault, 0, 1, gpu, "Buy more", fitted=False)
    assert error.mendable is mendable
    assert said in str(error)


def test_an_attempt_that_did_a_step_is_known_to_the_next(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for attempt in (1, 2):
        Journal(run, attempt).event("attempt_start")
    assert not trained_before(run, 2)
    Journal(run, 1).event("first_step", step=1)
    assert [trained_before(run, attempt) for attempt in (1, 2)] == [False, True]


def exchange() -> Exchange:
    return Exchange(Gang(0, 1, 0, CPU), Notice(30, lambda: None))


def test_a_scaler_passes_over_gradients_that_are_not_finite_but_not_losses() -> None:
    """fp16: an infinite gradient only means that the scale was too large."""
    one = exchange()
    one.norm_must_be_finite = False
    one.offer_loss(1, torch.tensor(2.0), math.inf)
    one.contribute(1)
    agreed = one.finish()
    assert (agreed.loss, agreed.grad_norm, agreed.broken) == ((1, 2.0), math.inf, None)
    one.offer_loss(2, torch.tensor(math.nan), 1.0)
    one.contribute(2)
    assert one.finish().broken == 2


def test_a_norm_in_a_call_of_its_own_is_of_its_step_whenever_it_is_told() -> None:
    """Before the loss, after it, once that has gone, and where a loop tells no loss at all."""
    before, after, gone, alone = (exchange() for _ in range(4))
    before.offer_norm(1, math.nan)
    before.offer_loss(1, 2.0)
    after.offer_loss(1, 2.0, 1.0)
    after.offer_norm(1, torch.tensor(math.nan))  # of a second optimizer
    gone.offer_loss(1, 2.0)
    gone.contribute(1)
    gone.offer_norm(1, math.nan)
    assert (gone.finish().loss, gone.offered) == ((1, 2.0), Offered(2.0, None))
    alone.offer_norm(1, math.nan)
    for one, loss in ((before, (1, 2.0)), (after, (1, 2.0)), (gone, None), (alone, None)):
        (agreed,) = one.drain(1)
        assert (agreed.loss, agreed.broken) == (loss, 1)
        assert repr(agreed.grad_norm) == "nan"


def test_late_losses_are_all_heard() -> None:
    one = exchange()
    for step in (1, 2, 3):
        one.offer_loss(step, torch.tensor(float(step)))
    assert [agreed.loss for agreed in one.drain(3)] == [(1, 1.0), (2, 2.0), (3, 3.0)]
