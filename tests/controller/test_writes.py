"""When a status is written: what counts at once, what moves all the time not too often."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast_controller.jobs import AttemptRecord, JobProgress, Phase, Status, Verdict
from holdfast_controller.policy.writes import seconds_to_write

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("changes", "age", "expected"),
    [
        pytest.param({}, 0, None, id="nothing new"),
        pytest.param({"phase": Phase.FAILED}, 0, 0, id="another phase"),
        pytest.param({"disruptions": 1}, 0, 0, id="another count"),
        pytest.param({"message": "waits for 2 slots"}, 0, 0, id="another reason"),
        pytest.param({"progress": 11, "message": "step 11"}, 0.25, 0.75, id="a step, too soon"),
        pytest.param({"progress": 11, "message": "step 11"}, 1.5, 0, id="a step"),
    ],
)
def test_the_trainers_figures_are_written_once_a_second(
    changes: dict[str, Any], age: float, expected: float | None
) -> None:
    old = Status(phase=Phase.RUNNING, message="step 10", progress=JobProgress(step=10, updated_at=NOW))
    if "progress" in changes:
        changes = {**changes, "progress": JobProgress(step=changes["progress"], updated_at=NOW)}
    new = old.model_copy(update=changes)
    assert seconds_to_write(old, new, NOW + timedelta(seconds=age)) == expected


def test_what_an_attempt_comes_to_is_written_at_once_and_its_figures_so_far_with_the_trainers() -> None:
    """The goodput of the one that runs moves with every step."""
    before = AttemptRecord(number=1, verdict=Verdict.DISRUPTED, goodput=0.5)
    runs = AttemptRecord(number=2, resumed_step=10, goodput=0.25, useful_seconds=1.0)
    old = Status(phase=Phase.RUNNING, progress=JobProgress(step=10, updated_at=NOW), attempts=[before, runs])

    def left(*attempts: AttemptRecord) -> float | None:
        new = old.model_copy(update={"progress": JobProgress(step=11), "attempts": list(attempts)})
        return seconds_to_write(old, new, NOW + timedelta(seconds=0.25))

    further = {"goodput": 0.26, "useful_seconds": 1.1}
    assert left(before, runs.model_copy(update=further)) == 0.75
    assert left(before, runs.model_copy(update={**further, "verdict": Verdict.DISRUPTED})) == 0
    assert left(before.model_copy(update={"goodput": 0.4}), runs) == 0, "it was corrected, once"
    assert left(before, runs, AttemptRecord(number=3)) == 0


@pytest.mark.parametrize(
    ("changes", "wrote", "expected"),
    [
        pytest.param({"message": "0 of 2 replicas are up"}, None, 0, id="the first by this controller"),
        pytest.param({"message": "0 of 2 replicas are up"}, 0.5, 2.5, id="another reason, soon after"),
        pytest.param({"phase": Phase.QUEUED, "message": "no node fits"}, 0.5, 2.5, id="to and fro"),
        pytest.param({"phase": Phase.QUEUED, "message": "no node fits"}, 4, 0, id="it stays so"),
        pytest.param({"first_started_at": NOW}, 0.5, 0, id="it has started"),
        pytest.param({"phase": Phase.RUNNING}, 0.5, 0, id="it trains"),
        pytest.param({"phase": Phase.SUSPENDING}, 0.5, 0, id="it is suspended"),
        pytest.param({"attempt": 2}, 0.5, 0, id="another attempt"),
        pytest.param({"observed_generation": 2}, 0.5, 0, id="another specification is seen"),
    ],
)
def test_reasons_to_wait_that_follow_one_another_in_a_second_are_written_once(
    changes: dict[str, Any], wrote: float | None, expected: float
) -> None:
    old = Status(phase=Phase.STARTING, message="attempt 1 starts", attempt=1)
    new = old.model_copy(update=changes)
    last = None if wrote is None else NOW - timedelta(seconds=wrote)
    assert seconds_to_write(old, new, NOW, waiting_seconds=3.0, wrote=last) == expected
