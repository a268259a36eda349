"""The account of a job that was preempted twice, computed from what its run wrote."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast_controller.api.ledger import account
from holdfast_controller.cli.description import totals_line
from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Spec, Status, TrainingJob, Verdict

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
ZERO = NOW.timestamp() - 100


def steps(attempt: int, first: int, last: int, at: float) -> list[dict[str, Any]]:
    return [
        {"attempt": attempt, "step": step, "time": at + step - first, "loss": 1.0}
        for step in range(first, last + 1)
    ]


def job(*verdicts: Verdict | None, **status: Any) -> TrainingJob:
    records = [
        AttemptRecord(
            number=number,
            verdict=verdict,
            started_at=NOW - timedelta(seconds=90),
            ended_at=NOW if verdict else None,
        )
        for number, verdict in enumerate(verdicts, 1)
    ]
    return TrainingJob(
        metadata=Metadata(name="j"),
        spec=Spec(command=["x"]),
        status=Status(attempts=records, attempt=len(records), **status),
    )


LINES: list[dict[str, Any]] = [
    {"event": "attempt_start", "time": ZERO, "attempt": 1, "world_size": 2, "resumed_step": 0},
    {"event": "first_step", "time": ZERO + 5, "attempt": 1, "step": 1, "seconds": 1.0},
    {"event": "checkpoint", "time": ZERO + 12, "attempt": 1, "step": 8},
    # killed at step 12; the checkpoint of step 8 turns out damaged, so the next resumes from 4
    {"event": "attempt_start", "time": ZERO + 20, "attempt": 2, "world_size": 2, "resumed_step": 4},
    {"event": "first_step", "time": ZERO + 22, "attempt": 2, "step": 5, "seconds": 1.0},
    {
        "event": "stop",
        "time": ZERO + 30,
        "attempt": 2,
        "outcome": "interrupted",
        "step": 10,
        "durable_step": 10,
    },
    {"event": "attempt_start", "time": ZERO + 33, "attempt": 3, "world_size": 2, "resumed_step": 10},
    {"event": "first_step", "time": ZERO + 35.5, "attempt": 3, "step": 11, "seconds": 1.0},
    {
        "event": "stop",
        "time": ZERO + 40,
        "attempt": 3,
        "outcome": "finished",
        "step": 15,
        "durable_step": 15,
        "digest": "abc",
    },
]
STEPS = steps(1, 1, 12, ZERO + 5) + steps(2, 5, 10, ZERO + 22) + steps(3, 11, 15, ZERO + 35.5)


def test_a_job_preempted_twice() -> None:
    told = account(job(Verdict.DISRUPTED, Verdict.DISRUPTED, Verdict.FINISHED, disruptions=2), LINES, STEPS)
    first, second, third = told.attempts
    assert (first.resumed_step, first.first_step, first.last_step, first.durable_step) == (0, 1, 12, 8)
    assert (first.lost_steps, second.lost_steps, third.lost_steps) == (8, 0, 0)
    # From the last sign of life of the one before (its step 12, at 16 s) to the first step done.
    assert (first.recovery_seconds, second.recovery_seconds, third.recovery_seconds) == (None, 6.0, 5.5)
    assert third.digest == "abc"
    assert told.totals.recovery_seconds == [6.0, 5.5]
    assert (told.totals.attempts, told.totals.disruptions, told.totals.lost_steps) == (3, 2, 8)


def test_lost_steps_are_the_steps_done_once_too_often() -> None:
    told = account(job(Verdict.DISRUPTED, Verdict.DISRUPTED, Verdict.FINISHED), LINES, STEPS)
    assert told.totals.lost_steps == len(STEPS) - len({line["step"] for line in STEPS})


def test_while_it_runs_nothing_is_called_lost() -> None:
    told = account(job(None), LINES[:3], STEPS[:12])
    assert told.attempts[0].lost_steps is None
    assert told.totals.lost_steps == 0


def test_a_kill_before_a_successor_counts_from_the_durable_step() -> None:
    told = account(job(Verdict.DISRUPTED), LINES[:3], STEPS[:12])
    assert told.attempts[0].lost_steps == 4


def test_a_suspension_is_no_recovery() -> None:
    told = account(job(Verdict.DISRUPTED, Verdict.SUSPENDED, Verdict.FINISHED), LINES, STEPS)
    assert told.attempts[2].recovery_seconds is None


def test_an_attempt_that_ended_before_it_could_speak() -> None:
    """Its image had a fault; the ones after it tell what they do."""
    told = account(job(Verdict.FAILED, Verdict.DISRUPTED), [line | {"attempt": 2} for line in LINES[:3]], [])
    assert told.attempts[0].lost_steps == 0
    assert told.attempts[0].last_step is None
    assert told.totals.lost_steps is not None


def test_what_a_script_lost_that_tells_nothing_is_not_known() -> None:
    """It has nothing of Holdfast in it, and was killed in the middle of its work."""
    told = account(job(Verdict.DISRUPTED, None), [], [])
    assert [attempt.lost_steps for attempt in told.attempts] == [None, None]
    assert told.totals.lost_steps is None
    assert "; lost steps not known" in totals_line(told.model_dump(by_alias=True)["totals"]).plain
    assert account(job(None), [], []).totals.lost_steps == 0, "nothing of it has ended"
    done = account(job(Verdict.FINISHED), [], [])
    assert (done.attempts[0].lost_steps, done.totals.lost_steps) == (0, 0)


def test_attempts_that_the_status_has_forgotten_are_in_the_account() -> None:
    told = account(job(), LINES, STEPS)
    assert [attempt.attempt for attempt in told.attempts] == [1, 2, 3]
    assert told.totals.lost_steps == 8


def test_what_forgotten_attempts_lost_is_in_the_sum_though_their_steps_are_out_of_reach() -> None:
    """Of a job on a cluster that is over, or long, the ledger's lines alone are there, and its status has the
    newest 20 attempts. Each was killed 10 steps after its save: of the oldest it was told that they had done
    and saved nothing, and lost nothing, and the sum lacked them."""
    lines, records = list[dict[str, Any]](), list[AttemptRecord]()
    for number, saved in enumerate(range(50, 1250, 50), 1):
        at = {"attempt": number, "time": ZERO + 100 * number}
        lines += [
            {"event": "attempt_start", **at, "world_size": 1, "resumed_step": saved - 50},
            {"event": "first_step", **at, "step": saved - 49, "seconds": 1.0},
            {"event": "checkpoint", **at, "step": saved},
        ]
        done = {"resumed_step": saved - 50, "last_step": saved + 10, "durable_step": saved, "checkpoints": 1}
        records.append(AttemptRecord(number=number, verdict=Verdict.DISRUPTED, ended_at=NOW, **done))
    there = job()
    there.status = Status(phase=Phase.SUSPENDED, attempt=24, lost_steps=240, attempts=records[-20:])
    told = account(there, lines, [])
    shown = [(one.last_step, one.durable_step, one.lost_steps) for one in told.attempts]
    assert shown[:5] == [
        (None, 50, None),
        (None, 100, None),
        (None, 150, None),
        (None, 200, None),
        (260, 250, 10),
    ]
    assert (told.totals.attempts, told.totals.lost_steps) == (24, 240)
    assert account(there, [], []).totals.lost_steps == 240, "nor are the lines there"


def test_where_the_lines_are_out_of_reach_the_status_tells_what_it_remembers() -> None:
    """As on Kubernetes, where the controller that had read them was started anew."""
    there = job(Verdict.DISRUPTED, Verdict.FINISHED, disruptions=1, goodput=0.5)
    first, second = there.status.attempts
    first.world_size = second.world_size = 2
    first.resumed_step, first.first_step, first.last_step, first.durable_step = 0, 1, 12, 12
    first.checkpoints, first.outcome, first.digest = 2, "interrupted", "d12"
    first.last_sign_at = datetime.fromtimestamp(ZERO + 17, UTC)
    second.resumed_step, second.first_step, second.last_step, second.durable_step = 12, 13, 15, 15
    second.first_step_at = datetime.fromtimestamp(ZERO + 22, UTC)
    told = account(there, [], [])
    one, two = told.attempts
    assert (one.world_size, one.first_step, one.last_step, one.durable_step) == (2, 1, 12, 12)
    assert (one.checkpoints, one.outcome, one.digest, one.lost_steps) == (2, "interrupted", "d12", 0)
    assert (two.resumed_step, two.recovery_seconds) == (12, 5.0)
    assert (two.checkpoints, two.outcome, two.digest) == (None, None, None), "unknown is not zero"
    assert (told.totals.goodput, told.totals.lost_steps, told.lines) == (0.5, 0, [])


def test_the_digest_is_that_of_the_newest_checkpoint_where_the_lines_end_before_it() -> None:
    """As on Kubernetes, where the end of a job is not always heard in time: by step 12 stood the digest of
    step 8, and two runs that end in the same bits seemed to differ."""
    there = job(Verdict.FINISHED)
    (record,) = there.status.attempts
    record.durable_step, record.digest = 12, "d12"
    lines = [{**LINES[2], "digest": "d8"}]
    (told,) = account(there, lines, []).attempts
    assert (told.durable_step, told.digest) == (12, "d12")
    record.durable_step, record.digest = 8, None
    (told,) = account(there, lines, []).attempts
    assert (told.durable_step, told.digest) == (8, "d8")
    record.durable_step = 12  # of a controller that knew it from the one before, which is gone
    (told,) = account(there, lines, []).attempts
    assert (told.durable_step, told.digest) == (12, None)
    record.durable_step, record.digest = 4, "d4"
    (told,) = account(there, [LINES[2]], []).attempts
    assert (told.durable_step, told.digest) == (8, None)


def test_a_first_step_is_where_the_status_has_it_whatever_clock_the_trainer_had() -> None:
    """A clock was an hour ahead: status and describe knew better, and the ledger had it an hour to come."""
    known = job(None)
    known.status.attempts[0].first_step_at = NOW - timedelta(seconds=80)
    lines = [
        {"event": "attempt_start", "time": ZERO + 3600, "attempt": 1, "world_size": 1, "resumed_step": 0},
        {"event": "first_step", "time": ZERO + 3620, "attempt": 1, "step": 1, "seconds": 1.0},
    ]
    (told,) = account(known, lines, [], NOW).attempts
    assert told.first_step_at == NOW - timedelta(seconds=80)
    assert told.recovery_seconds is None


def test_an_attempt_that_was_killed_and_is_forgotten_ended_when_it_was_last_heard_of() -> None:
    there = job(None, None, None)
    there.status.attempts = there.status.attempts[1:]
    first, _, newest = account(there, LINES[:5] + LINES[6:8], STEPS[:12]).attempts
    assert (first.verdict, first.ended_at) == (None, datetime.fromtimestamp(ZERO + 16, UTC)), "its step 12"
    assert newest.ended_at is None, "it runs"
