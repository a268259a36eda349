"""`tune` finds what fits and what is fast, says what each setting buys, and writes what to use."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from gangs import Gang as Started
from gangs import Workshop
from gpt_runs import COMMAND, write_config
from native_bf16 import needs_bf16
from queued_event import QueuedEvent
from torch import nn
from torch.utils.data import Dataset
from waiting import wait_until

from holdfast_trainer.config import load
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.model_config import divisors
from holdfast_trainer.parallel import Gang
from holdfast_trainer.precision import Bf16, precision
from holdfast_trainer.rehearsal import Clock
from holdfast_trainer.tune import command, session
from holdfast_trainer.tune.gpt import settings_of, with_settings
from holdfast_trainer.tune.measure import Build, Effort, measure
from holdfast_trainer.tune.own import OwnTrial
from holdfast_trainer.tune.plan import (
    ALL_OFF,
    ALL_ON,
    AS_IT_IS,
    Candidate,
    Measured,
    Switch,
    candidates,
    choose,
    factors,
)
from holdfast_trainer.tune.report import as_markdown, as_text, gain
from holdfast_trainer.tune.search import Size, best_size, doubling, scaled_rate, sizes_to_try
from holdfast_trainer.tune.session import NOT_RECOMPUTING, RECOMPUTING, Findings, Options, Session, Subject
from holdfast_trainer.tune.settings import Settings
from holdfast_trainer.tune.workload import Workload

pytestmark = pytest.mark.long

WORKLOADS = Path(__file__).parent / "ragged_workload.py"
QUICK = ("--rounds", "1", "--steps", "1", "--seconds", "0", "--no-compile")


@pytest.fixture(autouse=True, scope="module")
def _passed_over() -> None:
    """Each measurement looks twice for garbage: what the compiler leaves as it is imported is none."""
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def searched(
    allowed: Sequence[int], room: int, outcome: Callable[[int], Size | None]
) -> tuple[list[int], list[Size]]:
    """What was tried, and what was found."""
    tried = []
    search = sizes_to_try(allowed, room)
    try:
        batch = next(search)
        while True:
            tried.append(batch)
            batch = search.send(outcome(batch))
    except StopIteration as end:
        return tried, end.value


# ---------------------------------------------------------------------- search


def test_sizes_double_until_one_does_not_fit_and_then_close_in() -> None:
    fits = lambda batch: Size(batch, batch, 1) if batch <= 11 else None  # noqa: E731
    tried, found = searched(doubling(1, 64), 1 << 40, fits)
    assert tried == [1, 2, 4, 8, 16, 12, 10]
    assert best_size(found) == Size(10, 10, 1), "the largest of the sizes in question that fits"


def test_what_would_leave_no_room_is_not_tried() -> None:
    tried, found = searched(doubling(1, 64), 900, lambda batch: Size(batch, batch, 100 * batch))
    assert max(tried) == 8, "16 would take 1,600 of 900 bytes, and that is known from 4 and 8"
    assert max(size.memory for size in found) <= 900


def test_doubling_ends_where_it_gains_nothing() -> None:
    tried, found = searched(doubling(1, 512), 1 << 40, lambda batch: Size(batch, min(batch, 8), 1))
    assert tried == [1, 2, 4, 8, 16]
    best = best_size(found)
    assert best is not None
    assert best.batch == 8, "the smallest that is as fast"
    assert best_size([]) is None


def test_only_what_divides_a_step_is_tried_where_the_training_is_to_stay_the_same() -> None:
    tried, _ = searched(divisors(12), 1 << 40, lambda batch: Size(batch, batch, 1))
    assert tried == [1, 2, 4, 12]


def test_the_learning_rate_follows_the_batch() -> None:
    assert scaled_rate(1e-3, 4, "sqrt") == 2e-3
    assert scaled_rate(0.1, 4, "linear") == 0.4


# ------------------------------------------------------------------------ plan

SWITCHES = [
    Switch("batch", {"batch": 8}, {"batch": 1}),
    Switch("fused", {"fused": True}, {"fused": False}),
    Switch("precision", {"precision": "fp32"}, {"precision": "fp32"}),
    Switch("compile", {"compile": True}, {"compile": False}),
]


def test_each_is_measured_alone_and_by_its_absence() -> None:
    rows = {row.name: row.settings for row in candidates(Settings(fused=True), SWITCHES)}
    assert list(rows) == [
        AS_IT_IS,
        ALL_OFF,
        "batch",
        "fused",
        "compile",
        ALL_ON,
        "all on but batch",
        "all on but fused",
        "all on but compile",
    ]
    assert rows["batch"] == Settings(batch=8)
    assert rows["all on but fused"] == Settings(batch=8, compile=True)
    assert rows[ALL_ON] == Settings(batch=8, fused=True, compile=True)


def row(name: str, speeds: list[float], settings: Settings, fault: str = "") -> Measured:
    return Measured(Candidate(name, settings), speeds, 10_000_000, fault)


def test_what_was_fastest_is_chosen_and_everything_on_where_it_is_as_fast() -> None:
    on, without = Settings(fused=True, compile=True), Settings(fused=True)
    rows = [
        row(AS_IT_IS, [10.0], Settings()),
        row(ALL_ON, [20.0], on),
        row("all on but compile", [20.1], without),
    ]
    assert choose(rows).settings == on
    rows[-1] = row("all on but compile", [30.0, 28.0, 33.0], without)
    assert choose(rows).settings == without
    rows[-2:] = [row(ALL_ON, [], on, "out of memory")]
    assert choose(rows).settings == Settings()
    with pytest.raises(ValueError, match="nothing was measured"):
        choose([row(AS_IT_IS, [], Settings())])


def test_what_ran_out_of_memory_in_a_later_round_is_neither_chosen_nor_told_as_fast() -> None:
    """It fitted once, just so: it was what to use, at the speed of that round, and no fault was shown."""
    on = Settings(batch=16, fused=True)
    rows = [row(AS_IT_IS, [10.0, 10.0], Settings()), row(ALL_ON, [30.0], on, "out of memory")]
    assert choose(rows).settings == Settings()
    found = Findings(rows=rows)
    assert "| all on | out of memory in round 2 |  |" in as_markdown(found, "samples")
    assert f"to use: {Settings().told()}: 1.00 times as fast as it is" in as_markdown(found, "samples")
    rows[0].fault = "out of memory"
    assert found.chosen is None


def test_what_a_row_buys_is_told_against_what_the_text_below_the_table_says() -> None:
    """To compute activations again cost nothing, it seemed: against all off, and not as it is."""
    speeds = {AS_IT_IS: 20.0, ALL_OFF: 10.0, "compile": 15.0, ALL_ON: 40.0, "all on but compile": 30.0}
    rows = [row(name, [speed], Settings()) for name, speed in {**speeds, RECOMPUTING: 30.0}.items()]
    assert factors(rows) == {
        AS_IT_IS: 1.0,
        ALL_OFF: 0.5,
        "compile": 1.5,
        ALL_ON: 2.0,
        "all on but compile": 0.75,
        RECOMPUTING: 1.5,
    }


# -------------------------------------------------------------------- the clock


def test_a_gpu_is_not_waited_for_between_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    QueuedEvent.instead_of_cuda(monkeypatch)
    clocks = [Clock(torch.device("cuda")) for _ in range(2)]
    for clock in clocks:
        for part in ("data", "forward", "backward", "forward", "backward", "optimizer"):
            clock.lap(part)
    assert (QueuedEvent.queued, QueuedEvent.waited) == (14, 0), "both steps are queued"
    times = clocks[1].read()
    assert (times.forward, times.backward, times.optimizer) == pytest.approx((0.02, 0.02, 0.01))


# ---------------------------------------------------------------- what is ready


class Stamped(Dataset[torch.Tensor]):
    """Samples that say when a worker made them."""

    def __init__(self) -> None:
        self.made = multiprocessing.get_context("fork").Value("i", 0)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.made.get_lock():
            self.made.value += 1
        return torch.tensor(time.monotonic(), dtype=torch.float64)


def test_what_workers_made_while_the_first_step_compiled_is_not_measured() -> None:
    """A compiler takes long enough for them to fill all places: five steps found a batch ready each, and a
    training that waits for its data in nine tenths of the time was told to take a tenth of it."""
    samples, used = Stamped(), []
    two = Settings(batch=1, workers=2)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        used.append(batch.item())
        if len(used) == 1:
            wait_until(lambda: samples.made.value > 8, "the workers to be as far ahead as they go")
            used.append(time.monotonic())
        return model(batch.float()).sum()

    workload = Workload(lambda: nn.Linear(1, 1), samples, loss, two)
    gang = Gang(0, 1, 0, torch.device("cpu"))
    found = measure(
        lambda settings, alone: OwnTrial(workload, settings, gang, alone=alone), two, gang, Effort(3, 0.0)
    )
    assert found.fault == ""
    _, compiled, second, *measured = used
    assert min(second, *measured) > compiled
    assert len(measured) == 4, "each worker has had as many turns as the other"


@needs_bf16
def test_what_makes_a_loss_no_number_is_no_way_to_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends at the first such loss, and its speed was in the table all the same, and chosen."""
    monkeypatch.setattr(session, "choose_precision", lambda *_: "bf16")
    arguments = [f"{WORKLOADS}:lost_in_bf16", "--out", str(tmp_path), "-o", "json", *QUICK]
    assert command.main(arguments) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["precision"]["fault"] == "the loss comes to nan, at which a run ends"
    assert Settings.read(tmp_path / "tuned.yaml").precision == "fp32"


