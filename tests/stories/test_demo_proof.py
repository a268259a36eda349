"""The demo's proof must be able to fail: each way in which two runs can differ is found and named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from scripts.demo.proof import Differs, Evidence, check, differences, figures

from holdfast_controller.jobs import TrainingJob

JOB = TrainingJob.model_validate({"metadata": {"name": "gpt"}, "spec": {"command": ["true"]}})
START = {"import": 1.0, "rendezvous": 0.0, "build": 1.0, "load": 0.0}


def step(number: int, attempt: int, loss: float) -> dict[str, Any]:
    figures = {"seconds": 0.5, "data_seconds": 0.001, "tokens": 1024, "loss": loss, "loss_hex": loss.hex()}
    return {"step": number, "attempt": attempt, **figures}


def attempt(number: int, outcome: str | None, lost: int, digest: str | None) -> dict[str, Any]:
    how = "killed" if outcome is None else "given notice"
    reason = "" if outcome == "finished" else f"replica 0: Drilled: {how} on request"
    return {"attempt": number, "outcome": outcome, "lostSteps": lost, "digest": digest, "reason": reason}


def ledger(*attempts: dict[str, Any]) -> dict[str, Any]:
    lines = [
        {"event": "attempt_start", "attempt": 1, "time": 104.0, "startup": START},
        {"event": "first_step", "attempt": 1, "time": 105.0},
    ]
    totals = {
        "attempts": len(attempts),
        "disruptions": len(attempts) - 1,
        "failures": 0,
        "lostSteps": sum(a["lostSteps"] for a in attempts),
        "goodput": 0.8,
        "recoverySeconds": [5.0] * (len(attempts) - 1),
    }
    return {"attempts": list(attempts), "totals": totals, "lines": lines}


@pytest.fixture
def evidence() -> Evidence:
    """Killed after step 3 with 2 durable, given notice after step 4, finished at 5; and the twin."""
    run = [
        step(1, 1, 8.0),
        step(2, 1, 7.0),
        step(3, 1, 6.5),
        step(3, 2, 6.5),
        step(4, 2, 6.25),
        step(5, 3, 6.0),
    ]
    twin = [step(n, 1, loss) for n, loss in enumerate((8.0, 7.0, 6.5, 6.25, 6.0), start=1)]
    attempts = attempt(1, None, 1, None), attempt(2, "interrupted", 0, "aa"), attempt(3, "finished", 0, "bb")
    return Evidence(100.0, JOB, ledger(*attempts), run, ledger(attempt(1, "finished", 0, "bb")), twin)


def test_a_faithful_resume_passes_with_its_own_figures(evidence: Evidence) -> None:
    result = figures(evidence)
    check(result, evidence)
    assert (result["proof"], result["lost_steps"], result["notice_lost_steps"]) == ("identical", 1, 0)
    assert result["first_step_seconds"] == 5.0
    assert result["tokens_per_second"] == 2048
    assert result["data_wait_fraction"] == pytest.approx(0.002)


def test_a_step_whose_counts_a_kill_took_is_left_out_of_the_rates(evidence: Evidence) -> None:
    evidence.steps[2] = {"step": 3, "attempt": 1, "seconds": 50.0}
    result = figures(evidence)
    check(result, evidence)
    assert result["tokens_per_second"] == 2048
    assert result["data_wait_fraction"] == pytest.approx(0.002)


def test_one_bit_of_a_step_that_was_done_twice_is_enough(evidence: Evidence) -> None:
    evidence.steps[2] = step(3, 1, 6.5000000000000009)
    assert "loss_hex of step 3" in differences(evidence)
    with pytest.raises(Differs, match=r"proof is .loss_hex of step 3"):
        check(figures(evidence), evidence)


def test_a_step_that_was_never_done_is_missed(evidence: Evidence) -> None:
    del evidence.steps[4]
    assert differences(evidence) == "step 4 of the twin is missing in the run"


def test_equal_losses_do_not_hide_another_state(evidence: Evidence) -> None:
    evidence.ledger = copy.deepcopy(evidence.ledger)
    evidence.ledger["attempts"][-1]["digest"] = "cc"
    assert differences(evidence) == "the digests of the final states differ"


def test_states_that_nobody_told_are_not_equal(evidence: Evidence) -> None:
    for one in (evidence.ledger, evidence.twin_ledger):
        one["attempts"][-1]["digest"] = None
    assert differences(evidence) == "the ledger has no digest of a final state"


@pytest.mark.parametrize("outcome", ["interrupted", None], ids=["it saved", "its grace ended first"])
def test_work_lost_after_a_notice_is_a_failed_demo(outcome: str | None, evidence: Evidence) -> None:
    """Also where a slow machine ends the ranks before they have saved: they say nothing, and none was told to
    be lost after a notice."""
    evidence.ledger["attempts"][1] |= {"lostSteps": 2, "outcome": outcome}
    with pytest.raises(Differs, match="notice_lost_steps is 2, not 0"):
        check(figures(evidence), evidence)


def test_a_twin_that_was_interrupted_proves_nothing(evidence: Evidence) -> None:
    evidence.twin_ledger["totals"]["attempts"] = 2
    with pytest.raises(Differs, match="twin was touched"):
        check(figures(evidence), evidence)
