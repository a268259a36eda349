"""An interrupted run ends with the same bits as one that nobody touched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gangs import KILL, NOTICE, History, Workshop
from native_bf16 import HAS_BF16, WITHOUT_BF16

from holdfast_trainer.checkpoint.inspection import Opened, differences
from holdfast_trainer.contract import RunDir, read_lines
from holdfast_trainer.exactness import Exactness
from holdfast_trainer.ledger import Journal
from holdfast_trainer.parallel import Gang
from holdfast_trainer.redone import Redone
from holdfast_trainer.resume import Resumed
from holdfast_trainer.training_state import TrainingState

STEPS = 60
RANKS = ["ranks: 2 -> 1"]
LOADER = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from holdfast_trainer.run import Run

generator, last = torch.Generator() if sys.argv[1] == "own" else None, int(sys.argv[2])
run = Run(checkpoint_every=4)
loader = DataLoader(TensorDataset(torch.arange(48.0).view(24, 2)), 2, generator=generator)
model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
done, batches = run.track(model=model, optimizer=optimizer), None
for step in run.steps(12):
    if batches is None:
        batches = iter(loader)
        for _ in range(done):
            next(batches)
    loss = model(next(batches)[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    if step == last:
        while not run.run_dir.checkpoint(4).exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
"""
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, complex weights": (1, {"complex": True, "size": 4200}),
    "one rank, accumulated, bf16": (1, {"chunks": 3, "bf16": True}),
    "one rank, fp16": (1, {"chunks": 2, "fp16": True}),
    "two ranks": (2, {"chunks": 2}),
    "two ranks, bf16": (2, {"bf16": True}),
    "two ranks, batch norm, validation": (2, {"norm": True, "validate_every": 9}),
    "two ranks, gradients carried on": (
        2,
        {"step_every": 4, "chunks": 2, "norm": True, "validate_every": 3},
    ),
    "two ranks, copied late": (2, {"norm": True, "chunks": 2, "size": 4200}),
    "three ranks, gradients zeroed in place": (3, {"zeroed": True}),
    "three ranks, settled": (3, {"settle": True, "norm": True, "chunks": 2}),
}