@pytest.mark.parametrize(
    ("workers", "accumulate", "steps"), [(0, 1, 3), (2, 1, 4), (8, 1, 8), (8, 2, 4), (3, 2, 3), (8, 16, 3)]
)
def test_workers_are_measured_by_whole_turns(workers: int, accumulate: int, steps: int) -> None:
    assert Effort(3).steps_with(Settings(workers=workers, accumulate=accumulate)) == steps


def test_what_batches_hold_is_a_mean_of_all_steps_and_may_be_a_tensor() -> None:
    """Such as the sum of a mask, which was no number; and a mean that is rounded at each step stays where it
    began: of batches that hold one image and two in turn it was two."""
    masks = torch.ones(4, 2, dtype=torch.int64)
    masks[::2, 1] = 0
    one = Settings(batch=1)
    workload = Workload(
        lambda: nn.Linear(2, 1),
        masks,  # type: ignore[arg-type]
        lambda model, mask: model(mask.float()).sum(),
        one,
        work=lambda mask: mask.sum(),
    )
    trial = OwnTrial(workload, one, Gang(0, 1, 0, torch.device("cpu")), alone=True)
    for number in range(8):
        trial.step(number)
    assert trial.work == 1.5
    trial.close()


# ----------------------------------------------------------------- the session


