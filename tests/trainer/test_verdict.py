"""What holds a run back is named from where its time goes, with the setting that changes it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from holdfast_trainer.contract import Progress, RunDir
from holdfast_trainer.ledger import Journal
from holdfast_trainer.steplog import StepLog
from holdfast_trainer.telemetry import Spans, Telemetry
from holdfast_trainer.verdict import CAUSES, Interval, Judge, judge

COMPUTE = {"forward": 3.0, "backward": 6.0, "optimizer": 0.5}


@pytest.mark.parametrize(
    ("interval", "cause", "said"),
    [
        (
            Interval(10, 20.0, COMPUTE | {"data": 10.0}),
            "data",
            "a step takes 2,000.0 ms, of which 50% waits for",
        ),
        (
            Interval(10, 10.0, COMPUTE | {"checkpoint": 0.6}),
            "checkpoint",
            "6% is held up by saves: raise checkp",
        ),
        (Interval(10, 14.0, COMPUTE), "other", "32% is outside of every span: Python between the parts"),
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
            Interval(10, 10.0, {"forward": 1.0, "backward": 8.0, "optimizer": 1.0}),
            "compute",
            "nothing holds it",
        ),
        (
            Interval(10, 10.0, COMPUTE, mfu=0.12),
            "device idle",
            "12% of what the device can multiply: raise train.m",
        ),
        (
            Interval(10, 10.0, COMPUTE, mfu=0.6),
            "compute",
            "of which 95% computes at 60% of what the device can",
        ),
        (Interval(10, 10.0, {}), "unknown", "put its parts into run.span(...)"),
        (Interval(10, 10.0, {"data": 9.0}), "unknown", "put its parts into run.span(...)"),
    ],
)
def test_the_first_cause_that_applies_is_named(interval: Interval, cause: str, said: str) -> None:
    verdict = judge(interval)
    assert verdict.cause == cause
    assert said in verdict.sentence
    assert cause in CAUSES


def test_validation_is_no_part_of_a_step() -> None:
    one = Judge(1, interval_seconds=0.0)
    verdict = one.step(100.0, {"validation": 90.0, "forward": 3.0, "backward": 6.0, "optimizer": 0.5}, None)
    assert verdict is not None
    assert "a step takes 10,000.0 ms, of which 95% computes" in verdict.sentence


def test_a_verdict_comes_once_an_interval() -> None:
    one = Judge(1, interval_seconds=3600.0)
    assert [one.step(1.0, {"forward": 1.0}, None) for _ in range(100)] == [None] * 100


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
        assert (telemetry.progress.verdict is None) == (step == 1)
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert "waits for data" in told[0]
    assert "is outside of every span" in told[1]


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
    assert (telemetry.progress.step, telemetry.progress.first_step) == (4, 1)
    assert telemetry.progress.verdict is None
    assert telemetry.progress.loss is None
    assert len(RunDir(tmp_path).steps(1).read_text().splitlines()) == 1, "the first step's, as ever"
