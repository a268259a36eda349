"""What the time from a loss to the next step went into: the stages add up, wherever a clock is wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from series import sample

from holdfast_controller.api.ledger import account
from holdfast_controller.breakdown import Breakdown
from holdfast_controller.cli.starts import start_columns
from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.job_series import JobFigures
from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Spec, Status, TrainingJob, Verdict
from holdfast_controller.metrics import Metrics
from holdfast_controller.policy.books import Books
from holdfast_controller.policy.classify import Incident
from holdfast_controller.policy.decide import Evidence, decide
from holdfast_controller.policy.lost_work import Work, work_of
from holdfast_controller.policy.recovery import CORRECTED, breakdown, lost_in, recovery_seconds
from holdfast_trainer.contract import Progress

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
STARTUP = {"import": 1.0, "rendezvous": 0.25, "build": 0.5, "load": 0.75}


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def lost(**changes: object) -> AttemptRecord:
    """Heard of last at noon, known to be lost at 1 s, over at 2 s."""
    known = {
        "number": 1,
        "verdict": Verdict.DISRUPTED,
        "last_sign_at": NOON,
        "detected_at": at(1),
        "ended_at": at(2),
    }
    return AttemptRecord(**{**known, **changes})


def next_one(**changes: object) -> AttemptRecord:
    known = {"number": 2, "opened_at": at(2.5), "placed_at": at(3), "first_step_at": at(9)}
    return AttemptRecord(**{**known, **changes})


def told(process: float | None = 5.0) -> Work:
    """Rank 0's process began at 5 s."""
    since = None if process is None else at(process).timestamp()
    return Work(0, 0, 0, process_time=since, startup={} if process is None else STARTUP)


def test_every_second_of_a_recovery_is_in_one_stage() -> None:
    found = breakdown(lost(), next_one(), told())
    assert found is not None
    assert found.stages() == {
        "detect": 1.0,
        "tear_down": 1.0,
        "wait": 0.5,
        "schedule": 0.5,
        "start": 2.0,
        **STARTUP,
        "first_step": 1.5,
    }
    assert sum(found.stages().values()) == recovery_seconds(lost(), next_one()) == 9.0


@pytest.mark.parametrize(
    ("before", "after", "work", "expected"),
    [
        # A pod's times are whole seconds, so an end can be told that lies before the loss was known.
        (lost(ended_at=at(0)), next_one(), told(), {"detect": 1.0, "tear_down": 0.0, "wait": 1.5}),
        # The clock of the node is ahead: no stage is negative, and none is longer than the whole.
        (lost(), next_one(placed_at=at(60)), told(), {"schedule": 6.5, "start": 0.0, "first_step": 0.0}),
        # What nobody told of has no stage; its time is in the next one that is known.
        (lost(detected_at=None), next_one(), told(), {"tear_down": 2.0}),
        (lost(), next_one(), told(None), {"schedule": 0.5, "first_step": 6.0}),
    ],
)
def test_what_is_odd_or_missing_never_spoils_the_sum(
    before: AttemptRecord, after: AttemptRecord, work: Work, expected: dict[str, float]
) -> None:
    found = breakdown(before, after, work)
    assert found is not None
    stages = found.stages()
    assert {name: stages[name] for name in expected} == expected
    assert sum(stages.values()) == recovery_seconds(before, after) == 9.0


def test_a_first_start_is_broken_down_and_recovers_from_nothing() -> None:
    first = next_one(number=1)
    found = breakdown(None, first, told())
    assert found is not None
    assert list(found.stages()) == ["schedule", "start", *STARTUP, "first_step"]
    assert sum(found.stages().values()) == 6.5
    assert recovery_seconds(None, first) is None


def test_a_suspension_is_no_loss() -> None:
    suspended = lost(verdict=Verdict.SUSPENDED)
    found = breakdown(suspended, next_one(), told())
    assert found is not None
    assert found.detect_seconds is None
    assert recovery_seconds(suspended, next_one()) is None


