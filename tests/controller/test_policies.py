"""The decisions that are pure arithmetic: budgets, back-off, lost work, peers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_controller.cluster import AttemptObservation, RankExit, ReplicaObservation, ReplicaState
from holdfast_controller.jobs import (
    AttemptRecord,
    Capacity,
    JobProgress,
    Phase,
    Retries,
    Spec,
    Status,
    Verdict,
)
from holdfast_controller.policy.backoff import backoff
from holdfast_controller.policy.budget import spend
from holdfast_controller.policy.conditions import conditions_of
from holdfast_controller.policy.launchers import launcher_of
from holdfast_controller.policy.lost_work import Work, goodput, lost_steps, work_of
from holdfast_controller.policy.overruled import overruled_notes
from holdfast_controller.policy.peers import kill_at
from holdfast_controller.policy.repeats import (
    failures_in_a_row,
    next_capacity,
    same_failure,
    standstill,
    times_in_a_row,
)
from holdfast_trainer.contract import Progress, Termination

NOW = datetime(2026, 3, 1, tzinfo=UTC)

# ------------------------------------------------------------------------ budget

BUDGET = [
    # verdict, failures and disruptions before, limits -> after, again
    (Verdict.FAILED, 0, 0, Retries(failures=1), (1, 0, True)),
    (Verdict.FAILED, 1, 0, Retries(failures=1), (2, 0, False)),
    (Verdict.OUT_OF_MEMORY, 3, 9, Retries(), (4, 9, False)),
    (Verdict.HUNG, 2, 9, Retries(), (3, 9, True)),
    (Verdict.CONFIG_ERROR, 0, 0, Retries(failures=100), (1, 0, False)),
    (Verdict.DISRUPTED, 3, 500, Retries(failures=0), (3, 501, True)),
    (Verdict.DISRUPTED, 0, 2, Retries(disruptions=2), (0, 3, False)),
    (Verdict.DISRUPTED, 0, 1, Retries(disruptions=2), (0, 2, True)),
    (Verdict.LOST_NODE, 3, 500, Retries(failures=0), (3, 501, True)),
    (Verdict.LOST_NODE, 0, 2, Retries(disruptions=2), (0, 3, False)),
    (Verdict.UNSCHEDULABLE, 0, 0, Retries(failures=0, disruptions=0), (0, 0, True)),
    (Verdict.IMAGE_PULL, 0, 0, Retries(failures=0, disruptions=0), (0, 0, True)),
    (Verdict.STORAGE_UNAVAILABLE, 1, 2, Retries(failures=1, disruptions=2), (1, 2, True)),
    (Verdict.SUSPENDED, 1, 2, Retries(failures=0), (1, 2, True)),
    (Verdict.FINISHED, 1, 2, Retries(), (1, 2, False)),
]


@pytest.mark.parametrize(("verdict", "failures", "disruptions", "limits", "after"), BUDGET)
def test_budgets_are_kept_apart(
    verdict: Verdict, failures: int, disruptions: int, limits: Retries, after: tuple[int, int, bool]
) -> None:
    spent = spend(verdict, failures, disruptions, limits)
    assert (spent.failures, spent.disruptions, spent.again) == after
    if not spent.again and verdict is not Verdict.FINISHED:
        assert spent.reason


# ----------------------------------------------------------------------- backoff


@pytest.mark.parametrize(("failures", "longest"), [(1, 1), (2, 2), (3, 4), (9, 256), (10, 300), (400, 300)])
def test_a_failing_job_waits_ever_longer(failures: int, longest: float) -> None:
    for seed in ("a", "b", "c"):
        wait = backoff(Verdict.FAILED, failures, seed)
        assert 0.75 * longest <= wait <= longest
        assert wait == backoff(Verdict.FAILED, failures, seed)
    assert backoff(Verdict.HUNG, failures, "a") != backoff(Verdict.HUNG, failures, "b")


def test_a_disruption_waits_for_nothing() -> None:
    for verdict in (Verdict.DISRUPTED, Verdict.LOST_NODE):
        assert backoff(verdict, 0, "a") == 0


def test_what_is_killed_right_after_its_start_comes_back_ever_later() -> None:
    """Such as by a daemon that frees memory with SIGKILL: the oldest job, for ever started at once and
    killed, had a machine's slots, and nothing that was behind it in line ever began."""

    def taken(seconds: float, first_step: float | None = None) -> AttemptRecord:
        return AttemptRecord(
            number=1,
            verdict=Verdict.DISRUPTED,
            started_at=NOW,
            first_step_at=None if first_step is None else NOW + timedelta(seconds=first_step),
            ended_at=NOW + timedelta(seconds=seconds),
        )

    for short, longest in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 4), (20, 300)):
        times = times_in_a_row([taken(3)] * short, Verdict.DISRUPTED)
        assert 0.75 * longest <= backoff(Verdict.DISRUPTED, times, "a") <= longest
    unstarted = taken(90).model_copy(update={"started_at": None})
    assert times_in_a_row([unstarted] * 3, Verdict.DISRUPTED) == 3
    for long in (taken(61), taken(9, first_step=4), taken(3).model_copy(update={"verdict": Verdict.FAILED})):
        assert times_in_a_row([*[taken(3)] * 9, long, taken(3)], Verdict.DISRUPTED) == 1
        assert times_in_a_row([*[taken(3)] * 9, long], Verdict.DISRUPTED) == 0


