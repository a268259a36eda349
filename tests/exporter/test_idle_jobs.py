"""A job that holds a GPU and does not use it: told, stopped after a checkpoint, and resumed. All but the
driver's library is real."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_machine import platform
from processes import Processes
from slow_training import COMMAND
from tests.nvml.stand_in import Script, busy_gpu
from waiting import wait_until

from holdfast_controller.jobs import Condition, Phase, TrainingJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

IDLE_SECONDS = 30


def gpus_idle(job: TrainingJob) -> Condition | None:
    return next((one for one in job.status.conditions if one.type == "GPUsIdle"), None)


def test_a_job_that_leaves_its_gpu_idle_gives_it_back_and_goes_on_when_it_is_resumed(
    tmp_path: Path, processes: Processes, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_GPUS", "1")
    monkeypatch.setenv("HOLDFAST_GPU_LOOK_SECONDS", "2")
    script.gpus = [busy_gpu(0, utilization=80)]
    script.write()
    spec = {"command": COMMAND, "gpus": "1", "idle": "Stop", "idleSeconds": IDLE_SECONDS}
    asks = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "slow"},
        "spec": {**spec, "checkpoint": {"every": "20"}},
    }
    with platform(tmp_path / "holdfast", processes) as here:
        here.ask(lambda client: client.submit(asks, "default"))

        def trains() -> bool:
            progress = here.job("slow").status.progress
            return progress is not None and progress.step > 5

        wait_until(trains, "the job to train", 240)
        assert gpus_idle(here.job("slow")) is None, "who uses its GPU hears nothing of it"
        script.gpus[0].figures["utilization"] = 1
        script.write()

        def stopped() -> TrainingJob | None:
            job = here.job("slow")
            return job if job.status.phase is Phase.SUSPENDED else None

        job = wait_until(stopped, "the job to be suspended", 300)
        assert job is not None
        (record,) = job.status.attempts
        assert record.last_step == record.durable_step, "it saved before it ended"
        assert record.lost_steps == 0
        assert (job.status.failures, job.status.disruptions, job.spec.suspend) == (0, 0, True)
        condition = gpus_idle(job)
        assert condition is not None
        assert (condition.status, condition.reason) == ("False", "Stopped")
        gpu = f"{script.gpus[0].uuid} of replica 0 (no rank known to be on it)"
        why = f"1 of 1 GPUs not used: {gpu}, at most 1% busy since"
        assert condition.message.startswith(why)
        assert why in job.status.message
        told = [
            one["message"]
            for one in here.ask(lambda client: client.events("default", "slow"))
            if one["reason"] == "GPUsIdle"
        ]
        assert told == [f"{condition.message}; it is suspended after a checkpoint, for idle is Stop"]

        # Whoever resumes it gets another chance.
        script.gpus[0].figures["utilization"] = 80
        script.write()
        here.ask(lambda client: client.resume("default", "slow"))

        def used() -> TrainingJob | None:
            job = here.job("slow")
            now = gpus_idle(job)
            return job if now is not None and now.reason == "InUse" else None

        job = wait_until(used, "the GPU to be in use")
        assert job is not None
        assert (job.status.attempt, job.spec.suspend) == (2, False)

        # A driver that tells nothing is no verdict.
        script.remove()
        before = here.job("slow").status.progress
        assert before is not None

        def further() -> bool:
            now = here.job("slow").status.progress
            return now is not None and now.step > before.step + 5

        wait_until(further, "the job to train on")
        assert gpus_idle(here.job("slow")) == gpus_idle(job)
