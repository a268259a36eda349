"""What holds a run back is named from where its time goes, with the setting that changes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest
import torch

from holdfast_trainer.contract import Progress, RunDir, read_lines
from holdfast_trainer.epochs import Epochs
from holdfast_trainer.ledger import Journal
from holdfast_trainer.loading import Crowding, Loading
from holdfast_trainer.spans import Spans
from holdfast_trainer.steplog import StepLog
from holdfast_trainer.telemetry import Telemetry
from holdfast_trainer.utilization import Reading
from holdfast_trainer.verdict import CAUSES, Interval, Judge, judge

COMPUTE = {"forward": 3.0, "backward": 6.0, "optimizer": 0.5}
WAITS = COMPUTE | {"data": 10.0}


@pytest.mark.parametrize(
    ("interval", "cause", "said"),
    [
        (
            Interval(10, 20.0, COMPUTE | {"data": 10.0}),
            "data",
            "a step takes 2,000.0 ms, of which 50% waits for",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(own=0.98, cores=16.0, ranks=2)),
            "data computing",
            "waits for data; this process computes for 98% of that: do that beforehand, once (prepare "
            "tokenises), or give the loader more workers (16 cores of 2 ranks)",
        ),
        (  # which others have: another worker would have none either
            Interval(10, 20.0, WAITS, loading=Loading(own=0.99, cores=16.0, workers=1, own_queued=0.9)),
            "data computing",
            "this process would compute for 99% of that, and has no core for 90%: do that beforehand, once "
            "(prepare tokenises), or give the job more cores (resources.cpu; it has 16 cores)",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(own=3.2, cores=1.0), gpu=0.4),
            "data computing",
            "waits for data (the GPU is 40% busy); this process computes for 100% of that: do that "
            "beforehand, once (prepare tokenises), or give the job more cores (resources.cpu; it has 1 core)",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(own=0.02, cores=16.0)),
            "data reading",
            "this process computes for 2% of that: the loader waits for a disk or network itself: put the "
            "data on a local or a faster disk (data.path), or have it read further ahead",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(0.02, 16.0, workers=4, wanted=0.97, queued=0.01)),
            "data computing",
            "the busiest of its 4 workers computes for 97% of the time: do that beforehand, once (prepare "
            "tokenises), or give the loader more workers (16 cores)",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(0.02, 16.0, workers=1, wanted=0.97, queued=0.6)),
            "data computing",
            "its worker would compute for 97% of the time, and has no core for 60%: do that beforehand, once "
            "(prepare tokenises), or give the job more cores (resources.cpu; it has 16 cores)",
        ),
        (Interval(10, 10.0, COMPUTE | {"data": 0.6}), "data", "of which 6% waits for data"),
        (
            Interval(10, 20.0, WAITS, loading=Loading(0.02, 16.0, workers=1, wanted=1.3, queued=1.2)),
            "data computing",
            "and has no core for 100%: do that",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(0.02, 16.0, ranks=4, workers=4, wanted=0.97)),
            "data computing",
            "or give the job more cores (resources.cpu; it has 16 cores of 4 ranks)",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(0.9, 16.0, workers=4, wanted=0.1)),
            "data computing",
            "this process computes for 90% of that: do that beforehand, once (prepare tokenises), or have "
            "the loader's workers do it",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(0.02, 16.0, workers=4, wanted=0.03)),
            "data reading",
            "this process computes for 2% of that, and no worker of its loader for more than 3% of the time: "
            "the loader waits for a disk or network itself: put",
        ),
        (
            Interval(10, 20.0, WAITS, loading=Loading(0.02, 16.0, workers=4)),
            "data",
            "do beforehand what makes it (prepare tokenises), put the data on a local or a faster disk",
        ),
        (
            Interval(10, 10.0, COMPUTE | {"data": 1.0}, validation=0.6),
            "validation",
            "a step takes 1,000.0 ms, and 60% of all time is validation: validate less often (validation.ev",
        ),
        (
            Interval(10, 10.0, COMPUTE | {"checkpoint": 0.6}),
            "checkpoint",
            "6% is held up by saves: raise checkp",
        ),
        (Interval(10, 14.0, COMPUTE), "other", "32% is outside of every span: Python between the parts"),
        (
            Interval(10, 10.0, COMPUTE, mfu=0.12, crowding=Crowding(queued=0.46, cores=2.0, ranks=2)),
            "no core",
            "and 46% of the time that this process would compute it waits for a core: let less run beside "
            "it, have it take no more threads than there are cores (train.threads), or give the job more of "
            "them (resources.cpu; it has 2 cores of 2 ranks)",
        ),
        (
            Interval(
                10,
                10.0,
                COMPUTE,
                loading=Loading(own=0.9, cores=2.0, workers=6, wanted=0.29, queued=0.15),
                crowding=Crowding(0.4, 2.0),
            ),
            "no core",
            "let less run beside it (its loader has 6 workers), have it take no more threads",
        ),
        (
            Interval(10, 10.0, COMPUTE, loading=Loading(0.9, 2.0, 1, 1, 0.8), crowding=Crowding(0.4, 2.0)),
            "no core",
            "(its loader has 1 worker), have",
        ),
        (
            Interval(10, 10.0, COMPUTE, loading=Loading(0.9, 2.0, 1, 6, 0.01), crowding=Crowding(0.4, 2.0)),
            "no core",
            "let less run beside it, have",
        ),
        (Interval(10, 10.0, COMPUTE, mfu=0.12, crowding=Crowding(0.1, 2.0)), "device idle", "at 12% of what"),
        (Interval(10, 10.0, COMPUTE, gpu=0.3, crowding=Crowding(0.3, 1.0)), "no core", "it has 1 core)"),
        (  # time-sliced: a larger batch would not help, and the time is no figure of this training alone
            Interval(10, 2.3, COMPUTE | {"forward": 0.8}, mfu=0.08, gpu=1.0, shared=0.93),
            "shared gpu",
            "a step takes 230.0 ms at 8% of what the GPU can multiply, and for 93% of the time other "
            "processes compute on this GPU too, which take turns with it: let less run beside it, or give",
        ),
        (Interval(10, 10.0, COMPUTE, gpu=1.0, shared=0.3), "compute", "nothing holds it back"),
        (Interval(10, 10.0, COMPUTE, gpu=0.4, shared=0.9), "device idle", "the GPU has work for 40% of the"),
        (Interval(10, 10.0, COMPUTE, gpu=0.9, crowding=Crowding(0.3, 1.0)), "compute", "nothing holds it"),
        (
            Interval(10, 10.0, {"forward": 2.0, "backward": 4.0, "optimizer": 4.0}),
            "optimizer",
            "(a larger train.",
        ),
        (
            Interval(10, 10.0, {"forward": 1.0, "backward": 8.0, "optimizer": 1.0}, world_size=2),
            "communication",
            "backward takes 8.0 times as long as forward where 2 is usual",
        ),
        (
            Interval(10, 10.0, COMPUTE | {"backward": 4.0, "communication": 2.0}, world_size=2),
            "communication",
            "20% waits for the exchange of gradients, or for a rank that is slower",
        ),
        (
            Interval(10, 10.0, {"forward": 1.0, "backward": 8.0, "communication": 0.5}, world_size=2),
            "compute",
            "nothing holds it",
        ),
        (
            Interval(10, 10.0, {"forward": 1.0, "backward": 8.0, "optimizer": 1.0}),
            "compute",
            "nothing holds it",
        ),
        (  # whose forward is in no span
            Interval(10, 10.0, {"backward": 9.0, "optimizer": 1.0}, world_size=2),
            "compute",
            "nothing holds it",
        ),
        (Interval(10, 10.0, COMPUTE, mfu=0.28), "device idle", "at 28% of what the device can multiply"),
        (Interval(10, 10.0, COMPUTE, mfu=0.35), "compute", "at 35% of what the device can multiply: nothing"),
        (
            Interval(10, 10.0, COMPUTE, mfu=0.12),
            "device idle",
            # By default a micro-batch is all of the share, and a larger one is refused.
            "raise train.micro_batch while memory lasts (with train.global_batch, where it is all of a "
            "rank's share of that), then try train.compile=true where it is off",
        ),
        (
            Interval(10, 10.0, COMPUTE, mfu=0.12, gpu=0.97),
            "device idle",
            "at 12% of what the device can multiply",
        ),
        (
            Interval(10, 10.0, COMPUTE, gpu=0.3),
            "device idle",
            "and the GPU has work for 30% of the time: Python gives it too little at once: raise tra",
        ),
        (Interval(10, 10.0, COMPUTE, gpu=0.9), "compute", "nothing holds it"),
        (
            Interval(10, 10.0, COMPUTE, mfu=0.6),
            "compute",
            "of which 95% computes at 60% of what the device can",
        ),
        (
            Interval(
                10, 0.54, COMPUTE | {"forward": 0.19, "backward": 0.31, "optimizer": 0.02}, mfu=0.32, gpu=1.0
            ),
            "compute",
            "of which 96% computes at 32% of what the device can multiply, and the GPU is kept busy: what it "
            "does beside that is joined by train.compile=true, where it is off",
        ),
        (Interval(10, 10.0, COMPUTE, mfu=0.48, gpu=1.0), "compute", "can multiply: nothing holds it back"),
        (Interval(10, 10.0, {}), "unknown", "put its parts into run.span(...)"),
        (Interval(10, 10.0, {"data": 0.2}), "unknown", "put its parts into run.span(...)"),
        # A loop that names nothing but its loader: the alert for data fires of it, and sends people here.
        (Interval(10, 10.0, {"data": 9.0}), "data", "of which 90% waits for data"),
        (
            Interval(10, 10.0, {"data": 0.2, "checkpoint": 1.0}),
            "checkpoint",
            "of which 10% is held up by saves",
        ),
        (Interval(10, 10.0, {}, validation=0.5), "validation", "50% of all time is validation"),
    ],
)
def test_the_first_cause_that_applies_is_named(interval: Interval, cause: str, said: str) -> None:
    verdict = judge(interval)
    assert verdict.cause == cause
    assert said in verdict.sentence
    assert cause in CAUSES


def test_validation_is_no_part_of_a_step() -> None:
    one = Judge(1, interval_seconds=0.0)
    verdict = one.step(100.0, {"validation": 90.0, "forward": 3.0, "backward": 6.0, "optimizer": 0.5})
    assert verdict is not None
    assert "a step takes 10,000.0 ms, of which 95% computes" in verdict.sentence
    assert one.step(1.0, {"validation": 1.0}) is None, "nothing was computed since"


def test_what_several_ranks_exchange_unmeasured_is_told_of_several_alone() -> None:
    spans = {"forward": 1.0, "backward": 8.0, "optimizer": 1.0}
    told = [Judge(ranks, interval_seconds=0.0).step(10.0, spans) for ranks in (1, 2)]
    assert [verdict and verdict.cause for verdict in told] == ["compute", "communication"]


def test_how_much_is_validation_is_told_of_whole_cycles() -> None:
    """20 s after every tenth step of a second, whatever part of that an interval has; one before the first
    step is the whole of an attempt's beginning, and tells nothing."""
    one, told = Judge(1, interval_seconds=0.0), []
    for step in range(40):
        seconds = {"validation": 20.0} if step % 10 == 0 else {}
        spans = seconds | {"forward": 0.32, "backward": 0.6, "optimizer": 0.05}
        verdict = one.step(1.0 + sum(seconds.values()), spans)
        assert verdict is not None
        told.append(verdict)
    assert {verdict.sentence for verdict in told[:10]} == {COMPUTES}
    assert all("and 67% of all time is validation" in verdict.sentence for verdict in told[10:])


