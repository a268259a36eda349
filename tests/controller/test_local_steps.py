"""What a verdict and an account need of the steps is read without all the others."""

from __future__ import annotations

import asyncio
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest
from local_world import local_engine, waiting_job

from holdfast_controller.api.ledger import account
from holdfast_controller.cluster import NotReady
from holdfast_controller.local.launch import run_directory
from holdfast_trainer.contract import RunDir, line_of

STARTED = 1_700_000_000.0
STEPS = 50_000
"""Some 8 MB."""


def line(step: int, **told: float) -> bytes:
    return line_of(
        {"step": step, "time": STARTED + step, "loss": 1 / step, "loss_hex": (1 / step).hex()} | told
    )


def train(run: RunDir, attempt: int, first: int, last: int) -> None:
    run.attempt(attempt).mkdir(parents=True)
    start = {"event": "attempt_start", "time": STARTED + first, "attempt": attempt, "resumed_step": first - 1}
    run.ledger(attempt).write_bytes(line_of(start))
    with run.steps(attempt).open("wb") as file:
        file.writelines(line(step, seconds=1.0) for step in range(first, last + 1))
        file.write(line_of({"step": last, "time": STARTED + last, "val_loss": 0.5}))


def test_a_long_run_is_accounted_for_from_the_ends_of_its_steps(tmp_path: Path) -> None:
    """An attempt of weeks has written gigabytes; where all were read, its end could not be judged."""
    job, engine = waiting_job(), local_engine(tmp_path)
    run = run_directory(tmp_path, job)
    train(run, 1, 1, STEPS)
    train(run, 2, STEPS - 5, STEPS + 9)
    with run.steps(2).open("ab") as file:
        file.write(b'{"step": ')  # a kill tore it

    tracemalloc.start()
    try:
        ends = asyncio.run(engine.ends_of_steps(job))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 << 20

    every, ledger = asyncio.run(engine.steps(job)), asyncio.run(engine.ledger(job))
    assert [one for one in ends if one["attempt"] == 2] == [one for one in every if one["attempt"] == 2]
    assert all(one in every for one in (ends[0], *ends[-300:]))
    now = datetime.now(UTC)
    told = account(job, ledger, ends, now)
    assert told == account(job, ledger, every, now)
    assert [(one.first_step, one.last_step, one.lost_steps) for one in told.attempts] == [
        (1, STEPS, 6),
        (STEPS - 5, STEPS + 9, None),
    ]


def test_more_steps_than_have_room_are_told_to_lie_in_their_files(tmp_path: Path) -> None:
    job = waiting_job()
    run = run_directory(tmp_path, job)
    train(run, 1, 1, 10)
    with run.steps(1).open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(NotReady, match=r"more than 128 MiB of steps.*/attempts/\*/steps\.jsonl"):
        asyncio.run(local_engine(tmp_path).steps(job))