class Made:
    """A trial that takes no time worth speaking of."""

    def __init__(self, settings: Settings, stops_at: Settings | None) -> None:
        self.work, self._settings, self._stops_at = settings.samples, settings, stops_at

    def step(self, number: int) -> Clock:
        if self._settings == self._stops_at:
            raise KeyboardInterrupt
        return Clock(torch.device("cpu"))

    losses = 0.0

    def close(self) -> None: ...


def subject_of(
    settings: Settings,
    build: Build = lambda settings, _: Made(settings, None),
    *,
    can_recompute: bool = False,
) -> Subject:
    return Subject(
        build=build,
        settings=settings,
        unit="samples",
        per_sample=1.0,
        learning_rate=1e-3,
        rule="sqrt",
        has_workers=False,
        can_recompute=can_recompute,
        samples=100,
    )


def test_an_interrupt_leaves_what_was_measured() -> None:
    today = Settings(batch=2, threads=1)
    stops_at = Settings(batch=2, fused=False, threads=1)
    subject = subject_of(
        Settings(batch=2, fused=True, threads=1), lambda settings, _: Made(settings, stops_at)
    )
    said: list[str] = []
    gang = Gang(0, 1, 0, torch.device("cpu"))
    found = Session(subject, gang, Options(Effort(1, 0.0), 1, compile=False), said.append).run()
    assert found.interrupted
    assert [bool(measured.speeds) for measured in found.rows][:2] == [True, False]
    assert found.chosen is not None
    assert gain(found, found.chosen.settings) == 1.0
    assert "interrupted: this is what was measured until then" in as_text(found, "samples")
    assert "| all off | not measured |" in as_markdown(found, "samples")
    assert today.batch == 2