def assert_same(interrupted: History, untouched: History) -> None:
    assert interrupted.losses() == untouched.losses()
    assert interrupted.validations() == untouched.validations()
    assert sorted(untouched.losses()) == list(range(1, STEPS + 1))
    ours, theirs = interrupted.stop(), untouched.stop()
    assert ours["digest"] == theirs["digest"] != ""
    assert (ours["step"], ours["durable_step"], ours["outcome"]) == (STEPS, STEPS, "finished")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_killed_and_noticed_equals_untouched(workshop: Workshop, form: str) -> None:
    ranks, options = FORMS[form]
    if options.get("bf16") and not HAS_BF16:
        pytest.skip(WITHOUT_BF16)
    chance = random.Random(form)
    options = {**options, "steps": STEPS, "save_every": 7}
    untouched = workshop.finish("untouched", ranks=ranks, **options)

    at = chance.randrange(8, 28)
    killed = workshop.start(ranks=ranks, **options, pause=0.01, hold_at=at + 5)
    killed.wait_for_step(at)
    killed.signal(KILL)
    assert set(killed.wait()) <= {-9, 1}, "1: it saw a peer go before its own kill came"

    at = chance.randrange(30, 45)
    noticed = workshop.start(ranks=ranks, **options, pause=0.01, hold_at=at + 5)
    noticed.wait_for_step(at)
    noticed.signal(NOTICE, [chance.randrange(ranks)])
    assert noticed.wait() == [0] * ranks, noticed.texts()
    assert noticed.termination().step == noticed.termination().durable_step

    interrupted = workshop.finish(ranks=ranks, **options)
    assert interrupted.events("attempt_start", 3)[0]["resumed_step"] == noticed.termination().step
    assert_same(interrupted, untouched)
    if options.get("complex"):
        name = "shared.parts.model.0.weight"
        with Opened(interrupted.run, 56) as one, Opened(interrupted.run, STEPS) as other:
            furthest = (one.tensor(name) - other.tensor(name)).abs().max().item()
            told = {found.name: found.max_abs for found in differences(one, other)}
        assert told[name] == pytest.approx(furthest), "of both parts of a number"
    if options.get("fp16"):
        with Opened(interrupted.run, STEPS) as saved:
            scale = saved.shared()["parts"]["scaler"]["scale"]
        assert scale < 2.0**16 * 2 ** (STEPS // 3), "it grew every third step, and some steps were skipped"


def test_a_newest_checkpoint_that_is_damaged_costs_steps_and_no_bits(workshop: Workshop) -> None:
    """The damaged step is the first one saved again: the new checkpoint must not be taken for the old."""
    options: dict[str, Any] = {"steps": STEPS, "save_every": 10}
    untouched = workshop.finish("untouched", **options)
    killed = workshop.start(**options, pause=0.01, hold_at=43)
    killed.wait_for_step(38)
    killed.signal(KILL)
    killed.wait()
    run = killed.history.run
    newest = max(run.checkpoints.glob("step-*"))
    part = newest / "rank-0.safetensors"
    damaged = bytearray(part.read_bytes())
    damaged[-1] ^= 1
    part.write_bytes(damaged)

    resumed = workshop.start(**options, pause=0.02)
    resumed.wait_for_text("was passed over: rank 0: rank-0.safetensors: checksum")
    assert resumed.wait() == [0], resumed.texts()
    start = resumed.history.events("attempt_start", 2)[0]
    assert start["skipped"][0]["checkpoint"] == newest.name
    kept = [line["step"] for line in resumed.history.events("checkpoint", 2)]
    assert int(newest.name[5:]) in kept
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        f"step-{step:08d}" for step in (STEPS - 20, STEPS - 10, STEPS)
    ]
    assert_same(resumed.history, untouched)


@pytest.mark.parametrize("whose", ["own", "torch's"])
def test_a_step_that_is_done_again_with_another_loss_is_told(
    workshop: Workshop, tmp_path: Path, whose: str
) -> None:
    """A DataLoader draws its seed from torch's generator when it is iterated, once more after a resume: from
    there on dropout drew other numbers, without a word. An attempt in between that is killed as it starts has
    no step to compare with."""
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    killed = workshop.start(script=script, arguments=[whose, "7"])
    assert killed.wait() == [-9], killed.texts()
    at_once = workshop.start(script=script, arguments=[whose, "4"])
    assert at_once.wait() == [-9], at_once.texts()
    assert at_once.history.steps(2) == []
    resumed = workshop.start(script=script, arguments=[whose, "-1"])
    assert resumed.wait() == [0], resumed.texts()
    assert "resumed from step 4" in resumed.texts()
    told = "was done before with a loss of" in resumed.texts()
    assert told == (whose != "own"), resumed.texts()
    differs = [line["difference"] for line in resumed.history.events("differs", 3)]
    assert [text.partition(":")[0] for text in differs] == (
        [] if whose == "own" else ["loss of step 5, done again"]
    )
    if whose == "own":
        assert len(resumed.history.losses()) == 12


@pytest.mark.parametrize("saved", [True, False])
def test_steps_that_another_number_of_ranks_did_meanwhile_are_nothing_to_compare_with(
    workshop: Workshop, saved: bool
) -> None:
    """As where a job goes on with what ranks there are: its batches were said to be no function of the step.
    So were those of one that had nothing to go on from, and began anew."""
    every = {"steps": 12, "save_every": 5 if saved else 50}
    for ranks in (1, 2):
        failed = workshop.start(ranks=ranks, **every, fail_at=8)
        assert set(failed.wait()) == {1}, failed.texts()
    last = workshop.start(ranks=1, **every)
    assert last.wait() == [0], last.texts()
    starts = last.history.events("attempt_start")
    assert [start["resumed_step"] for start in starts] == ([0, 5, 5] if saved else [0, 0, 0])
    assert [bool(start["differences"]) for start in starts] == [False, saved, False]
    assert "was done before with a loss of" not in last.texts()
    assert last.history.events("differs") == []