def test_what_made_progress_before_it_failed_begins_the_back_off_anew() -> None:
    failed = records(*((Verdict.FAILED, 40, "x"),) * 3)
    assert failures_in_a_row(failed) == 3
    assert failures_in_a_row([*failed, *records((Verdict.DISRUPTED, 40))]) == 3
    progressed = failed[1].model_copy(update={"checkpoints": 2})
    assert failures_in_a_row([failed[0], progressed, failed[2]]) == 2
    assert failures_in_a_row([*failed, progressed]) == 1
    assert failures_in_a_row([]) == 1


def test_a_gang_that_found_no_place_comes_back_later_each_time() -> None:
    waits = [backoff(Verdict.UNSCHEDULABLE, times, "a") for times in (1, 2, 3, 9)]
    assert [
        low <= wait <= high
        for wait, low, high in zip(waits, (11, 22, 45, 225), (15, 30, 60, 300), strict=True)
    ]
    assert waits == sorted(waits)
    attempts = records((Verdict.FAILED, 3, "x"), (Verdict.UNSCHEDULABLE, None), (Verdict.IMAGE_PULL, None))
    assert times_in_a_row(attempts, attempts[-1].verdict or Verdict.FAILED) == 2


# ----------------------------------------------------------------------- repeats


def records(*told: tuple[Verdict, int | None, str] | tuple[Verdict, int | None]) -> list[AttemptRecord]:
    """Attempts 1, 2 ... of (verdict, last step, reason); what was done is durable."""
    return [
        AttemptRecord(
            number=number, verdict=one[0], last_step=one[1], durable_step=one[1], reason=(*one, "")[2]
        )
        for number, one in enumerate(told, 1)
    ]


