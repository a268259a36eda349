"""One rank of a job stops moving. Its peers say so, the job goes on, and ends as the untouched one."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_machine import assert_same_run, document, of_attempt, platform, write_tokens
from processes import Processes
from waiting import wait_until

from holdfast_controller.jobs import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STEPS = 140


def test_a_frozen_rank_costs_one_failure_and_no_bit(tmp_path: Path, processes: Processes) -> None:
    data = write_tokens(tmp_path / "data")
    with platform(tmp_path / "holdfast", processes) as here:
        here.ask(lambda c: c.submit(document("twin", data, steps=STEPS), "default"))
        here.until_done("twin", 900)
        frozen = document("frozen", data, steps=STEPS)
        frozen["spec"]["hangSeconds"] = 15
        here.ask(lambda c: c.submit(frozen, "default"))

        wait_until(lambda: here.steps("frozen", 1) > 30, "a first checkpoint")
        here.ask(lambda c: c.drill("default", "frozen", 1, "freeze"))
        done = here.until_done("frozen", 900)
        assert (done.status.failures, done.status.disruptions, done.status.attempt) == (1, 0, 2)
        hung = done.status.attempts[0]
        assert hung.verdict is Verdict.HUNG
        assert "no step for" in hung.reason
        assert "rank 1 says nothing: stopped, gone, or stuck outside Python" in hung.reason
        assert 'File "' in hung.log_tail["0"], "no stack in the log"
        assert_same_run(here, "frozen", "twin")
        wait_until(lambda: not of_attempt(processes)["all"], "the last attempt's processes to end")
