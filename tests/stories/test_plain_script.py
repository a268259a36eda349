"""A script with nothing of Holdfast in it is a job too: all its ranks are started, and again after a loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from one_machine import of_attempt, platform
from processes import Processes
from waiting import wait_until

from holdfast_controller.jobs import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLE = Path(__file__).parents[2] / "k8s" / "examples" / "ddp"
LOOP = "    for step in range(begin, STEPS):\n"
WAITS = """        while step >= 120 and os.path.exists(os.environ["HOLD"]):
            time.sleep(0.005)
"""


def test_a_plain_ddp_loop_is_started_again_and_goes_on_from_its_own_checkpoint(
    tmp_path: Path, processes: Processes
) -> None:
    loop = (EXAMPLE / "train.py").read_text()
    assert LOOP in loop
    assert "holdfast" not in loop.partition('"""\n')[2].lower()
    script, saved, held = tmp_path / "train.py", tmp_path / "ddp.pt", tmp_path / "held"
    script.write_text(f"import time\n{loop.replace(LOOP, LOOP + WAITS)}")
    held.touch()
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["spec"] |= {"command": ["python", str(script), str(saved)], "env": {"HOLD": str(held)}}
    with platform(tmp_path / "holdfast", processes) as here:
        here.ask(lambda client: client.submit(job, "default"))
        wait_until(lambda: saved.exists() and torch.load(saved)["step"] == 100, "its checkpoint of step 100")
        here.ask(lambda client: client.drill("default", "ddp", 1, "kill"))
        wait_until(lambda: here.job("ddp").status.attempt == 2, "the next attempt")
        held.unlink()
        done = here.until_done("ddp", 600)
        assert (done.status.disruptions, done.status.failures, done.status.attempt) == (1, 0, 2)
        first, second = done.status.attempts
        assert first.verdict is Verdict.DISRUPTED
        assert second.verdict is Verdict.FINISHED
        (log,) = (tmp_path / "holdfast").rglob("attempts/0002/rank-0.log")
        assert "rank 0 of 2 begins at step 100" in log.read_text()
        assert (first.last_step, second.last_step) == (None, None), "not known, which is not zero"
        assert torch.load(saved)["step"] == 400
        wait_until(lambda: not of_attempt(processes)["all"], "the last attempt's processes to end")