def test_attempts_that_never_did_a_step_are_part_of_the_wait_for_the_one_that_does() -> None:
    """A gang of which a part found no place for 5 minutes: its job was back after 19 s, it was said."""
    ran = lost(number=1, first_step_at=at(-60))
    unplaced = lost(number=2, verdict=Verdict.UNSCHEDULABLE, last_sign_at=None, ended_at=at(302))
    unplaced.opened_at = at(2.5)
    back = AttemptRecord(number=3, opened_at=at(303), placed_at=at(304), first_step_at=at(320))
    expected = {"detect_seconds": 1.0, "tear_down_seconds": 1.0, "wait_seconds": 301.0}
    for verdict in (Verdict.UNSCHEDULABLE, Verdict.SUSPENDED):
        unplaced.verdict = verdict
        job = TrainingJob(metadata=Metadata(name="gpt"), spec=Spec(command=["x"]))
        attempts = [ran, unplaced, back.model_copy(update={"first_step_at": None})]
        job.status = Status(attempt=3, attempts=attempts, first_started_at=at(-70))
        began = {"process_time": at(310).timestamp(), "first_step_time": at(320).timestamp()}
        progress = Progress(3, 41, 100, 40, "training", resumed_step=40, first_step=41, **began)
        seen = AttemptObservation(3, exists=True, gone=False, progress=progress, started_at=at(305))
        Books(job.status, at(330)).take_progress(job.status.attempts[2], seen, ())
        record = job.status.attempts[2]
        assert record.breakdown is not None
        if verdict is Verdict.SUSPENDED:
            assert record.recovery_seconds is None, "somebody wanted it to rest"
            continue
        assert record.recovery_seconds == 320.0
        assert record.breakdown.model_dump(include=set(expected)) == expected
        assert account(job, [], []).totals.recovery_seconds == [320.0]


def test_where_no_attempt_did_a_step_the_one_that_does_comes_back_from_the_newest() -> None:
    """Such as taken while it compiled."""
    assert lost_in([lost(), lost(number=2)]) == 1
    assert recovery_seconds(lost(last_sign_at=at(10)), next_one()) == 0.0, "as a clock that is ahead tells"


def test_an_attempt_that_was_made_anew_while_it_waited_is_part_of_the_wait() -> None:
    """Its verdict is Suspended, for nothing of it counts; nobody wanted the job to rest."""
    ran = lost(number=1, first_step_at=at(-60))
    waited = lost(number=2, verdict=Verdict.SUSPENDED, reason=CORRECTED, last_sign_at=None, ended_at=at(600))
    back = next_one(number=3, opened_at=at(601), placed_at=at(602), first_step_at=at(620))
    assert lost_in([ran, waited]) == 0
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=Spec(command=["x"]))
    job.status = Status(attempt=3, attempts=[ran, waited, back], first_started_at=at(-70))
    Books(job.status, at(630)).take_progress(back, AttemptObservation(3, exists=True, gone=False), ())
    assert job.status.attempts[-1].recovery_seconds == 620.0
    assert account(job, [], []).totals.recovery_seconds == [620.0]
    assert recovery_seconds(waited, back) is None, "of a first attempt that was made anew nothing was lost"


def test_a_job_that_is_suspended_before_its_attempt_is_made_anew_wants_to_rest() -> None:
    ran = lost(number=1, first_step_at=at(-60))
    going = AttemptRecord(number=2, opened_at=at(2), ending=Verdict.SUSPENDED, reason=CORRECTED)
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=Spec(command=["x"], suspend=True))
    job.status = Status(attempt=2, attempts=[ran, going], phase=Phase.RECOVERING)
    for seen in (
        AttemptObservation(2, exists=False, gone=True),
        AttemptObservation(2, exists=True, gone=True),
    ):
        status = decide(job, seen, Evidence(), at(10)).status
        assert (status.phase, status.attempts[1].verdict) == (Phase.SUSPENDED, Verdict.SUSPENDED)
        assert lost_in(status.attempts) == 1


def test_nothing_is_told_before_the_first_step_is_done() -> None:
    assert breakdown(lost(), next_one(first_step_at=None), told()) is None


def test_ledger_and_progress_tell_the_same_start() -> None:
    line = {"event": "attempt_start", "attempt": 2, "time": at(7.5).timestamp(), "startup": STARTUP}
    by_line = work_of(2, [line], ())
    seconds = {f"{stage}_seconds": seconds for stage, seconds in STARTUP.items()}
    progress = Progress(2, 1, 10, 0, "training", process_time=at(5).timestamp(), **seconds)
    by_progress = work_of(2, [], (), AttemptObservation(2, True, False, progress=progress))
    for work in (by_line, by_progress):
        assert (work.process_time, work.startup) == (at(5).timestamp(), STARTUP)
    torn = {**line, "startup": {"import": "soon"}}
    assert work_of(2, [torn], ()).process_time is None