NAN = "replica 0: loss is NaN"
ECC = "replica 0: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered ... Compile with"
ACCESS = "replica 0: torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
KILLED = "replica 0: rank 0 ended by SIGKILL"
REPEATS = [
    # of the newest attempt and those before it: is another try of no use?
    (records((Verdict.FAILED, 40, NAN)), False),
    (records((Verdict.FAILED, 40, NAN), (Verdict.FAILED, 40, NAN)), True),
    (records((Verdict.FAILED, 40, NAN), (Verdict.DISRUPTED, 30), (Verdict.FAILED, 40, NAN)), True),
    (records((Verdict.FAILED, 40, NAN), (Verdict.SUSPENDED, 30), (Verdict.FAILED, 40, NAN)), True),
    (records((Verdict.FAILED, 40, NAN), (Verdict.UNSCHEDULABLE, None), (Verdict.FAILED, 40, NAN)), True),
    (records((Verdict.OUT_OF_MEMORY, 7, "x"), (Verdict.OUT_OF_MEMORY, 7, "x")), True),
    # All ranks meet it, and now one, now another is the first: as of a last batch that is too small.
    (records((Verdict.FAILED, 40, NAN), (Verdict.FAILED, 40, NAN.replace("replica 0", "replica 1"))), True),
    (records((Verdict.FAILED, 40, KILLED), (Verdict.FAILED, 40, KILLED.replace("0", "1"))), False),
    (records((Verdict.FAILED, 40, NAN), (Verdict.FAILED, 41, NAN)), False),
    (records((Verdict.FAILED, 40, NAN), (Verdict.FAILED, 40, "replica 1: no such file")), False),
    (records((Verdict.FAILED, 40, NAN), (Verdict.FAILED, 39, NAN), (Verdict.FAILED, 40, NAN)), False),
    (records((Verdict.FAILED, 0, NAN), (Verdict.FAILED, 0, NAN)), False),  # a service may come back
    (records((Verdict.FAILED, None, "x"), (Verdict.FAILED, None, "x")), False),  # not our trainer
    (records((Verdict.HUNG, 40, "x"), (Verdict.HUNG, 40, "x")), False),
    # Twice on one GPU, at the first step after a resume.
    (records((Verdict.FAILED, 40, ECC), (Verdict.FAILED, 40, ECC)), False),
    (records((Verdict.FAILED, 40, ACCESS), (Verdict.FAILED, 40, ACCESS)), True),
    (records((Verdict.FAILED, 40, NAN), (Verdict.FAILED, 40, NAN), (Verdict.DISRUPTED, 40)), False),
]


@pytest.mark.parametrize(("attempts", "hopeless"), REPEATS)
def test_what_fails_twice_at_one_step_in_one_way_is_not_tried_a_third_time(
    attempts: list[AttemptRecord], hopeless: bool
) -> None:
    said = same_failure(attempts, None)
    assert bool(said) is hopeless
    if hopeless:
        assert f"ended after step {attempts[-1].last_step} in the same way" in said
        assert f"look at what step {(attempts[-1].last_step or 0) + 1} computes" in said
        assert same_failure(attempts, 1000) == said


def test_what_fails_after_the_last_step_is_looked_for_there() -> None:
    """A last save that failed twice: people were sent to look at step 61 of 60."""
    unsaved = "replica 0: trained to step 60, but it is not durable"
    said = same_failure(records((Verdict.FAILED, 60, unsaved), (Verdict.FAILED, 60, unsaved)), 60)
    assert "look at what comes after them, such as the last save" in said
    assert "step 61" not in said


@pytest.mark.parametrize(
    ("durable", "said"),
    [
        ([40, 40], ""),
        ([40, 40, 40], "disrupted 3 times in a row with no step after 40 made durable"),
        ([20, 40, 40, 40, 40], "disrupted 4 times in a row with no step after 40 made durable"),
        ([0, 0, 0], "disrupted 3 times in a row with no step after 0 made durable"),
        ([None, None, None], ""),
        ([40, 40, 41], ""),
        ([38, 39, 40], ""),
    ],
)
def test_disruptions_that_come_faster_than_durable_steps_are_said(
    durable: list[int | None], said: str
) -> None:
    attempts = records(*((Verdict.DISRUPTED, step) for step in durable))
    assert standstill(attempts).startswith(said)
    assert bool(standstill(attempts)) is bool(said)
    forgotten = [record.model_copy(update={"number": record.number + 1}) for record in attempts]
    all_alike = said and len(set(durable)) == 1
    assert standstill(forgotten).startswith(
        said.replace("disrupted", "disrupted at least") if all_alike else said
    )
    if said:  # the oldest is the last that did a step, and those that came next are forgotten
        apart = [attempts[0], *(one.model_copy(update={"number": one.number + 9}) for one in attempts[1:])]
        assert standstill(apart).startswith(said.replace("disrupted", "disrupted at least"))
    finished = [*attempts, *records((Verdict.FAILED, 40, NAN))]
    assert standstill(finished) == ""
    elsewhere = Capacity.ON_DEMAND_FIRST if said else None
    assert next_capacity(Capacity.SPOT_FIRST, attempts) is elsewhere
    assert next_capacity(Capacity.SPOT_FIRST, finished) is None
    for asked in set(Capacity) - {Capacity.SPOT_FIRST}:
        assert next_capacity(asked, attempts) is None, "what was asked for is what is given"