def test_a_verdict_comes_once_an_interval() -> None:
    one = Judge(1, interval_seconds=3600.0)
    assert [one.step(1.0, {"forward": 1.0}) for _ in range(100)] == [None] * 100


@pytest.mark.parametrize("every", [1, 8])
def test_the_rate_of_a_loop_that_tells_its_work_once_in_some_steps_is_that_of_all_of_them(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 steps two or three told of eight each: it was at 48% or 72% of what there is."""
    clock = Clock()
    monkeypatch.setattr("holdfast_trainer.verdict.time", clock)
    one, told = Judge(1, interval_seconds=20.0, mfu=lambda tokens: tokens / 100), []
    for step in range(1, 101):
        clock.now += 1.0
        spans = {"forward": 0.32, "backward": 0.6, "optimizer": 0.05}
        told.append(one.step(1.0, spans, 0 if step % every else 60 * every))
    verdicts = [verdict.sentence for verdict in told if verdict is not None]
    assert len(verdicts) == 5
    assert {said.rpartition(" at ")[2] for said in verdicts} == {
        "60% of what the device can multiply: nothing holds it back"
    }


def test_a_verdict_is_served() -> None:
    telemetry = Telemetry(1, 1)
    verdict = judge(Interval(10, 20.0, COMPUTE | {"data": 10.0}))
    telemetry.verdict(verdict)
    assert Progress.from_json(telemetry.progress.to_json()).verdict == verdict.sentence
    value = lambda cause: telemetry.registry.get_sample_value("holdfast_bottleneck", {"cause": cause})  # noqa: E731
    assert (value("data"), value("compute")) == (1.0, 0.0)


def test_it_is_logged_where_it_changes_and_the_first_step_counts_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    telemetry, spans = Telemetry(1, 1), Spans(torch.device("cpu"))
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=Judge(1, interval_seconds=0.0))
    for step in range(1, 5):
        log.begin()
        spans.add("forward", 1e-9)
        spans.add("data", 1e6 if step < 4 else 0.0)
        log.end(step)
        log.tell()
        assert (telemetry.progress.verdict is None) == (step == 1)
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert "waits for data" in told[0]
    assert "is outside of every span" in told[1]


COMPUTES = "a step takes 1,000.0 ms, of which 97% computes: nothing holds it back"
SAVES = "a step takes 3,000.0 ms, of which 67% is held up by saves"
VALIDATES = "a step takes 1,000.0 ms, and 45% of all time is validation"
STEPS: list[tuple[float, dict[str, float], str | None]] = [
    (5.0, {}, None),  # compiles
    (1.0, {}, COMPUTES),
    (11.0, {"validation": 10.0}, COMPUTES),
    (1.0, {}, COMPUTES),
    (3.0, {"checkpoint": 2.0}, SAVES),
    (1.0, {}, COMPUTES),
    (6.0, {"validation": 5.0}, VALIDATES),
]


class Clock:
    """Scripted: stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parts_of_a_step_are_weighed_against_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """On a GPU they are known when the next step ends, or the last one was waited for."""
    clock = Clock()
    monkeypatch.setattr("holdfast_trainer.steplog.time", clock)
    telemetry, spans = Telemetry(1, 1), Spans(torch.device(device))
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=Judge(1, interval_seconds=0.0))
    told = []
    for step, (seconds, more, _) in enumerate(STEPS, start=1):
        log.begin()
        for phase, took in {"forward": 0.32, "backward": 0.6, "optimizer": 0.05, **more}.items():
            spans.add(phase, took)
        spans.add("data", step / 1000)
        clock.now += seconds
        log.end(step)
        log.tell()
        told.append(telemetry.progress.verdict)
    if device == "cuda":
        log.flush()
        told = [*told[1:], telemetry.progress.verdict]
    for sentence, (_, _, expected) in zip(told, STEPS, strict=True):
        assert sentence is None if expected is None else (sentence or "").startswith(expected)
    lines = read_lines(RunDir(tmp_path).steps(1))
    assert [(line["step"], line["data_seconds"]) for line in lines if "data_seconds" in line] == [
        (step, step / 1000) for step in range(1, len(STEPS) + 1)
    ]
    assert [line["seconds"] for line in lines if "seconds" in line] == [seconds for seconds, _, _ in STEPS]
    waited = sum(step / 1000 for step in range(2, len(STEPS) + 1))  # the first is no measure of the others
    assert telemetry.progress.data_wait_fraction == pytest.approx(waited / sum(s for s, _, _ in STEPS[1:]))


