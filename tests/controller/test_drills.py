"""What a drill cost, from what the run wrote."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_controller.cli.drilling import DONE
from holdfast_controller.drills import KINDS, DrillKind, DrillReport, drill_report


def attempt(number: int, last: int | None, verdict: str | None = None, **more: Any) -> dict[str, Any]:
    return {"attempt": number, "verdict": verdict, "reason": "", "lastStep": last, **more}


def steps(number: int, first: int, last: int, **other: str) -> list[dict[str, Any]]:
    """Losses of an attempt; `other` has those that are not the usual ones, by `stepN`."""
    return [
        {"attempt": number, "step": step, "loss_hex": other.get(f"step{step}", f"0x1.{step}p+0")}
        for step in range(first, last + 1)
    ]


HIT = attempt(1, 57, "Disrupted", durableStep=40, lostSteps=17, reason="replica 1: Drilled")
AFTER = attempt(2, 60, resumedStep=40, firstStepAt="2026-01-01T00:00:09Z", recoverySeconds=4.2)


def report(*accounts: dict[str, Any], lines: list[dict[str, Any]]) -> DrillReport:
    found = drill_report(1, "Running", accounts, lines)
    assert found is not None
    return found


def test_steps_done_twice_with_the_same_bits_prove_the_resume() -> None:
    told = report(HIT, AFTER, lines=steps(1, 1, 57) + steps(2, 41, 60))
    assert (told.lost_steps, told.resumed_step, told.recovery_seconds) == (17, 40, 4.2)
    assert (told.again, told.different) == (17, ())
    assert told.proof == "exact: all 17 steps done twice gave the same loss to the last bit"


def test_what_was_done_twice_without_a_loss_on_record_is_no_proof_and_is_said() -> None:
    """Killed before the loss of its last step was agreed on."""
    told = report(HIT, AFTER, lines=steps(1, 1, 56) + steps(2, 41, 60))
    assert told.again == 16
    assert told.proof.endswith(
        "steps done twice gave the same loss to the last bit; the loss of 1 more was not told before"
    )


def test_one_other_bit_is_named() -> None:
    told = report(HIT, AFTER, lines=steps(1, 1, 57) + steps(2, 41, 60, step44="0x1.5p+0", step57="0x2p+0"))
    assert told.different == (44, 57)
    assert told.proof == "NOT exact: of 17 steps done twice 2 differ, from 44, 57"


def test_what_the_resume_told_of_itself_stands_beside_the_proof() -> None:
    """Of a script that was edited meanwhile it said no more than that steps differ."""
    edited = "the program's code: 32a740e4a829 -> 4b517694b1ab"
    after = {**AFTER, "resumeDifferences": [edited]}
    told = report(HIT, after, lines=steps(1, 1, 57) + steps(2, 41, 60, step44="0x1.5p+0"))
    assert told.proof == f"NOT exact: of 17 steps done twice 1 differ, from 44; the resume told: {edited}"


def test_after_a_notice_nothing_is_done_twice() -> None:
    hit = attempt(1, 57, "Disrupted", durableStep=57, lostSteps=0)
    after = attempt(2, 58, resumedStep=57, firstStepAt="x", recoverySeconds=3.0)
    told = report(hit, after, lines=steps(1, 1, 57) + steps(2, 58, 58))
    assert told.proof == "no step was done twice: it went on from the very state that was saved"


def test_without_losses_on_record_nothing_is_claimed() -> None:
    assert report(HIT, AFTER, lines=[]).proof.startswith("not known")


@pytest.mark.parametrize(
    "accounts",
    [
        [],
        [attempt(1, 57)],  # not judged yet
        [HIT],
        [HIT, attempt(2, None)],
        [HIT, attempt(2, 57, resumedStep=40, firstStepAt="x")],  # not beyond what was done before
        [HIT, attempt(2, 45, "Disrupted", resumedStep=40, firstStepAt="x"), attempt(3, None)],
    ],
)
def test_there_is_no_report_before_the_lost_steps_are_done_again(accounts: list[dict[str, Any]]) -> None:
    assert drill_report(1, "Running", accounts, steps(1, 1, 57)) is None


def test_disrupted_once_more_on_the_way_it_is_reported_when_it_got_there() -> None:
    again = attempt(2, 45, "Disrupted", resumedStep=40, firstStepAt="x", recoverySeconds=4.0)
    there = attempt(3, 58, resumedStep=40, firstStepAt="y", recoverySeconds=5.0)
    told = report(HIT, again, there, lines=steps(1, 1, 57) + steps(2, 41, 45) + steps(3, 41, 58))
    assert (told.recovery_seconds, told.again, told.different) == (4.0, 17, ())


def test_a_job_that_finished_all_the_same_says_so() -> None:
    told = report(attempt(1, 90, "Finished", lostSteps=0, durableStep=90), lines=steps(1, 1, 90))
    assert (told.verdict, told.resumed_step, told.proof[:9]) == ("Finished", None, "not known")


def test_a_script_that_tells_nothing_has_its_report_once_it_is_taken_to_run() -> None:
    """It has nothing of Holdfast in it: no attempt of it ever says a step, or that it did the first one."""
    accounts = [attempt(1, None, "Disrupted"), attempt(2, None)]
    assert drill_report(1, "Recovering", accounts[:1], []) is None
    assert drill_report(1, "Starting", accounts, []) is None
    for phase in ("Running", "Succeeded"):
        told = drill_report(1, phase, accounts, [])
        assert told is not None
        assert (told.verdict, told.lost_steps, told.recovery_seconds) == ("Disrupted", None, None)
        assert told.proof.startswith("not known")


def test_every_kind_is_told_in_words() -> None:
    assert DONE.keys() == set(DrillKind)
    told = {kind for sentence in KINDS.split(". ") for kind in sentence.partition(":")[0].split(", ")}
    assert told == set(DrillKind), "who reads of the kinds reads of all"