# -------------------------------------------------------------------- conditions


def test_a_condition_is_as_old_as_its_status_whatever_its_reason_is_by_now() -> None:
    status, later = Status(phase=Phase.RUNNING), NOW + timedelta(seconds=9)
    status.conditions = conditions_of(status, "Unreported", NOW)
    status.conditions = conditions_of(status, "Training", later)
    known = {one.type: (one.reason, one.last_transition_time) for one in status.conditions}
    assert known == {"Admitted": ("Training", NOW), "Running": ("Training", NOW)}
    status.phase = Phase.RECOVERING
    ended = {one.type: one.last_transition_time for one in conditions_of(status, "AttemptEnding", later)}
    assert ended == {"Admitted": NOW, "Running": later}


# --------------------------------------------------------------------- lost work

LEDGER = [
    {"attempt": 1, "event": "attempt_start", "resumed_step": 0},
    {"attempt": 1, "event": "first_step", "time": 100.0, "step": 1},
    {"attempt": 1, "event": "checkpoint", "step": 40},
    {"attempt": 2, "event": "attempt_start", "resumed_step": 40},
    {"attempt": 2, "event": "checkpoint", "step": 60},
    {"attempt": 2, "event": "stop", "step": 75, "durable_step": 75},
]
STEPS = [{"attempt": 1, "step": n, "seconds": 1.0} for n in range(1, 58)] + [
    {"attempt": 2, "step": n, "seconds": 2.0} for n in range(41, 76)
]


def test_what_an_attempt_without_notice_lost() -> None:
    work = work_of(1, LEDGER, STEPS)
    assert (work.resumed_step, work.last_step, work.durable_step, work.first_step_at) == (0, 57, 40, 100.0)
    assert lost_steps(work, Verdict.DISRUPTED) == 17


def test_a_step_that_was_validated_and_had_not_ended_is_not_one_that_was_done() -> None:
    validated = {"attempt": 1, "step": 58, "val_loss": 2.5, "val_loss_hex": (2.5).hex()}
    assert lost_steps(work_of(1, LEDGER, [*STEPS, validated]), Verdict.DISRUPTED) == 17


def test_what_an_attempt_with_notice_lost() -> None:
    work = work_of(2, LEDGER, STEPS)
    assert (work.resumed_step, work.last_step, work.durable_step) == (40, 75, 75)
    assert lost_steps(work, Verdict.DISRUPTED) == 0


def test_the_next_attempt_knows_best() -> None:
    work = work_of(1, LEDGER, STEPS)
    assert lost_steps(work, Verdict.DISRUPTED, next_resumed=50) == 7  # one more became durable
    assert lost_steps(work, Verdict.DISRUPTED, next_resumed=20) == 37  # the newest was damaged


def test_an_attempt_that_said_nothing_is_unknown_not_zero() -> None:
    assert lost_steps(work_of(3, LEDGER, STEPS), Verdict.FAILED) is None
    assert work_of(3, LEDGER, STEPS).durable_step is None


def test_progress_and_terminations_count_as_well() -> None:
    replica = ReplicaObservation(0, ReplicaState.FAILED, termination=Termination("failed", 90, 80))
    progress = Progress(attempt=3, step=95, total_steps=100, durable_step=60, phase="training")
    seen = AttemptObservation(3, True, True, (replica,), progress=progress)
    work = work_of(3, [], [], seen)
    assert (work.last_step, work.durable_step) == (95, 80)