def test_the_device_is_judged_by_the_steps_without_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a second uses 60% of the device; what validation takes is no part of one."""
    clock = Clock()
    for module in ("steplog", "verdict"):
        monkeypatch.setattr(f"holdfast_trainer.{module}.time", clock)
    telemetry, spans = Telemetry(1, 1), Spans(torch.device("cpu"))
    telemetry.begin(0, 100, 0, 1.0, 1000.0)
    judge = Judge(1, mfu=telemetry.mfu)
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=judge)
    for step in range(1, 60):
        log.begin()
        for phase, took in {"forward": 0.3, "backward": 0.6, "validation": 0.8 * (step % 5 == 0)}.items():
            spans.add(phase, took)
            clock.now += took
        clock.now += 0.1
        log.end(step, owes_counts=True)
        log.count(step, 600, 1)
        log.tell()
    assert telemetry.progress.verdict == (
        "a step takes 1,000.0 ms, of which 90% computes at 60% of what the device can multiply: nothing "
        "holds it back"
    )
    assert telemetry.progress.mfu == pytest.approx(0.6 / 1.16), "of all the time"


def test_a_verdict_is_of_an_interval_that_begins_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In which the processor compiles, whatever it does while data is waited for later."""
    clock = Clock()
    for module in ("steplog", "verdict"):
        monkeypatch.setattr(f"holdfast_trainer.{module}.time", clock)
    looks = iter([Loading(own=0.98, cores=16.0), *[Loading(own=0.02, cores=16.0)] * 3])
    telemetry, spans, told = Telemetry(1, 1), Spans(torch.device("cpu")), list[tuple[int, str]]()
    log = StepLog(spans, telemetry, None, 1, judge=Judge(1, loading=lambda: next(looks)))
    for step in range(1, 101):
        monkeypatch.setattr(
            telemetry, "verdict", lambda verdict, step=step: told.append((step, verdict.cause))
        )
        log.begin()
        spans.add("data", 0.5)
        clock.now += 100.0 if step == 1 else 1.0
        log.end(step)
        log.tell()
    assert told == [(step, "data reading") for step in (31, 61, 91)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_step_took_is_told_whether_its_loop_was_left_in_it_or_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Steps of a second in loops of two, with half a second between the two and an hour after them, in which
    the last state is saved. An epoch takes what lies between steps too. Of the first step alone a loss is
    told."""
    clock = Clock()
    monkeypatch.setattr("holdfast_trainer.steplog.time", clock)
    telemetry, spans = Telemetry(1, 1), Spans(torch.device(device))
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=Judge(1))
    log.epochs = Epochs(2.0, 0)
    for step in range(1, 7):
        if step % 2:
            log.restart_clock()
        log.begin()
        spans.add("data", step / 1000)
        if step == 1:
            log.expect_loss()
        clock.now += 1.0 if step % 2 else 1.5
        if step % 2 == 0:
            log.leave()
            with spans.span("data"):
                clock.now += 3600.0
        log.end(step)
        if step == 1:
            log.loss(1, 2.0)
        log.tell()
        if step % 2:
            clock.now += 0.5
        else:
            spans.add("checkpoint", 3600.0)
    log.flush()
    lines = read_lines(RunDir(tmp_path).steps(1))
    names = ("seconds", "data_seconds", "epoch_seconds", "epoch_loss")
    told = {name: {line["step"]: line[name] for line in lines if name in line} for name in names}
    assert told["seconds"] == {1: 1.0, 2: 1.5, 3: 1.0, 4: 1.5, 5: 1.0, 6: 1.5}
    assert told["data_seconds"] == {step: step / 1000 for step in range(1, 7)}
    assert told["epoch_seconds"] == {2: 3.0, 4: 3.0, 6: 3.0}
    assert told["epoch_loss"] == {2: 2.0}
    held_up = {"phase": "checkpoint"}
    assert telemetry.registry.get_sample_value("holdfast_step_span_seconds_sum", held_up) is None


class Drawn:
    """In place of TensorBoard."""

    def __init__(self) -> None:
        self.told: list[tuple[int, set[str]]] = []

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.told.append((step, set(values)))


@pytest.mark.parametrize("rank", [0, 1])
def test_short_steps_and_epochs_are_told_in_the_log_and_drawn_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    """Four a second would bury all else there; steps.jsonl has them. Rank 0 alone tells."""
    caplog.set_level(logging.INFO)
    clock, run = Clock(), RunDir(tmp_path)
    monkeypatch.setattr("holdfast_trainer.steplog.time", clock)
    telemetry, spans = Telemetry(1, 1), Spans(torch.device("cpu"))
    journal = None if rank else Journal(run, 1)
    log = StepLog(spans, telemetry, journal, 1, judge=Judge(1, interval_seconds=0.0))
    log.epochs, drawn = Epochs(1.0, 0), Drawn()
    if rank == 0:
        monkeypatch.setattr(log, "tensorboard", drawn)
    for step in range(1, 13):
        log.begin()
        spans.add("forward", 0.25)
        clock.now += 0.25
        log.end(step)
        log.tell()
    log.val_loss(12, 1.5)
    told = [record.message.partition(":")[0] for record in caplog.records]
    if rank:
        assert (told, drawn.told) == ([], [])
        assert telemetry.progress.verdict is not None
    else:
        epochs = [f"epoch {number}, its 1 steps" for number in (1, 5, 9)]
        assert [one for one in told if one.startswith("epoch")] == epochs
        assert [line["epoch"] for line in read_lines(run.steps(1)) if "epoch" in line] == list(range(1, 13))
        assert [step for step, _ in drawn.told] == [1, 5, 9, 12]
        assert drawn.told[-1] == (12, {"validation loss"})


class Idling:
    """A GPU that had work for a tenth of the time."""

    of: Literal["gpu"] = "gpu"

    def __init__(self) -> None:
        self._known = 0.0

    def read(self) -> Reading:
        self._known += 10.0
        return Reading(self._known / 10, self._known)

    def close(self) -> None: ...


def test_a_gpu_with_too_little_to_do_is_known_by_nvml_whatever_is_computed_on_it(tmp_path: Path) -> None:
    """Of a loop that nobody counts the multiplications of."""
    telemetry, spans = Telemetry(1, 1), Spans(torch.device("cpu"))
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=Judge(1, interval_seconds=0.0))
    log.watch(Idling())
    for step in (1, 2):
        log.begin()
        spans.add("forward", 1e6)
        log.end(step)
        log.tell()
    assert "and the GPU has work for 10% of the time" in (telemetry.progress.verdict or "")


def test_where_telling_is_switched_off_steps_are_counted_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TELEMETRY", "off")
    telemetry, spans = Telemetry(1, 1), Spans(torch.device("cpu"))
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=Judge(1, interval_seconds=0.0))
    for step in range(1, 5):
        log.begin()
        with spans.span("forward"):
            pass
        log.end(step)
        log.loss(step, 2.0)
        log.tell()
    assert (telemetry.progress.step, telemetry.progress.first_step) == (4, 1)
    assert telemetry.progress.verdict is None
    assert telemetry.progress.loss is None
    assert len(RunDir(tmp_path).steps(1).read_text().splitlines()) == 1, "the first step's, as ever"
