"""A user submits a job, and then everything that can be killed is killed, at random instants.

Ranks, torchrun agents, supervisors, the controller and all of it at once get SIGKILL while a two-rank
DDP training starts, steps, saves and validates. What must hold afterwards: the job succeeded, no kill
was counted as the job's own failure, every loss that was ever computed is the untouched twin's to the
bit, and so is every byte of the final state of both ranks.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from one_machine import Platform, assert_same_run, document, of_attempt, platform, write_tokens
from processes import Processes
from waiting import wait_until

from holdfast_controller.jobs import Status
from holdfast_trainer.contract import ENV_ATTEMPT

SEED = int(os.environ.get("KILL_SEED", "20261121"))
"""Printed with a failure; set KILL_SEED to see the same choices again."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "data")


# ------------------------------------------------------------------- the kills


def strike(target: str, here: Platform, processes: Processes, chance: random.Random) -> set[str] | None:
    """Kill with SIGKILL what `target` names; the attempts that it was of.

    None where nothing of the kind runs just now.
    """
    if target == "controller":
        here.kill()
        here.up()
        return set()
    parts = of_attempt(processes)
    if target == "everything":
        here.kill()
        victims = parts["all"]
    else:
        victims = [chance.choice(parts[target])] if parts[target] else []
    # Asked before the first kill: a process that ends with its parent has no environment any more.
    attempts: dict[psutil.Process, str] = {}
    for victim in victims:
        with suppress(psutil.NoSuchProcess, KeyError):
            attempts[victim] = victim.environ()[ENV_ATTEMPT]
    hit = set()
    for victim, attempt in attempts.items():
        with suppress(psutil.NoSuchProcess):
            victim.kill()
            hit.add(attempt)
    if target == "everything":
        here.up()
    return hit or None


def reach(status: Status) -> float:
    """Seconds within which a kill may come: twice those to the first step. On a busy machine else no attempt
    would ever get there, and each would wait longer than the one before."""
    started, stepped = status.attempts[0].started_at, status.attempts[0].first_step_at
    assert started is not None
    assert stepped is not None
    return max(6.0, 2 * (stepped - started).total_seconds())


def torment(
    here: Platform,
    name: str,
    steps: int,
    kills: int,
    processes: Processes,
    chance: random.Random,
    within: float,
) -> set[str]:
    """Strike a job of `steps` so many times, each at a random instant of the attempt that runs then, `within`
    so many seconds of the one before.

    Returns the attempts hit.

    On a busy machine several may hit one attempt before the controller can start the next.
    """
    targets = ["rank", "agent", "supervisor", "controller", "everything"]
    struck: list[str] = []
    hit: set[str] = set()
    while len(struck) < kills:
        # Uniform over start-up and the first seconds of stepping; sooner where the job would else finish:
        # all kills come in its first half.
        instant = time.monotonic() + chance.uniform(0, within)
        bound = steps // 2 * (len(struck) + 1) // (kills + 1)

        def now(instant: float = instant, bound: int = bound) -> bool:
            status = here.job(name).status
            assert not status.phase.final, f"{status.phase} after {struck}, before {kills} kills"
            return time.monotonic() > instant or here.steps(name) >= bound

        wait_until(now, "the next instant")
        target = targets[len(struck) % len(targets)]
        attempts = strike(target, here, processes, chance)
        if attempts is not None:
            struck.append(target)
            hit |= attempts
    return hit


@pytest.mark.parametrize(
    ("steps", "kills", "layout", "train"),
    [
        pytest.param(480, 20, (2, 1), {}, id="20-kills"),
        pytest.param(
            200,
            5,
            (1, 2),
            {"micro_batch": 2, "dropout": 0.1},
            id="other-layout-with-accumulation-and-dropout",
        ),
    ],
)
def test_whatever_is_killed_the_run_is_the_untouched_one(
    tmp_path: Path,
    data: Path,
    processes: Processes,
    steps: int,
    kills: int,
    layout: tuple[int, int],
    train: dict[str, Any],
) -> None:
    chance = random.Random(SEED)
    print(f"KILL_SEED={SEED}")
    with platform(tmp_path / "holdfast", processes) as here:
        here.ask(lambda c: c.submit(document("twin", data, steps=steps, layout=(2, 1), **train), "default"))
        twin = here.until_done("twin", 1500)

        here.ask(lambda c: c.submit(document("victim", data, steps=steps, layout=layout, **train), "default"))
        hit = torment(here, "victim", steps, kills, processes, chance, reach(twin.status))
        done = here.until_done("victim", 1500)

        status = json.loads(done.status.model_dump_json())
        assert done.status.failures == 0, f"a kill was taken for the job's own fault: {status['attempts']}"
        # A controller alone may be killed without any harm; everything else ends the attempt it hits.
        assert done.status.disruptions >= len(hit) * 0.5
        assert_same_run(here, "victim", "twin")
        wait_until(lambda: not of_attempt(processes)["all"], "the last attempt's processes to end")
