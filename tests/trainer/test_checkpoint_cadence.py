"""When to save and what to keep: from the interruptions seen, the notice, and the steps asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_trainer.checkpoint import Cadence, CheckpointDirectory, Saver
from holdfast_trainer.checkpoint.cadence import (
    SPOT_MTBI_SECONDS,
    Toll,
    again_after,
    cost_of,
    does_not_fit,
    time_between_interruptions,
    young_interval,
)
from holdfast_trainer.checkpoint.flight import makes_way, seconds_left
from holdfast_trainer.checkpoint.retention import Retention
from holdfast_trainer.contract import RunDir, raise_fence


def attempt(seconds: float, outcome: str | None) -> list[dict[str, Any]]:
    """A ledger; None: the attempt was killed and said nothing."""
    lines = [{"event": "attempt_start", "time": 1000.0}, {"event": "checkpoint", "time": 1000.0 + seconds}]
    return lines if outcome is None else [*lines, {"event": "stop", "time": 1000.0, "outcome": outcome}]


@pytest.mark.parametrize(
    ("ledgers", "expected"),
    [
        ([], SPOT_MTBI_SECONDS),
        ([[]], SPOT_MTBI_SECONDS),
        ([attempt(800, "interrupted")], (SPOT_MTBI_SECONDS + 800) / 2),
        ([attempt(800, None)], (SPOT_MTBI_SECONDS + 800) / 2),
        ([attempt(800, "failed")], SPOT_MTBI_SECONDS + 800),
        ([attempt(100, None)] * 71, (SPOT_MTBI_SECONDS + 7100) / 72),
        ([[{"event": "stop", "outcome": "interrupted"}, {"time": "soon"}]], SPOT_MTBI_SECONDS),
    ],
)
def test_interruptions_are_counted_from_the_ledgers(ledgers: Any, expected: float) -> None:
    assert time_between_interruptions(ledgers) == pytest.approx(expected)


def test_a_run_that_is_often_interrupted_saves_more_often() -> None:
    often = time_between_interruptions([attempt(60, None)] * 200)
    assert often < 100
    assert young_interval(20.0, often) < young_interval(20.0, SPOT_MTBI_SECONDS)
    assert Cadence().due_after(70, 20.0, often)
    assert not Cadence().due_after(70, 20.0)


@pytest.mark.parametrize(
    ("stall", "durable", "alone", "beside", "expected"),
    [
        (0.1, 4.0, [1.0, 1.0, 9.0], [1.1, 1.0, 1.2, 1.1], 0.4),  # the first step compiled
        (0.1, 4.0, [1.0], [0.9, 1.0, 1.0, 1.0], 0.1),  # the stall was measured by itself
        (0.1, 4.0, [1.0], [1.0, 60.0], 4.0),  # somebody else took that long: a validation, a slow batch
        (0.1, 4.0, [], [1.0], 4.0),
        (0.1, 4.0, [1.0], [], 4.0),
        (4.0, 4.0, [1.0], [5.0], 4.0),  # written before the training went on
    ],
)
def test_a_save_costs_what_it_puts_the_training_off(
    stall: float, durable: float, alone: list[float], beside: list[float], expected: float
) -> None:
    assert cost_of(stall, durable, alone, beside) == pytest.approx(expected)


def test_auto_saves_as_often_as_it_costs_little_not_as_it_takes_long() -> None:
    """4 s until durable, of which the training feels 0.1: every 38 s, and not every 240."""
    toll = Toll()
    toll.step(30.0, saving=False)
    for save in range(3):
        toll.begin()
        for number in range(30):
            toll.step(1.0 + 0.025 * (number < 4), saving=number < 4)
        assert toll.of(0.05, 4.0) == pytest.approx(0.1), save
    assert young_interval(toll.of(0.05, 4.0), SPOT_MTBI_SECONDS, 4.0) == pytest.approx(math.sqrt(1440))
    assert young_interval(0.1, SPOT_MTBI_SECONDS, 60.0) == 60.0, "there is one save at a time"
    assert Cadence().due_after(38.0, 0.1, durable=4.0)
    assert not Cadence().due_after(38.0, 0.1, durable=60.0)


def test_a_save_that_failed_is_tried_again_soon_and_ever_more_seldom() -> None:
    assert [again_after(failures) for failures in (1, 2, 3, 6, 7, 8, 10_000)] == [
        5,
        10,
        20,
        160,
        300,
        300,
        300,
    ]


def test_a_save_that_does_not_fit_the_notice_is_told_with_what_helps() -> None:
    assert does_not_fit(27.0, 27.0) is None
    told = does_not_fit(61.23, 27.0)
    assert told is not None
    assert "takes 61.2 s until it is durable and a notice leaves 27.0 s" in told
    assert "A longer grace period, faster storage or more ranks" in told


def test_every_nth_checkpoint_stays_for_good(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    raise_fence(run, 1)
    saver = Saver(run, attempt=1, rank=0, world_size=1, keep=2, keep_every=20)
    for step in range(10, 90, 10):
        saver.save(step, {"parts": {"w": torch.ones(3)}}, {})
        saver.wait()
    assert CheckpointDirectory(run, 1).steps() == [80, 70, 60, 40, 20]
    with pytest.raises(ValueError, match="keep_every=-1: a number of steps, or 0 to keep no others"):
        Saver(run, attempt=1, rank=0, world_size=1, keep_every=-1)


@pytest.mark.parametrize(
    ("retention", "losses", "expected"),
    [
        (Retention(2), {}, {50, 40}),
        (Retention(1, best=1), {10: 3.0, 20: 2.0, 30: 2.5}, {50, 20}),
        (Retention(1, best=2), {10: 3.0, 20: 2.0, 30: 2.5}, {50, 20, 30}),
        (Retention(1, best=1), {20: 2.0, 30: 2.0}, {50, 30}),
        (Retention(1, best=3), {20: math.nan, 30: math.inf, 35: 1.0}, {50}),
        (Retention(1, every=20, best=1), {10: 1.0}, {50, 40, 20, 10}),
        (Retention(9), {}, {50, 40, 30, 20, 10}),
    ],
)
def test_what_stays(retention: Retention, losses: dict[int, float], expected: set[int]) -> None:
    assert retention.stays([50, 40, 30, 20, 10], losses) == expected


def test_the_best_stay_also_when_they_were_measured_by_an_earlier_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    raise_fence(run, 1)
    measured = {10: 3.0, 20: 1.5, 30: 2.0, 40: 1.0, 50: 2.5, 60: 2.2}
    for attempt_steps in ([10, 20, 30], [40, 50, 60, 70]):
        saver = Saver(run, attempt=1, rank=0, world_size=1, keep=1, keep_best=2)
        for step in attempt_steps:
            saver.save(step, {"parts": {"w": torch.ones(3)}}, {})
            saver.wait()
            if step in measured:  # validation comes after the save of its step
                saver.validated(step, measured[step])
    assert CheckpointDirectory(run, 1).steps() == [70, 40, 20]
    with pytest.raises(ValueError, match="keep_best=-1: a number of checkpoints, or 0"):
        Saver(run, attempt=1, rank=0, world_size=1, keep_best=-1)


@pytest.mark.parametrize(
    ("elapsed", "share", "usual", "expected"),
    [
        (4.0, 0.5, None, 4.0),
        (4.0, 0.8, 60.0, 1.0),
        (4.0, 1.0, 60.0, 0.0),
        (4.0, 0.0, 10.0, 14.0),
        (4.0, 0.0, None, None),
    ],
)
def test_how_long_a_save_still_takes(
    elapsed: float, share: float, usual: float | None, expected: float | None
) -> None:
    assert seconds_left(elapsed, share, usual) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("notice", "flight", "usual", "expected"),
    [
        (27.0, 10.0, 12.0, False),  # both fit: the one under way is certain
        (27.0, 20.0, 12.0, True),  # one fits, and the newer covers more
        (27.0, 27.1, 12.0, True),  # the one under way does not even fit
        (27.0, 5.0, 30.0, False),  # the newer does not fit
        (27.0, None, 12.0, False),
        (27.0, 20.0, None, False),
        (0.0, 0.0, 0.0, False),
    ],
)
def test_a_save_in_flight_makes_way_where_one_of_two_fits(
    notice: float, flight: float | None, usual: float | None, expected: bool
) -> None:
    assert makes_way(notice, flight, usual) is expected
