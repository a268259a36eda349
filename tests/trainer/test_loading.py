"""What loads the data computes, or it waits for a disk itself: the cores tell, whoever else has them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from torch.utils.data import Dataset
from waiting import Deadline

from holdfast_trainer.contract import RunDir
from holdfast_trainer.ledger import Journal
from holdfast_trainer.loading import Crowding, Loader, Threads, Waits, Work, busiest, work_of
from holdfast_trainer.samples import Samples
from holdfast_trainer.spans import Spans
from holdfast_trainer.steplog import StepLog
from holdfast_trainer.telemetry import Telemetry
from holdfast_trainer.utilization import cores_allowed
from holdfast_trainer.verdict import Judge


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        pytest.param({}, {}, None, id="no worker"),
        pytest.param({1: Work(5, 1, 10)}, {1: Work(23, 4, 40)}, (0.7, 0.1), id="one"),
        pytest.param(
            {1: Work(0, 0, 10), 2: Work(5, 0, 10)},
            {1: Work(0, 0, 40), 2: Work(20, 0, 40)},
            (0.5, 0.0),
            id="a validation's sleeps beside it",
        ),
        pytest.param({1: Work(9, 0, 10)}, {2: Work(3, 0, 6)}, (0.5, 0.0), id="a new one, of its life"),
        pytest.param(
            {1: Work(9, 0, 90)}, {1: Work(3, 0, 6)}, (0.5, 0.0), id="a new one, under an old number"
        ),
        pytest.param({}, {1: Work(0.9, 0, 0.9)}, None, id="has just begun"),
        pytest.param({1: Work(5, 1, 10)}, {1: None}, None, id="not told"),
        pytest.param({1: None, 2: Work(0, 0, 10)}, {1: None, 2: Work(15, 0, 40)}, (0.5, 0.0), id="of one"),
        pytest.param({1: Work(0, 0, 10)}, {1: Work(90, 0, 40)}, (1.0, 0.0), id="three threads of one"),
    ],
)
def test_the_busiest_worker_speaks_for_all(
    before: dict[int, Work | None], now: dict[int, Work | None], told: tuple[float, float] | None
) -> None:
    assert busiest(before, now) == (None if told is None else pytest.approx(told))


@pytest.mark.parametrize("schedstat", [None, "0 0 0\n", "\n"], ids=["no file", "nobody counts", "empty"])
def test_what_the_kernel_does_not_tell_of_a_worker_is_not_known(
    schedstat: str | None, tmp_path: Path
) -> None:
    thread = tmp_path / "7" / "task" / "7"
    thread.mkdir(parents=True)
    (tmp_path / "7" / "stat").write_text(Path("/proc/self/stat").read_text())
    if schedstat is not None:
        (thread / "schedstat").write_text(schedstat)
    assert work_of(7, tmp_path) is None
    assert work_of(8, tmp_path) is None, "it has ended"


def test_all_threads_of_a_process_count_for_as_long_as_it_lives(tmp_path: Path) -> None:
    for thread, told in (("7", "1500000000 250000000 9"), ("8", "500000000 0 9")):
        place = tmp_path / "7" / "task" / thread
        place.mkdir(parents=True)
        (place / "schedstat").write_text(told)
    (tmp_path / "7" / "stat").write_text(Path("/proc/self/stat").read_text())
    mine = work_of(os.getpid())
    assert mine is not None
    assert work_of(7, tmp_path) == (pytest.approx(2.0), pytest.approx(0.25), pytest.approx(mine.age, abs=1))


def test_where_no_wait_was_measured_nothing_is_known() -> None:
    waits = Waits()
    loader = Loader(waits, cores=4.0, work=dict)
    assert loader.look() is None
    with waits.measured():
        pass
    assert loader.look() is not None
    assert loader.look() is None, "none since then"


@pytest.fixture
def busy_core(processes: Processes) -> Iterator[None]:
    """This process is on one core, which another program has too."""
    here = os.sched_getaffinity(0)
    core = {min(here)}
    other = processes.start(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {core})\nwhile True: pass"]
    )
    os.sched_setaffinity(0, core)
    yield
    os.sched_setaffinity(0, here)
    other.kill()
    other.wait()


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


@pytest.mark.usefixtures("busy_core")
def test_what_waits_for_a_core_that_another_program_has_is_told_from_what_computes(
    deadline: Deadline,
) -> None:
    """About half of what this process would compute it has no core for."""
    waits = Waits()
    loader = Loader(waits, cores=1.0, work=dict)
    while True:
        assert not deadline.passed
        with waits.measured():
            compute(0.05)
        loading = loader.look()
        assert loading is not None
        if loading.own_queued >= 0.2:
            break
    assert loading.own - loading.own_queued < 0.9, "what it had a core for"


@pytest.mark.usefixtures("busy_core")
def test_steps_whose_cores_another_program_has_are_told_so_and_not_that_the_batch_is_small(
    tmp_path: Path, deadline: Deadline
) -> None:
    """The model's share of what the device can multiply is low then, but a larger batch would not help."""
    telemetry, spans = Telemetry(1, 1), Spans(torch.device("cpu"))
    judge = Judge(1, interval_seconds=0.3, mfu=lambda _: 0.1, crowding=Threads().look)
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=judge)
    judge.begin()
    step = 0
    while not telemetry.registry.get_sample_value("holdfast_bottleneck", {"cause": "no core"}):
        assert not deadline.passed
        log.begin()
        with spans.span("forward"):
            compute(0.02)
        step += 1
        log.end(step)
        log.tell()
    assert "of the time that this process would compute it waits for a core" in str(
        telemetry.progress.verdict
    )