def test_status_rest_metrics_and_the_command_show_one_figure() -> None:
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=Spec(command=["x"]))
    job.status = Status(attempt=2, attempts=[lost(), next_one(first_step_at=None)], first_started_at=NOON)
    seconds = {f"{stage}_seconds": seconds for stage, seconds in STARTUP.items()}
    progress = Progress(
        2,
        41,
        100,
        40,
        "training",
        resumed_step=40,
        first_step=41,
        first_step_time=at(9).timestamp(),
        process_time=at(5).timestamp(),
        updated=at(10).timestamp(),
        **seconds,
    )
    seen = AttemptObservation(2, exists=True, gone=False, progress=progress, started_at=at(4))
    Books(job.status, at(10)).take_progress(job.status.attempts[1], seen, ())

    record = job.status.attempts[1]
    assert record.recovery_seconds == 9.0
    assert record.breakdown == breakdown(lost(), next_one(), told())
    document = account(job, [], [])
    assert document.attempts[1].breakdown == record.breakdown
    assert document.totals.recovery_seconds == [9.0]
    metrics = Metrics()
    metrics.jobs[job.key] = JobFigures.of(job)
    labels = {"namespace": "default", "job": "gpt"}
    assert sample(metrics, "holdfast_job_recovery_seconds", labels) == 9.0
    assert record.breakdown is not None
    for stage, seconds in record.breakdown.stages().items():
        told_of = sample(metrics, "holdfast_job_recovery_stage_seconds", {**labels, "stage": stage})
        assert told_of == seconds, stage
    attempts = document.model_dump(mode="json", by_alias=True)["attempts"]
    row = [str(column.cells[1]) for column in start_columns(attempts)]
    assert row[:12] == [
        "2", "9.0s", "1.00s", "1.00s", "0.50s", "0.50s", "2.00s", "1.00s", "0.25s", "0.50s", "0.75s", "1.50s",
    ]  # fmt: skip


def test_of_an_attempt_that_the_status_has_forgotten_the_trainer_s_stages_are_left() -> None:
    job = TrainingJob(metadata=Metadata(name="gpt"), spec=Spec(command=["x"]))
    lines = [
        {"event": "attempt_start", "attempt": 1, "time": at(7.5).timestamp(), "startup": STARTUP},
        {"event": "first_step", "attempt": 1, "time": at(9).timestamp(), "step": 1, "seconds": 1.0},
    ]
    assert account(job, lines, []).attempts[0].breakdown == Breakdown(
        import_seconds=1.0,
        rendezvous_seconds=0.25,
        build_seconds=0.5,
        load_seconds=0.75,
        first_step_seconds=1.5,
    )


@pytest.mark.parametrize("ahead", [-600.0, 600.0])
def test_times_that_a_node_tells_stay_within_what_the_controller_has_seen(ahead: float) -> None:
    """The kubelet's too, of which nobody knows how wrong its clock is."""
    status = Status(attempt=1, attempts=[AttemptRecord(number=1, opened_at=NOON)])
    [record] = status.attempts
    progress = Progress(
        1, 7, 10, 5, "training", resumed_step=0, first_step=1, first_step_time=at(9 + ahead).timestamp(),
        useful_seconds=5.0, updated=at(19 + ahead).timestamp(),
    )  # fmt: skip
    end = ReplicaObservation(0, ReplicaState.FAILED, disrupted=True, ended_at=at(19 + ahead).timestamp())
    seen = AttemptObservation(
        1, exists=True, gone=True, replicas=(end,), progress=progress, started_at=at(4 + ahead)
    )
    Books(status, at(10)).take_progress(record, seen, ())
    Books(status, at(20)).close(record, Incident(Verdict.DISRUPTED, "evicted"), seen, (), ())
    for moment in (record.started_at, record.first_step_at, record.last_sign_at, record.ended_at):
        assert moment is not None
        assert NOON <= moment <= at(20)
    assert status.progress is not None
    assert status.progress.updated_at is not None
    assert NOON <= status.progress.updated_at <= at(20)
    assert status.goodput is not None
    assert 0.2 < status.goodput <= 1
