"""Faults of every kind, in random order, over a few long jobs: each costs one incident and no bit.

A fault strikes while the newest attempt does steps, and the next one waits until the job does steps again:
so the budgets must add up exactly, fault by fault. RANDOM_FAULTS sets how many (the suite has a short round
of them), FAULT_SEED which.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from one_machine import Platform, assert_same_run, document, of_attempt, platform, write_tokens
from processes import Processes
from waiting import wait_until

from holdfast_controller.jobs import TrainingJob, Verdict

FAULTS = int(os.environ.get("RANDOM_FAULTS", "3"))
SEED = int(os.environ.get("FAULT_SEED", "20261121"))
A_JOB = 25
"""Faults that one job gets."""
HANG_SECONDS = 15
STEPS, STEPS_A_FAULT = 40, 25
"""What a job has to do: more than it does before it is struck as often as it will be."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 + 60 * FAULTS)]


Strike = Callable[[Platform, str, Processes], None]


def signalled(part: str, number: signal.Signals) -> Strike:
    """A signal from outside, to one process of this part of the attempt."""

    def strike(_: Platform, __: str, processes: Processes) -> None:
        for process in of_attempt(processes)[part][-1:]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return strike


def all_stopped(here: Platform, name: str, processes: Processes) -> None:
    """Nobody in the attempt can tell of it: the controller sees it, once it has heard of the attempt."""

    def heard() -> bool:
        status = here.job(name).status
        told = status.progress
        return told is not None and told.attempt == status.attempt and told.step > 0

    wait_until(heard, "the controller to hear of the attempt")
    for process in of_attempt(processes)["rank"]:
        process.send_signal(signal.SIGSTOP)


def drilled(kind: str) -> Strike:
    def strike(here: Platform, name: str, _: Processes) -> None:
        here.ask(lambda client: client.drill("default", name, None, kind))

    return strike


def controller_killed(here: Platform, _: str, __: Processes) -> None:
    here.kill()
    here.up()


def everything_killed(here: Platform, _: str, processes: Processes) -> None:
    here.kill()
    for process in of_attempt(processes)["all"]:
        with suppress(psutil.NoSuchProcess):  # it goes with the one killed before
            process.kill()
    here.up()


STRIKES: dict[str, tuple[Strike, Verdict | None]] = {
    "every rank stopped": (all_stopped, Verdict.HUNG),
    "rank killed": (signalled("rank", signal.SIGKILL), Verdict.DISRUPTED),
    "notice": (drilled("notice"), Verdict.DISRUPTED),
    "rank crashed": (signalled("rank", signal.SIGSEGV), Verdict.FAILED),
    "agent killed": (signalled("agent", signal.SIGKILL), Verdict.DISRUPTED),
    "supervisor killed": (signalled("supervisor", signal.SIGKILL), Verdict.DISRUPTED),
    "controller killed": (controller_killed, None),
    "everything killed": (everything_killed, Verdict.DISRUPTED),
    "one rank stopped": (drilled("freeze"), Verdict.HUNG),
    "replica killed": (drilled("kill"), Verdict.DISRUPTED),
}
"""What is done, and what it must be taken for; None: nobody must notice."""


def steps_again(here: Platform, name: str, attempt: int, verdicts: list[Verdict]) -> TrainingJob:
    """Wait until `attempt` has done a step that none before it had done."""

    def done() -> TrainingJob | None:
        job = here.job(name)
        status = job.status
        for record in status.attempts[:-1]:
            assert record.number <= len(verdicts), f"attempt {record.number} met no fault: {record.reason}"
            assert record.verdict is verdicts[record.number - 1], (record.number, record.reason)
        assert not status.phase.final, f"{status.phase} after {len(verdicts)} incidents: {status.message}"
        before = max((record.last_step or 0 for record in status.attempts[:-1]), default=0)
        new = status.attempt == attempt and here.steps(name, attempt) > before
        return job if new else None

    job = wait_until(done, f"attempt {attempt} of {name} to train", 900)
    assert job is not None
    return job


def test_faults_in_a_row_cost_an_incident_each_and_no_bit(tmp_path: Path, processes: Processes) -> None:
    data = write_tokens(tmp_path / "data")
    chance = random.Random(SEED)
    print(f"FAULT_SEED={SEED}")
    deck: list[str] = []
    with platform(tmp_path / "holdfast", processes) as here:
        for number, first in enumerate(range(0, FAULTS, A_JOB)):
            faults = min(A_JOB, FAULTS - first)
            steps = STEPS + STEPS_A_FAULT * faults
            layout = ((1, 2), (2, 1))[number % 2]
            twin, victim = f"twin-{number}", f"victim-{number}"
            for name in (twin, victim):
                job = document(name, data, steps=steps, layout=layout, global_batch=128, dropout=0.1)
                job["spec"] |= {"hangSeconds": HANG_SECONDS, "retries": {"failures": faults}}
                here.ask(lambda client, job=job: client.submit(job, "default"))
                if name == twin:
                    here.until_done(twin, 1800)
            verdicts: list[Verdict] = []
            for _ in range(faults):
                steps_again(here, victim, len(verdicts) + 1, verdicts)
                if not deck:
                    deck = list(STRIKES)
                    if len(STRIKES) <= FAULTS:
                        chance.shuffle(deck)
                strike, verdict = STRIKES[what := deck.pop(0)]
                print(f"{victim}, attempt {len(verdicts) + 1}: {what}", flush=True)
                strike(here, victim, processes)
                verdicts += [verdict] if verdict is not None else []
            done = here.until_done(victim, 1800)
            assert [record.verdict for record in done.status.attempts] == [*verdicts, Verdict.FINISHED][-20:]
            failures = sum(verdict is not Verdict.DISRUPTED for verdict in verdicts)
            counted = (done.status.failures, done.status.disruptions, done.status.attempt)
            assert counted == (failures, len(verdicts) - failures, len(verdicts) + 1)
            assert_same_run(here, victim, twin)
        wait_until(lambda: not of_attempt(processes)["all"], "the last attempts' processes to end")
