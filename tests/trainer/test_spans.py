"""Where the time of a step goes: by the CPU's clock and the GPU's, and apart what a rank waits for others."""

from __future__ import annotations

import pytest
import torch
from asked import address_of, get, series
from gangs import Workshop
from queued_event import QueuedEvent

from holdfast_trainer.checkpoint.flight import Flight
from holdfast_trainer.loading import Crowding
from holdfast_trainer.spans import Spans, gemm_peak


def test_what_backward_waits_for_a_slower_rank_is_told_apart(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=500, of_rank_1={"pause": 0.05}, chunks=2, hold_at=25)
    gang.wait_for_step(25)
    found = series(get(address_of(gang), "/metrics"))
    waited, computed = (
        found[f"holdfast_step_span_seconds_sum{{phase={phase}}}"] for phase in ("communication", "backward")
    )
    assert found["holdfast_step_span_seconds_count{phase=communication}"] == 25
    assert waited > 24 * 0.04, "each step but the first, where ranks begin when they begin"
    assert computed < waited


def test_on_a_gpu_what_is_left_of_a_span_is_told_apart_by_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    QueuedEvent.instead_of_cuda(monkeypatch)
    shown: list[str] = []  # by nsys
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", shown.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: shown.append("end"))
    spans = Spans(torch.device("cuda"))
    with spans.span("forward"):
        pass
    with spans.span("backward"):
        spans.turn("communication")
    with spans.span("optimizer"):
        pass
    spans.end_step()
    assert QueuedEvent.waited == 0, "all of it is only queued"
    each = dict.fromkeys(("forward", "backward", "communication", "optimizer"), 0.01)
    assert spans.collect() == pytest.approx(each)
    assert shown == ["forward", "end", "backward", "end", "optimizer", "end"]


def test_what_a_gpu_waits_for_the_copy_of_its_state_is_no_part_of_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that trains does not wait: its GPU does, between two events of the optimizer's span."""
    QueuedEvent.instead_of_cuda(monkeypatch)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)

    def moment() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    spans, flight = Spans(torch.device("cuda")), Flight(100)
    with spans.span("optimizer"):
        wait = moment(), moment()
        spans.add_apart_on_gpu("checkpoint", *wait)
    flight.settle(on_gpu=wait)
    spans.end_step()
    assert QueuedEvent.waited == 0, "all of it is only queued"
    assert flight.await_settled() == pytest.approx(0.01), "the stall that is told of the save"
    assert spans.collect() == pytest.approx({"optimizer": 0.02, "checkpoint": 0.01})


def test_a_loop_that_times_no_backward_pass_has_no_time_below_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DDP tells that it waits for the exchange, and the optimizer that it waited for a copy; of a loop of
    one's own neither is within a span."""
    QueuedEvent.instead_of_cuda(monkeypatch)
    spans = Spans(torch.device("cuda"))
    spans.turn("communication")
    start, end = QueuedEvent(enable_timing=True), QueuedEvent(enable_timing=True)
    for moment in (start, end):
        moment.record()
    spans.add_apart_on_gpu("checkpoint", start, end)
    spans.end_step()
    assert spans.collect() == pytest.approx({"checkpoint": 0.01})


def test_one_rank_alone_waits_for_nobody(workshop: Workshop) -> None:
    gang = workshop.start(steps=500, hold_at=5)
    gang.wait_for_step(5)
    found = series(get(address_of(gang), "/metrics"))
    assert "holdfast_step_span_seconds_count{phase=backward}" in found
    assert "holdfast_step_span_seconds_count{phase=communication}" not in found


def test_spans_of_one_phase_add_up() -> None:
    spans = Spans(torch.device("cpu"))
    spans.add("checkpoint", 1.5)
    for _ in range(2):
        with spans.span("data"):
            spans.add("checkpoint", 0.5)
    spans.end_step()
    found = spans.collect()
    assert found["checkpoint"] == 2.5
    assert found["data"] > 0
    assert spans.collect() == {}


def test_a_span_within_another_counts_once_and_none_apart_within_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of training and validation come from one function, with a span of its own: steps that hardly
    waited were said to wait for data, for more than all of their time."""
    now = 0.0
    monkeypatch.setattr("holdfast_trainer.spans.time.perf_counter", lambda: now)
    spans = Spans(torch.device("cpu"))

    def batch() -> None:
        nonlocal now
        with spans.span("data"):
            now += 5

    with spans.span("validation"):
        batch()
        now += 30
    with spans.span("forward"):
        now += 2
        batch()
        now += 1
    assert spans.waits.seconds == 5.0, "whose cores are looked at is the training"
    spans.end_step()
    assert spans.collect() == {"validation": 35.0, "data": 5.0, "forward": 3.0}


def test_on_a_gpu_too_a_span_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    QueuedEvent.instead_of_cuda(monkeypatch)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    spans = Spans(torch.device("cuda"))
    with spans.span("forward"), spans.span("data"):
        pass
    with spans.span("validation"), spans.span("data"):
        pass
    spans.end_step()
    assert spans.collect() == pytest.approx({"forward": 0.02, "data": 0.01, "validation": 0.01})


@pytest.mark.parametrize(
    ("computed", "queued", "took"),
    [
        (1.0, 0.0, 1.0),
        (1.0, 0.75, 1.0),  # a core of its own, and other threads of it wait
        (0.3, 0.75, 0.3),  # as much as it computed, rather
        (0.2, 0.6, 0.4),
        (0.5, 0.8, 1.0),  # half a core is all that it may have
    ],
)
def test_the_peak_is_what_the_cores_can_do_also_where_something_else_has_them(
    computed: float, queued: float, took: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MFU of more than 100 % came of it."""
    cores = 0.5 if computed == 0.5 else 8.0
    moments, computing = iter([0.0, 1.0]), iter([0.0, computed])
    monkeypatch.setattr("holdfast_trainer.spans.time.perf_counter", lambda: next(moments))
    monkeypatch.setattr("holdfast_trainer.spans.time.process_time", lambda: next(computing))
    looks = iter([None, Crowding(queued, cores)])  # the first has nothing to compare with
    monkeypatch.setattr("holdfast_trainer.spans.Threads.look", lambda _: next(looks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    peak = gemm_peak(torch.device("cpu"), torch.float32, size=16, repeats=1)
    assert peak == pytest.approx(2 * 16**3 / took)


def test_the_peak_is_of_numbers_as_training_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of constant ones a GPU is faster than it can ever be; and what training draws stays as it was."""
    multiplied, real = [], torch.mm

    def noted(left: torch.Tensor, right: torch.Tensor, **into: torch.Tensor) -> torch.Tensor:
        multiplied.append(left)
        return real(left, right, **into)

    monkeypatch.setattr(torch, "mm", noted)
    before = torch.get_rng_state()
    assert gemm_peak(torch.device("cpu"), torch.float32, size=64, repeats=2) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert len(multiplied) == 2
    assert len(multiplied[0].unique()) > 4000