@pytest.mark.parametrize(
    ("attempts", "before"),
    [
        pytest.param([([], 1.0), ([], 2.0), ([], 3.0)], 3.0, id="the newest"),
        pytest.param([([], 1.0), ([], 2.0), (RANKS, 3.0)], 2.0, id="one meanwhile on other ranks"),
        pytest.param([([], 1.0), (RANKS, 2.0)], 2.0, id="it saved what it had on other ranks"),
        pytest.param([([], 1.0), (RANKS, None)], None, id="it saved that, and those before are others"),
    ],
)
def test_losses_are_compared_with_those_of_an_attempt_that_computed_alike(
    tmp_path: Path, attempts: list[tuple[list[str], float | None]], before: float | None
) -> None:
    """Attempt 2 saved step 5, from which this one goes on as it was saved."""
    run = RunDir(tmp_path)
    for number, (differing, loss) in enumerate(attempts, 1):
        journal = Journal(run, number)
        journal.event("attempt_start", differences=differing)
        if loss is not None:
            journal.steps([{"step": 6, "loss_hex": loss.hex()}])
    told = Redone(run, len(attempts) + 1, step=5, saved_by=2).compare(6, 9.0)
    assert told == ("" if before is None else f"loss of step 6, done again: {before} -> 9.0")


BEFORE_THE_LOADER = """
import itertools, os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from holdfast_trainer.run import Run

class Noisy(Dataset):
    def __len__(self):
        return 22
    def __getitem__(self, index):
        return torch.full((2,), index / 22) + torch.rand(2) / 9, torch.ones(1)

EPOCHS, dataset = 2, Noisy()
run = Run(checkpoint_every=3)
model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
"""
AFTER_IT = """
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    if step == int(sys.argv[1]):
        while not run.run_dir.checkpoint(step - 1).exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lines_of_the_page_make_an_own_loader_exact(workshop: Workshop, tmp_path: Path) -> None:
    """Gone on with within a pass, and where one begins: the order, what workers draw, and dropout."""
    page = (Path(__file__).parents[2] / "docs/own-loops.md").read_text()
    lines = page.split("## A `DataLoader` of your own")[1].split("```python\n")[1].split("```")[0]
    script = tmp_path / "own_loader.py"
    script.write_text(BEFORE_THE_LOADER + lines + AFTER_IT)
    untouched = workshop.start("untouched", script=script, arguments=["-1"])
    assert untouched.wait() == [0], untouched.texts()
    for at in ("4", "7"):  # a pass has 6 steps
        assert workshop.start(script=script, arguments=[at]).wait() == [-9]
    resumed = workshop.finish(script=script, arguments=["-1"])
    assert [line["resumed_step"] for line in resumed.events("attempt_start")] == [0, 3, 6]
    assert sorted(untouched.history.losses()) == list(range(1, 13))
    assert resumed.losses() == untouched.history.losses()
    assert resumed.stop()["digest"] == untouched.history.stop()["digest"]


SPARSE = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2)
model = run.wrap(torch.nn.Embedding(50, 4, sparse=True))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[1])):
    drawn = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(step))
    loss = model(drawn).square().sum()
    loss.backward()
    run.log(loss=loss)
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_sparse_gradients_that_add_up_over_steps_are_saved(workshop: Workshop, tmp_path: Path) -> None:
    """As of an embedding that is trained by a part of its rows in each step; the first save ended the run."""
    script = tmp_path / "sparse.py"
    script.write_text(SPARSE)
    untouched = workshop.start("untouched", script=script, arguments=["12"])
    assert untouched.wait() == [0], untouched.texts()
    for steps in ("3", "6", "12"):
        resumed = workshop.finish(script=script, arguments=[steps])
    assert [line["resumed_step"] for line in resumed.events("attempt_start")] == [0, 3, 6]
    assert resumed.losses() == untouched.history.losses()
    assert resumed.stop()["digest"] == untouched.history.stop()["digest"]


FORGETFUL = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run()
one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
if sys.argv[1] == "no model":
    run.track(optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
run.track(one=one, optimizer=optimizer)
for step in run.steps(int(sys.argv[1])):
    (one(torch.ones(1, 2)) - two(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    if step == 2:
        optimizer = torch.optim.AdamW(one.parameters())
"""