def test_of_threads_that_have_begun_or_ended_meanwhile_what_they_did_is_no_step_backwards(
    tmp_path: Path,
) -> None:
    def threads(**told: str) -> None:
        shutil.rmtree(tmp_path / "task", ignore_errors=True)
        for thread, schedstat in told.items():
            (tmp_path / "task" / thread).mkdir(parents=True)
            (tmp_path / "task" / thread / "schedstat").write_text(schedstat)

    look = Threads(tmp_path).look
    assert look() is None, "there is no such process"
    threads(t1="1000000000 0 5", t2="90000000000 80000000000 5")
    assert look() is None, "nothing to compare it with yet"
    threads(t1="3000000000 500000000 9", t3="1000000000 500000000 9")
    crowding = look()
    assert crowding == Crowding(pytest.approx(0.25), cores_allowed())
    threads(t1="3000000000 500000000 9")
    assert look() is None, "nothing was computed"
    threads(t1="nothing")
    assert look() is None


class Computes(Dataset[int]):
    """Decodes, or tokenises."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        compute(0.03)
        return index


class Reads(Computes):
    """From a disk that has an answer after a while."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.1)
        return index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "cause"),
    [(Computes(), "data computing"), (Reads(), "data reading")],
    ids=["computes", "reads"],
)
def test_a_loader_that_computes_is_told_from_one_that_waits_for_its_disk(
    dataset: Dataset[Any], cause: str, workers: int, tmp_path: Path, deadline: Deadline
) -> None:
    """With the real loader and the kernel's own figures, for about a second each."""
    telemetry, spans = Telemetry(1, 1), Spans(torch.device("cpu"))
    judge = Judge(1, interval_seconds=1.2, loading=Loader(spans.waits).look)
    log = StepLog(spans, telemetry, Journal(RunDir(tmp_path), 1), 1, judge=judge)
    samples = Samples(dataset, batch=1, workers=workers)
    step = 0

    def judged() -> bool:
        nonlocal step
        log.begin()
        with spans.span("data"):
            samples.batch(step)
        spans.add("forward", 1e-4)
        step += 1
        log.end(step)
        log.tell()
        return telemetry.progress.verdict is not None

    with closing(samples):
        while not judged():
            assert not deadline.passed
    value = telemetry.registry.get_sample_value("holdfast_bottleneck", {"cause": cause})
    assert value == 1.0, telemetry.progress.verdict
