"""Times that a rank 0 tells are put right as they arrive, whatever its node takes for the time."""

from __future__ import annotations

from email.utils import formatdate
from typing import Any

import pytest

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.kube.clocks import Clocks
from holdfast_controller.kube.server_clock import ServerClock
from holdfast_trainer.contract import Progress, Termination

NOON = 1_777_636_800.0
KEY = ("team-a", ("uid-gpt", 2))


def told(ahead: float, at: float = NOON, **more: Any) -> Progress:
    """By a rank 0 whose clock is so far ahead, `at` by ours: its first step was done 5 s before."""
    return Progress(
        2, 41, 100, 40, "training", first_step_time=at - 5 + ahead, process_time=at - 9 + ahead,
        updated=at - 0.5 + ahead, asked=at + ahead, **more,
    )  # fmt: skip


@pytest.mark.parametrize("ahead", [-600.0, -2.0, 2.0, 600.0])
def test_what_it_tells_is_moved_by_what_its_clock_is_ahead(ahead: float) -> None:
    clocks = Clocks()
    heard = clocks.heard(KEY, told(ahead), NOON)
    assert (heard.first_step_time, heard.process_time, heard.updated) == (NOON - 5, NOON - 9, NOON - 0.5)
    assert heard.step == 41
    lines: list[dict[str, Any]] = [
        {"event": "first_step", "attempt": 2, "time": NOON + ahead},
        {"event": "stop", "attempt": 1, "time": NOON},
        {"event": "odd", "attempt": 2, "time": "noon"},
        {"event": "odd", "attempt": 2, "time": 10**400},
        {"event": "odd", "attempt": [2], "time": NOON},
        {"event": "odd"},
    ]
    assert clocks.lines("team-a", "uid-gpt", lines) == [{**lines[0], "time": NOON}, *lines[1:]]


def test_its_last_words_are_moved_too() -> None:
    clocks = Clocks()
    clocks.heard(KEY, told(600), NOON)
    said = Termination("interrupted", 41, 41, progress=told(600, NOON + 3))
    ended = ReplicaObservation(0, ReplicaState.FAILED, termination=said)
    peer = ReplicaObservation(1, ReplicaState.FAILED, termination=Termination("interrupted", 41, 41))
    seen = clocks.seen(KEY, AttemptObservation(2, exists=True, gone=True, replicas=(ended, peer)))
    word = seen.replicas[0].termination
    assert word is not None
    assert word.progress is not None
    assert word.progress.updated == NOON + 2.5
    assert seen.replicas[1] == peer
    clocks.forget("team-a", "uid-gpt")
    untouched = AttemptObservation(2, exists=True, gone=True, replicas=(ended,))
    assert clocks.seen(KEY, untouched) is untouched


def test_the_same_words_are_the_same_however_long_the_answer_took() -> None:
    clocks = Clocks()
    first = clocks.heard(KEY, told(600), NOON + 0.01)
    assert clocks.heard(KEY, told(600), NOON + 0.6) == first
    assert clocks.heard(KEY, told(600), NOON + 0.3) == first


def test_a_clock_that_is_right_or_that_nobody_told_moves_nothing() -> None:
    clocks = Clocks()
    right = told(0)
    assert clocks.heard(KEY, right, NOON + 0.4) is right
    silent = Progress(2, 41, 100, 40, "training", updated=NOON + 600)
    assert clocks.heard(KEY, silent, NOON) is silent


def test_a_clock_that_is_set_right_is_followed() -> None:
    clocks = Clocks()
    clocks.heard(KEY, told(600), NOON)
    assert clocks.heard(KEY, told(0, NOON + 9), NOON + 9).updated == pytest.approx(NOON + 8.5)


@pytest.mark.parametrize(
    ("date", "sent", "received", "ahead"),
    [
        pytest.param(100, 100.2, 100.6, 0.0, id="it has our time, in whole seconds"),
        pytest.param(115, 100.0, 130.0, 0.0, id="an answer that took long says no more"),
        pytest.param(103, 100.2, 100.6, 2.4, id="it is ahead"),
        pytest.param(90, 100.2, 100.6, -9.2, id="it is behind"),
    ],
)
def test_the_apiserver_s_clock_is_another_one_where_the_way_of_its_answer_does_not_explain_it(
    date: int, sent: float, received: float, ahead: float
) -> None:
    clock = ServerClock()
    clock.answered(formatdate(NOON + date, usegmt=True), NOON + sent, NOON + received)
    assert clock.ahead == pytest.approx(ahead)
    for nothing in (None, "yesterday"):
        clock.answered(nothing, NOON, NOON)
    clock.answered(formatdate(NOON + 130, usegmt=True), NOON + 100, NOON + 160)
    assert clock.ahead == pytest.approx(ahead), "what tells no time, or not when it was, changes nothing"
    clock.answered(formatdate(NOON + 160, usegmt=True), NOON + 160.2, NOON + 160.4)
    assert clock.ahead == 0.0, "somebody has set one of the two"