def test_what_a_loop_forgets_to_track_is_told(workshop: Workshop, tmp_path: Path) -> None:
    """A second model that began at random again, moments at 0, after each interruption, without a word."""
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    first = workshop.start(script=script, arguments=["5"])
    assert first.wait() == [0], first.texts()
    told = ["parameters of optimizer that no tracked part has", "steps of an untracked AdamW"]
    assert [first.texts().count(one) for one in told] == [1, 1]
    again = workshop.finish(script=script, arguments=["6"])
    assert again.events("attempt_start", 2)[0]["differences"] == [f"not deterministic: {', '.join(told)}"]
    refused = workshop.start("refused", script=script, arguments=["no model"])
    assert refused.wait() == [1]
    assert "TypeError: track() was given no model, but optimizer: name what that steps too" in refused.texts()


STEPS_ITS_SCHEDULER = """
import os, signal, sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=100)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
average = torch.optim.swa_utils.AveragedModel(model)
run.track(model=model, optimizer=optimizer, scheduler=scheduler, average=average)
for epoch in range(3):
    for step in run.steps((epoch + 1) * 4):
        loss = model(torch.randn(2, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss)
        optimizer.step()
        if sys.argv[1] == "in the last step" and (step + 1) % 4 == 0:
            scheduler.step()
            average.update_parameters(model)
        if sys.argv[2] == "noticed" and step == 9:
            os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == "after the loop":
        scheduler.step()
        average.update_parameters(model)
"""


@pytest.mark.parametrize("where", ["in the last step", "after the loop"])
def test_what_is_stepped_between_two_loops_is_told(workshop: Workshop, tmp_path: Path, where: str) -> None:
    """A resume stepped the scheduler once more for each epoch that was done, without a word."""
    script = tmp_path / "steps_its_scheduler.py"
    script.write_text(STEPS_ITS_SCHEDULER)
    untouched = workshop.finish("untouched", script=script, arguments=[where, ""])
    gang = workshop.start(script=script, arguments=[where, "noticed"])
    assert gang.wait() == [0], gang.texts()
    resumed = workshop.finish(script=script, arguments=[where, ""])
    told = [f"changes of {name} between two loops over run.steps" for name in ("scheduler", "average")]
    if where == "after the loop":
        assert [gang.texts().count(f"{one} are left out or made twice") for one in told] == [1, 1]
        (start,) = resumed.events("attempt_start", 2)
        assert start["differences"] == [f"not deterministic: {', '.join(told)}"]
    else:
        assert "between two loops" not in gang.texts()
        assert resumed.stop()["digest"] == untouched.stop()["digest"]


