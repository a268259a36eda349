"""The command and environment of an attempt's pods, run for real: torchrun, two replicas, gloo.

Only what a pod has and this machine has not is put in its place: the claim's path, the name of replica 0,
its port, and Kubernetes' expansion of `$(NAME)`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Processes
from waiting import wait_until

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.local.ports import free_port
from holdfast_controller.manifests import attempt_manifests
from holdfast_controller.pod_settings import PodSettings
from holdfast_trainer.contract import ENV_TERMINATION_LOG

ALL_REDUCE = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", int(total), "attempt", os.environ["HOLDFAST_ATTEMPT"], sys.argv[1], flush=True)
if sys.argv[2:]:
    import signal
    heard, stop = [], False
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    print("staying", flush=True)
    while not stop:
        time.sleep(0.05)
        told = torch.tensor([len(heard)])
        if sys.argv[2] == "agree":  # as our trainer does: all ranks stop where one is told to
            dist.all_reduce(told)
        stop = bool(told)
    print("noticed", flush=True)
    with open(os.environ["HOLDFAST_TERMINATION_LOG"], "w") as log:
        log.write('{"outcome": "interrupted", "step": 1, "durable_step": 1}')
dist.destroy_process_group()
"""


def pods(job: TrainingJob, directory: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of each replica, as the kubelet would start it here."""
    container: dict[str, Any] = attempt_manifests(job, 3, PodSettings()).pods["spec"]["containers"][0]
    here = {
        f"{job.metadata.name}-3-worker-0": "127.0.0.1",
        "--master-port=23456": f"--master-port={free_port()}",
        "/holdfast/run": str(directory / "run"),
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in the image
    made = []
    for replica in range(job.spec.replicas):
        given = {one["name"]: one.get("value") for one in container["env"]}
        (index,) = (name for name, value in given.items() if value is None)
        env = {name: value for name, value in given.items() if value is not None}
        env |= {index: str(replica), "PATH": path}
        env[ENV_TERMINATION_LOG] = str(directory / f"message-{replica}")

        def expanded(text: str, env: dict[str, str] = env) -> str:
            for there, instead in here.items():
                text = text.replace(there, instead)
            return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else env[m[1]], text)

        command = [expanded(word) for word in container["command"]]
        assert command[0] == "python"
        made.append(([sys.executable, *command[1:]], {name: expanded(value) for name, value in env.items()}))
    return made


def a_job(*arguments: str) -> TrainingJob:
    return TrainingJob.model_validate(
        {
            "metadata": {"name": "two", "namespace": "team-a"},
            "spec": {
                "image": "trainer:1",
                "command": [sys.executable, "-c", ALL_REDUCE, *arguments],
                "replicas": 2,
                "storage": {"claim": "runs"},
            },
        }
    )


def start(job: TrainingJob, processes: Processes, directory: Path) -> list[subprocess.Popen[str]]:
    return [
        processes.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command, env in pods(job, directory)
    ]


def outputs(started: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=300)[0] for process in started]


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    return tmp_path / "run" / "attempts" / "0003"


@pytest.mark.slow
def test_two_replicas_find_each_other_and_what_they_say_is_kept(
    processes: Processes, tmp_path: Path, attempt: Path
) -> None:
    started = start(a_job("costs $5 $(X)"), processes, tmp_path)
    said = outputs(started)
    assert [process.returncode for process in started] == [0, 0], said
    for rank, text in enumerate(said):
        assert "sum 3 attempt 3 costs $5 $(X)" in text, "a pod's log has what its rank said"
        assert "sum 3 attempt 3 costs $5 $(X)" in (attempt / f"rank-{rank}.log").read_text()
        assert json.loads((attempt / f"rank-{rank}.exit").read_text())["code"] == 0


@pytest.mark.slow
def test_a_notice_to_process_one_reaches_the_rank(
    processes: Processes, tmp_path: Path, attempt: Path
) -> None:
    started = start(a_job("x", "stay"), processes, tmp_path)
    logs = [attempt / f"rank-{rank}.log" for rank in range(2)]
    wait_until(lambda: all(log.exists() and "staying" in log.read_text() for log in logs), "both ranks")
    for process in started:
        process.send_signal(signal.SIGTERM)
    outputs(started)
    for log in logs:
        assert log.read_text().endswith("noticed\n")
        assert json.loads(log.with_suffix(".exit").read_text())["code"] == 0


@pytest.mark.slow
def test_a_notice_to_one_pod_ends_them_all_once_their_ranks_have_saved(
    processes: Processes, tmp_path: Path, attempt: Path
) -> None:
    """torchrun's barrier at the end would hold the others for five minutes, deaf to signals."""
    started = start(a_job("x", "agree"), processes, tmp_path)
    logs = [attempt / f"rank-{rank}.log" for rank in range(2)]
    wait_until(lambda: all(log.exists() and "staying" in log.read_text() for log in logs), "both ranks")
    started[1].send_signal(signal.SIGTERM)
    said = outputs(started)
    assert [process.returncode for process in started] == [1, 1], said
    for log in logs:
        assert log.read_text().endswith("noticed\n")
        assert json.loads(log.with_suffix(".exit").read_text())["code"] == 0