def test_a_precision_that_this_device_is_slower_in_is_measured_beside_a_faster_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fp32 stays, it said of a training in bf16, and measured all combinations in bf16."""
    monkeypatch.setattr("holdfast_trainer.tune.session.bf16_of", lambda device: Bf16.SLOW)
    subject = subject_of(Settings(batch=2, precision="bf16", fused=True, threads=1))
    gang = Gang(0, 1, 0, torch.device("cpu"))
    found = Session(subject, gang, Options(Effort(1, 0.0), 1, compile=False), lambda text: None).run()
    measured = {row.candidate.name: row.candidate.settings.precision for row in found.rows}
    assert (measured[AS_IT_IS], measured[ALL_OFF], measured["precision"]) == ("bf16", "bf16", "fp32")
    assert measured[ALL_ON] == "fp32"
    assert any(note.endswith("faster than fp32, which is tried in the place of bf16") for note in found.notes)


def test_compile_that_is_on_is_left_out_where_that_is_asked() -> None:
    """--no-compile kept a training that compiles from being measured without: every row compiled."""
    subject = subject_of(Settings(batch=2, compile=True, threads=1))
    gang = Gang(0, 1, 0, torch.device("cpu"))
    found = Session(subject, gang, Options(Effort(1, 0.0), 1, compile=False), lambda text: None).run()
    assert not any(row.candidate.settings.compile for row in found.rows)
    assert "compile: on until now, and left out here as asked: no figure is with it" in found.notes


def test_a_combination_that_has_two_rows_has_one_figure() -> None:
    """All on was 0.81 times as fast as it is, where both were the same settings, and the machine was busy."""
    built: list[Settings] = []

    def build(settings: Settings, _: bool) -> Made:
        built.append(settings)
        return Made(settings, None)

    subject = subject_of(Settings(batch=2, fused=True, threads=1), build)
    gang = Gang(0, 1, 0, torch.device("cpu"))
    session = Session(subject, gang, Options(Effort(1, 0.0), 3, compile=False), lambda text: None)
    table = [Switch("fused optimizer", {"fused": True}, {"fused": False})]
    session._table(table)
    rows = session.findings.rows
    assert [row.candidate.name for row in rows][:3] == [AS_IT_IS, ALL_OFF, ALL_ON]
    assert built.count(rows[0].candidate.settings) == 3, "once a round"
    assert rows[2].speeds == rows[0].speeds
    assert factors(rows)[ALL_ON] == 1.0


@pytest.mark.parametrize("configured", [False, True])
def test_recomputing_is_tried_where_it_is_off_and_left_out_where_it_is_on(configured: bool) -> None:
    """A training that recomputes was never told what that costs."""
    subject = subject_of(Settings(batch=2, fused=True, threads=1, recompute=configured), can_recompute=True)
    gang = Gang(0, 1, 0, torch.device("cpu"))
    session = Session(subject, gang, Options(Effort(1, 0.0), 1, compile=False), lambda text: None)
    session._table([Switch("fused optimizer", {"fused": True}, {"fused": False})])
    rows = session.findings.rows
    assert {row.candidate.settings.recompute for row in rows[:-1]} == {configured}
    last = rows[-1].candidate
    assert (last.name, last.settings.recompute) == (
        (NOT_RECOMPUTING, False) if configured else (RECOMPUTING, True)
    )
    assert factors(rows)[last.name] == rows[-1].speed / rows[0].speed


class FasterWithout(Made):
    """Where any kernel will do, a step does a million times as much."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, None)
        assert bool(torch.get_deterministic_debug_mode()) is bool(settings.deterministic)
        self.work *= 1 if settings.deterministic else 10**6