UNFREEZES = """
import os, signal, sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=100)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(8):
    if sys.argv[1] == "by the step":
        model[0].requires_grad_(step >= 3)
    elif step == 3:
        model[0].requires_grad_(True)
    optimizer.zero_grad()
    loss = model(torch.randn(2, 2)).square().mean()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    if step + 1 == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("how", "noticed_in", "exact"),
    [("by the step", 5, True), ("by the step", 2, True), ("once", 2, True), ("once", 5, False)],
)
def test_layers_that_a_resume_freezes_again_are_told(
    workshop: Workshop, tmp_path: Path, how: str, noticed_in: int, exact: bool
) -> None:
    """They were trained no more from there on, without a word."""
    script = tmp_path / "unfreezes.py"
    script.write_text(UNFREEZES)
    untouched = workshop.finish("untouched", script=script, arguments=[how, "0"])
    gang = workshop.start(script=script, arguments=[how, str(noticed_in)])
    assert gang.wait() == [0], gang.texts()
    stopped = gang.termination().step
    gang = workshop.start(script=script, arguments=[how, "0"])
    assert gang.wait() == [0], gang.texts()
    assert gang.history.events("attempt_start", 2)[0]["resumed_step"] == stopped
    assert (gang.history.stop()["digest"] == untouched.stop()["digest"]) is exact
    told = "trained parameters of model are 2, and were 4: freeze by the step, not in one alone"
    assert (f"{told}: a resume may not be bit-exact" in gang.texts()) is not exact
    assert [line["difference"] for line in gang.history.events("differs")] == ([] if exact else [told])


@pytest.mark.parametrize(
    ("rank", "told_at_resume", "events"), [(0, (), 1), (1, (), 0), (0, ("ranks: 4 -> 2",), 0)]
)
def test_what_the_first_step_shows_is_in_the_ledger_once_where_nothing_was_told_before(
    tmp_path: Path, rank: int, told_at_resume: tuple[str, ...], events: int
) -> None:
    """Every rank finds it, and keeps it with its checkpoints."""
    environment: dict[str, Any] = {"deterministic": True}
    state, _ = one_that_is_stepped()
    exactness, run = Exactness(environment, Gang(rank, 2, 0, torch.device("cpu"))), RunDir(tmp_path)
    exactness.track(
        state, Resumed(5, differences=told_at_resume, environment={"trained parameters of model": 4})
    )
    exactness.begin(state)
    journal = Journal(run, 1)
    for step in (6, 7):
        exactness.end_step(state, step, journal)
    found = [line["difference"] for line in read_lines(run.ledger(1))]
    assert len(found) == events
    assert environment["not deterministic"] == "trained parameters of model"


def test_a_loop_that_was_left_has_changed_its_scheduler_itself(tmp_path: Path) -> None:
    """And not what came between it and the next one: nothing is left out by a resume, or done twice."""
    environment: dict[str, Any] = {"deterministic": True}
    state, scheduler = one_that_is_stepped()
    exactness, journal = Exactness(environment, ALONE), Journal(RunDir(tmp_path), 1)
    exactness.track(state, Resumed())
    exactness.begin(state)
    state.optimizers[0].step()
    scheduler.step()
    exactness.end_step(state, 1, journal)  # and is left, so that nothing is saved
    exactness.begin(state)
    assert "not deterministic" not in environment


@pytest.mark.parametrize("deterministic", [True, False])
def test_sums_that_a_resume_makes_otherwise_are_told_to_who_wants_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.setattr("holdfast_trainer.exactness.not_repeated", lambda *_: "they are grouped otherwise")
    environment: dict[str, Any] = {"deterministic": deterministic}
    state, _ = one_that_is_stepped()
    monkeypatch.setattr(state, "replicated", {"model": None})
    Exactness(environment, ALONE).begin(state)
    assert ("not deterministic" in environment) is deterministic


ALONE = Gang(0, 1, 0, torch.device("cpu"))


def one_that_is_stepped() -> tuple[TrainingState, torch.optim.lr_scheduler.LRScheduler]:
    """A state with two parameters that are trained, and the scheduler in it."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return TrainingState(parts, 0), scheduler


SCHEDULES = """
import sys
import torch
from holdfast_trainer.run import Run

how = sys.argv[1]
run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled=how != "by the step")
make = lambda last: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step, last_epoch=last)
if how == "tracked":
    run.track(model=model, optimizer=optimizer, scheduler=(scheduler := make(-1)), scaler=scaler)
elif how == "forgotten":
    scheduler = make(-1)
    run.track(model=model, optimizer=optimizer)
else:
    run.track(model=model, optimizer=optimizer)
    scheduler = make(run.step - 1)
for step in run.steps(int(sys.argv[2])):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
"""