def test_the_last_word_of_rank_0_tells_all_that_lines_would() -> None:
    word = Progress(
        4, 90, 100, 80, "stopping",
        world_size=2, resumed_step=70, first_step=71, first_step_time=5.0, checkpoints=1,
        useful_seconds=91.0, durable_seconds=81.0, digest="d80", updated=9.0,
    )  # fmt: skip
    replicas = (
        ReplicaObservation(0, ReplicaState.FAILED, termination=Termination("failed", 90, 80, progress=word)),
        ReplicaObservation(1, ReplicaState.FAILED, termination=Termination("failed", 91, 80)),
    )
    stale = Progress(4, 85, 100, 70, "training", durable_seconds=71.0, updated=8.0)
    work = work_of(4, [], [], AttemptObservation(4, True, True, replicas, progress=stale))
    assert work == Work(
        resumed_step=70,
        last_step=91,
        durable_step=80,
        first_step_at=5.0,
        first_step=71,
        world_size=2,
        checkpoints=1,
        outcome="failed",
        digest="d80",
        durable_seconds=81.0,
        last_sign=9.0,
    )


def test_what_a_dead_controller_had_heard_is_in_the_status() -> None:
    known = JobProgress(
        attempt=4, step=85, durable_step=70, durable_seconds=71.0, updated_at=datetime.fromtimestamp(8, UTC)
    )
    gone = AttemptObservation(4, False, True)
    work = work_of(4, [], [], gone, known)
    assert (work.last_step, work.durable_step, work.durable_seconds, work.last_sign) == (85, 70, 71.0, 8.0)
    assert work.checkpoints is None, "not known, and so not 0"
    assert work_of(5, [], [], replace(gone, attempt=5), known).last_step is None, "of the attempt before"


def test_useful_seconds_are_those_up_to_the_newest_durable_step() -> None:
    lines = [
        {"attempt": 2, "event": "attempt_start", "resumed_step": 40, "useful_seconds": 40.0},
        {"attempt": 2, "event": "checkpoint", "step": 60, "useful_seconds": 80.0, "digest": "d60"},
    ]
    assert work_of(2, lines[:1], STEPS).durable_seconds == 40.0
    work = work_of(2, lines, STEPS)
    assert (work.durable_step, work.durable_seconds, work.digest) == (60, 80.0, "d60")
    unknown = [*lines, {"attempt": 2, "event": "checkpoint", "step": 70, "useful_seconds": None}]
    assert work_of(2, unknown, STEPS).durable_seconds is None


@given(st.none() | st.floats(0, 1e9), st.floats(-1, 1e6))
def test_goodput_is_a_share(seconds: float | None, wall: float) -> None:
    value = goodput(seconds, wall)
    assert value is None if seconds is None or wall <= 0 else 0 <= (value or 0) <= 1


# ------------------------------------------------------------------------- peers


def replica(index: int, state: str = "Running", **facts: object) -> ReplicaObservation:
    return ReplicaObservation(index, ReplicaState(state), **facts)  # type: ignore[arg-type]


def ends(*replicas: ReplicaObservation) -> float | None:
    seen = AttemptObservation(1, True, False, replicas)
    return kill_at(seen, 2, grace_seconds=30, known_at=10, settle_seconds=1)