@pytest.mark.parametrize("asked", [True, "strict", False])
def test_what_deterministic_kernels_cost_is_shown_and_they_stay_as_they_are(
    asked: bool | Literal["strict"],
) -> None:
    """No row told. A resume is exact by them, so nobody is to lose or get them for the speed alone."""
    today = Settings(batch=2, threads=1, deterministic=asked)
    subject = subject_of(today, lambda settings, _: FasterWithout(settings))
    gang = Gang(0, 1, 0, torch.device("cpu"))
    found = Session(subject, gang, Options(Effort(1, 0.0), 1, compile=False), lambda text: None).run()
    (other,) = [row for row in found.rows if row.candidate.settings.deterministic != asked]
    left_out = "deterministic" if asked else "any"
    assert other.candidate.name == f"{ALL_ON} but {left_out} kernels"
    assert (factors(found.rows)[other.candidate.name] > 1) is bool(asked)
    assert found.chosen is not None
    assert found.chosen.settings.deterministic == asked
    assert any(note.startswith("deterministic kernels: ") for note in found.notes)
    assert torch.get_deterministic_debug_mode() == 0, "until the end of each measurement alone"


def test_what_is_only_shown_is_not_chosen_where_nothing_else_was_measured() -> None:
    shown = Candidate("all on but deterministic kernels", Settings(deterministic=False), only_shown=True)
    rows = [row(AS_IT_IS, [], Settings(), "out of memory"), Measured(shown, [10.0])]
    assert Findings(rows=rows).chosen is None


# ----------------------------------------------------------- the configuration


def test_what_was_tuned_on_a_gpu_says_tf32_and_elsewhere_it_stays_as_configured(tmp_path: Path) -> None:
    config = load(write_config(tmp_path), ["train.tf32=false"], environ={})
    today = settings_of(config, "fp32", Gang(0, 1, 0, torch.device("cpu")))
    assert today.tf32 is None
    assert not with_settings(config, today, 1).train.tf32
    faster = replace(today, tf32=True)
    assert with_settings(config, faster, 1).train.tf32
    assert "fp32, TF32" in faster.told()
    faster.write(tmp_path / "tuned.yaml")
    assert Settings.read(tmp_path / "tuned.yaml") == faster


# ----------------------------------------------------------------- the command