@pytest.mark.parametrize("how", ["tracked", "by the step", "forgotten"])
def test_a_scheduler_and_a_scaler_that_are_forgotten_are_told(
    workshop: Workshop, tmp_path: Path, how: str
) -> None:
    """The rate began anew with each attempt, and so did the scale, without a word."""
    script = tmp_path / "schedules.py"
    script.write_text(SCHEDULES)
    first = workshop.start(script=script, arguments=[how, "5"])
    assert first.wait() == [0], first.texts()
    again = workshop.start(script=script, arguments=[how, "8"])
    assert again.wait() == [0], again.texts()
    (start,) = again.history.events("attempt_start", 2)
    forgotten = how == "forgotten"
    of_scaler = "scales of an untracked GradScaler"
    assert (f"{of_scaler} are not saved: a resume may not be bit-exact" in first.texts()) is forgotten
    assert start["differences"] == ([f"not deterministic: {of_scaler}"] if forgotten else [])
    behind = (
        "the step of an untracked LambdaLR is 1, and was 5: have it tracked: a resume may not be bit-exact"
    )
    assert (behind in again.texts()) is forgotten


ELSEWHERE_BY_DEFAULT = """
import sys
import torch
from holdfast_trainer.run import Run
from holdfast_trainer.samples import Samples

torch.set_default_device("meta")
run = Run(checkpoint_every=4)
model = run.wrap(torch.nn.Linear(2, 1, device="cpu"))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
data = [torch.full((2,), float(n), device="cpu") for n in range(12)]
samples = Samples(data, batch=2, rank=run.rank, world_size=run.world_size, workers=1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[1])):
    loss = model(samples.batch(step) / 12).square().mean()
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
print("of both", run.mean(run.rank), flush=True)
"""


def test_a_default_device_is_the_scripts_own_matter(workshop: Workshop, tmp_path: Path) -> None:
    """What ranks agree on, what is saved and what is read again is the CPU's, wherever tensors are made
    otherwise: on the GPU a resume failed, and each step waited for it. Here they would have no memory."""
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE_BY_DEFAULT)
    workshop.finish(ranks=2, script=script, arguments=["6"])
    gang = workshop.start(ranks=2, script=script, arguments=["10"])
    assert gang.wait() == [0, 0], gang.texts()
    assert gang.history.events("attempt_start", 2)[0]["resumed_step"] == 6
    assert sorted(gang.history.losses()) == list(range(1, 11))
    assert "of both 0.5" in gang.texts()


UNSCALED_BEFORE = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=int(sys.argv[1]), keep=9)
model = torch.nn.Linear(2, 1)
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
run.track(model=model, optimizer=optimizer, scaler=scaler)
for step in run.steps(int(sys.argv[2])):
    loss = model(torch.ones(1, 2)).square().sum()
    scaler.scale(loss).backward()
    run.log(loss=loss)
    if step % 2 == 0:
        scaler.unscale_(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("every", "told"), [(3, True), (2, False)])
def test_a_scaler_that_is_saved_amid_its_turn_is_told(
    workshop: Workshop, tmp_path: Path, every: int, told: bool
) -> None:
    """It unscales gradients in one step, and has its optimizer step in the next: after a resume between them
    it did so twice, and the weights were others, without a word."""
    script = tmp_path / "unscaled_before.py"
    script.write_text(UNSCALED_BEFORE)
    gang = workshop.start(script=script, arguments=[str(every), "4"])
    assert gang.wait() == [0], gang.texts()
    said = "what scaler has done to gradients before the step ended in which it is updated, it does again: "
    assert (said in gang.texts()) == told
    history = workshop.finish(script=script, arguments=[str(every), "6"])
    assert ("not deterministic" in str(history.events("attempt_start", 2)[0]["differences"])) == told