NOTICED = Termination("interrupted", 5, 5)


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        pytest.param((replica(0), replica(1)), None, id="all run"),
        pytest.param((replica(0, "Pending"), replica(1, "Pending")), None, id="none is up yet"),
        pytest.param((replica(0), replica(1, "Succeeded", exit_code=0, ended_at=9)), None, id="one is done"),
        pytest.param((replica(0), replica(1, ranks=(RankExit(2, 0, None, 9),))), None, id="one rank is done"),
        pytest.param(
            (replica(0), replica(1, "Failed", disrupted=True, ended_at=10)), 11, id="one is lost: settle"
        ),
        pytest.param(
            (replica(0), replica(1, ranks=(RankExit(1, 1, None, 10),))), 11, id="a rank failed: settle"
        ),
        pytest.param(
            (replica(0), replica(1, "Failed", ended_at=12), replica(2, "Failed", ended_at=10)),
            11,
            id="one after the other is lost: settle after the first",
        ),
        pytest.param(
            (replica(0, ranks=(RankExit(0, 0, None, 9),), termination=NOTICED), replica(1)),
            40,
            id="notice: a rank has saved, the others save",
        ),
        pytest.param(
            (replica(0), replica(1, "Failed", exit_code=1, ended_at=10, termination=NOTICED)),
            40,
            id="notice: the others save",
        ),
        pytest.param(
            (
                replica(0, ranks=(RankExit(0, 0, None, 11), RankExit(1, 0, None, 12))),
                replica(1, "Failed", exit_code=1, ended_at=10, termination=NOTICED),
            ),
            12.3,
            id="notice: all have saved, torchrun alone lingers",
        ),
        pytest.param(
            (
                replica(0, ranks=(RankExit(0, 0, None, 11), RankExit(1, 0, None, 12))),
                replica(1),
                replica(2, "Failed", exit_code=1, ended_at=10, termination=NOTICED),
            ),
            40,
            id="notice: all of one have saved, those of another have not",
        ),
        pytest.param(
            (replica(0, "Failed", ended_at=10), replica(1, "Failed", ended_at=12)), 13, id="strays remain"
        ),
    ],
)
def test_when_the_rest_of_an_attempt_is_ended(
    replicas: tuple[ReplicaObservation, ...], expected: float | None
) -> None:
    assert ends(*replicas) == (None if expected is None else pytest.approx(expected))


# ------------------------------------------------------- commands that start ranks


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["python", "train.py"], None),
        (["python", "-u", "-m", "train", "torchrun"], None),
        (["python"], None),
        (["./train"], None),
        (["accelerate", "config"], None),
        (["torchrun", "--nproc-per-node=2", "train.py"], "torchrun"),
        (["/opt/venv/bin/torchrun", "train.py"], "torchrun"),
        (["deepspeed", "train.py"], "deepspeed"),
        (["accelerate", "launch", "train.py"], "accelerate launch"),
        (["python", "-m", "torch.distributed.run", "train.py"], "python -m torch.distributed.run"),
        (["python3", "-u", "-m", "torch.distributed.launch", "a.py"], "python3 -m torch.distributed.launch"),
    ],
)
def test_what_starts_ranks_of_its_own(command: list[str], launcher: str | None) -> None:
    assert launcher_of(command) == launcher


# ------------------------------------------------------- settings that another wins over


@pytest.mark.parametrize(
    ("command", "told", "saves", "notes"),
    [
        (
            "python -m holdfast_trainer train",
            {"every": 500},
            {},
            ["spec.config.checkpoint.every is 500, and"],
        ),
        (
            "python -m holdfast_trainer train",
            {"every": "90s", "keep": 10},
            {"every": "90s"},
            ["spec.config.checkpoint.keep is 10, and has no effect: spec.checkpoint.keep, which is 3, wins"],
        ),
        (
            "python -m holdfast_trainer train checkpoint.keep=9",
            {"keep": 4},
            {"keep": 4},
            ["checkpoint.keep in spec.command is 9, and has no effect: spec.checkpoint.keep, which is 4,"],
        ),
        ("python -m holdfast_trainer train", {"every": 500, "keep": 4}, {"every": 500, "keep": 4}, []),
        ("python -m holdfast_trainer train", {"every": None, "keep_best": 2}, {}, []),
        ("python -m holdfast_trainer train", None, {}, []),
        ("python train.py", {"every": 500, "keep": "all"}, {}, []),
    ],
)
def test_what_the_config_says_of_checkpoints_where_the_spec_wins(
    command: str, told: object, saves: dict[str, object], notes: list[str]
) -> None:
    spec = Spec.model_validate(
        {"command": command.split(), "config": {"checkpoint": told}, "checkpoint": saves}
    )
    found = overruled_notes(spec)
    assert len(found) == len(notes)
    assert all(note.startswith(begin) for note, begin in zip(found, notes, strict=True)), found