def test_a_configuration_is_tuned_and_what_is_written_can_be_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, given = write_config(tmp_path), tmp_path / "out", ["train.threads=1", "train.precision=auto"]
    assert command.main([str(file), *given, "--out", str(out), "-o", "json", *QUICK]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((out / "tune.json").read_text())
    names = [row["name"] for row in told["rows"]]
    assert names[:2] == ["as it is", "all off"]
    # Which of the others has a row depends on what was found to be faster here.
    assert {"all on", "all on but deterministic kernels", "all on, recomputing"} <= set(names)
    assert len({size["batch"] for size in told["batch_sizes"]}) > 1
    assert all(row["median"] > 0 and row["memory"] > 0 for row in told["rows"])
    tuned, today = load(out / "tuned.yaml", environ={}), load(file, given, environ={})
    assert tuned.train.global_batch == today.train.global_batch == 12
    assert tuned.train.micro_batch == told["chosen"]["batch"]
    assert tuned.optim.learning_rate == today.optim.learning_rate, "the same training, only faster"
    # A CPU with bf16 may be found faster without: that is another training.
    same = told["chosen"]["precision"] == precision("auto", torch.device("cpu")).name
    assert (tuned.hash() == today.hash()) == same, "a run that has begun goes on with it"
    assert (out / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert "| as it is |" in (out / "tune.md").read_text()


def test_a_model_that_does_not_fit_is_told_before_it_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a container too small for today's settings the kernel ends tune, which has no words then."""
    assert command.main([str(write_config(tmp_path)), f"model.vocab_size={2**45}"]) == EXIT_CONFIG_ERROR
    said = capsys.readouterr().err.splitlines()
    foreseen = next(line for line in said if line.startswith("warning: "))
    assert foreseen.startswith("warning: model: by reckoning a step with 3 sequences a pass does not fit: ")
    assert foreseen.endswith("a larger device. If this process is killed now, it is for that")
    assert said.index(foreseen) < next(i for i, line in enumerate(said) if "today's settings" in line)


def test_a_model_of_ones_own_grows_to_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"{WORKLOADS}:steady", "--grow", "--out", str(tmp_path), "-o", "json", *QUICK]
    assert command.main(arguments) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    precision = "bf16|fp32"  # by what the CPU has instructions for
    too_much = rf"batch 16 \(batch 16, ({precision}), fused, 1 threads, deterministic\): out of memory"
    assert re.search(too_much, captured.err), captured.err
    assert max(size["batch"] for size in told["batch_sizes"]) <= 12
    chosen = Settings.read(tmp_path / "tuned.yaml")
    assert chosen.batch == told["chosen"]["batch"] > 1
    assert chosen.learning_rate == scaled_rate(1e-3, chosen.samples, "sqrt")
    assert any("so the rate grows by its square root, from 0.001 to" in note for note in told["notes"])


@pytest.mark.slow
def test_ranks_tune_together(workshop: Workshop, tmp_path: Path) -> None:
    arguments = ["tune", f"{WORKLOADS}:steady", "--grow", "--out", str(tmp_path / "out"), *QUICK]
    gang = workshop.start(script=COMMAND, ranks=2, arguments=arguments)
    assert gang.wait(300) == [0, 0], gang.texts()
    assert "rank 0: out of memory" in gang.texts()
    assert "times as fast as it is" in gang.ranks[0].text()
    assert "times as fast" not in gang.ranks[1].text(), "rank 0 tells for all"


def test_ctrl_c_under_torchrun_leaves_what_was_measured(workshop: Workshop, tmp_path: Path) -> None:
    """It reaches a rank twice: from the terminal, and from torchrun, while it writes already."""
    out = tmp_path / "out"
    arguments = ["tune", f"{WORKLOADS}:make", "--out", str(out), *QUICK, "--rounds", "100000"]
    gang = workshop.start(script=COMMAND, arguments=arguments)
    gang.wait_for_text("round 2")
    gang.signal(signal.SIGINT)
    gang.signal(signal.SIGTERM)
    assert gang.wait() == [130], gang.texts()
    assert "Traceback" not in gang.texts()
    assert "interrupted: this is what was measured until then" in gang.ranks[0].text()
    assert json.loads((out / "tune.json").read_text())["interrupted"]
    assert (out / "tune.png").read_bytes().startswith(b"\x89PNG")


UNHEARD = """
import os, signal
from ragged_workload import make

def ctrl_c():  # what is raised here goes nowhere
    global ctrl_c
    print("forks", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    ctrl_c = lambda: None

os.register_at_fork(after_in_parent=lambda: ctrl_c())
"""


def interrupting_itself(workshop: Workshop, place: Path, text: str) -> Started:
    """A tune of the workload in `text`, which can import the ragged one; it writes to `place / "out"`."""
    (place / WORKLOADS.name).write_text(WORKLOADS.read_text())
    (place / "interrupting.py").write_text(text)
    words = ["tune", f"{place / 'interrupting.py'}:make", "--out", str(place / "out"), *QUICK]
    return workshop.start(script=COMMAND, arguments=[*words, "--rounds", "100000"])


def test_ctrl_c_while_python_forks_a_loader_is_not_forgotten(workshop: Workshop, tmp_path: Path) -> None:
    """It was, and so was every one after it."""
    gang = interrupting_itself(workshop, tmp_path, UNHEARD)
    assert gang.wait() == [130], gang.texts()
    assert "forks" in gang.texts(), "it was meant to come just there"
    assert "Exception ignored in" not in gang.texts(), "nor is it printed as an error that nobody caught"
    assert "interrupted: this is what was measured until then" in gang.texts()
    assert json.loads((tmp_path / "out" / "tune.json").read_text())["interrupted"]


HALF_MADE = """
import os, signal
from torch.utils.data._utils import signal_handling
from ragged_workload import make

tell_pids = signal_handling._set_worker_pids

def interrupted(*pids):  # DataLoader calls it when its workers run, before it has noted that they do
    signal_handling._set_worker_pids = tell_pids
    print("has workers", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    return tell_pids(*pids)

signal_handling._set_worker_pids = interrupted
"""


def test_ctrl_c_while_a_loader_starts_its_workers_shows_no_traceback(
    workshop: Workshop, tmp_path: Path
) -> None:
    """What is half made has not all that its destructor asks for, and says so with a traceback."""
    gang = interrupting_itself(workshop, tmp_path, HALF_MADE)
    assert gang.wait() == [130], gang.texts()
    assert "has workers" in gang.texts()
    assert "Traceback" not in gang.texts()
    assert "interrupted: this is what was measured until then" in gang.texts()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "--out", "out"], "interrupted before anything was measured; nothing was written"),
        (["diagnose"], "interrupted"),
    ],
)
def test_ctrl_c_before_anything_was_measured(
    words: list[str], said: str, workshop: Workshop, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\n\ndef make():\n    print('builds', flush=True)\n    time.sleep(600)\n")
    gang = workshop.start(script=COMMAND, arguments=[*words, f"{slow}:make"])
    gang.wait_for_text("builds")
    gang.signal(signal.SIGINT)
    assert gang.wait() == [130]
    assert gang.texts() == f"builds\n{said}\n"
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.py:make"], "there is no file mine.py"),
        ([f"{WORKLOADS}:made"], ":made: there is no such function. Name one, such as mine.py:make"),
        ([f"{WORKLOADS}:nothing"], "gave int; it should return a Workload"),
        ([f"{WORKLOADS}:too_few"], "the dataset has 512 samples, too few for a batch of 600"),
        ([f"{WORKLOADS}:scattering_strictly"], "put_ does not have a deterministic implementation"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_tuned(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == EXIT_CONFIG_ERROR
    assert message in capsys.readouterr().err


def test_results_that_have_no_place_are_told_before_hours_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback once all was measured, and showed nothing of that."""
    (tmp_path / "notes").write_text("a file")
    out = tmp_path / "notes" / "tuned"
    assert command.main([f"{WORKLOADS}:make", "--out", str(out), *QUICK]) == EXIT_CONFIG_ERROR
    told = capsys.readouterr().err
    assert told.startswith(f"error: --out {out}: {tmp_path / 'notes'} is no directory, and what is measured")
    assert "today's settings" not in told


def test_results_that_cannot_be_written_are_shown_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tuned" / "tune.md").mkdir(parents=True)
    assert command.main([f"{WORKLOADS}:make", "--out", str(tmp_path / "tuned"), *QUICK]) == 1
    shown, told = capsys.readouterr()
    assert "to use: " in shown
    assert f"error: --out {tmp_path / 'tuned'}: not all of it could be written: [Errno 21] Is a dir" in told


def test_what_fails_in_a_function_of_ones_own_is_not_blamed_on_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "Name a function, such as mine.py:make" was said to somebody who did."""
    mine = tmp_path / "mine.py"
    mine.write_text("import no_such_library\ndef make(): ...\n")
    assert command.main([f"{mine}:make"]) == EXIT_CONFIG_ERROR
    assert "mine.py:make cannot be imported: No module named 'no_such_library'\n" in capsys.readouterr().err
    mine.write_text("def make(): return make.nothing\n")
    with pytest.raises(AttributeError, match="nothing"):
        command.main([f"{mine}:make"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give CONFIG (or set HOLDFAST_CONFIG)"),
        (["a.yaml", "b.yaml"], "one configuration at a time, not a.yaml, b.yaml"),
        (["a.yaml", "--seconds", "1e400"], "--seconds inf: a number from 0 on is needed"),
        (["a.yaml", "--rounds", "0"], "--rounds 0 --steps 3: at least 1 is needed"),
        (["a.py:make", "train.steps=3"], "train.steps=3: a function's settings are those of its Workload"),
    ],
)
def test_wrongly_asked(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)
    with pytest.raises(SystemExit) as raised:
        command.main(argv)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
