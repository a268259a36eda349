"""The same bits under real torchrun agents, in whatever layout the ranks are started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from gangs import LOOP, History, Workshop
from processes import Processes
from waiting import wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer.contract import RunDir, Termination

OPTIONS: dict[str, Any] = {"steps": 60, "save_every": 6, "dropout": 0.2, "chunks": 2}


def start_agents(
    processes: Processes,
    path: Path,
    attempt: int,
    agents: int,
    per_agent: int,
    options: Mapping[str, Any],
    hold_at: int | None = None,
) -> list[subprocess.Popen[str]]:
    """One torchrun a replica, as the engines start them; from `hold_at` on steps wait for the test."""
    port = free_port()
    held = {} if hold_at is None else {"HOLD": str(path / f"held-{attempt}"), "HOLD_AT": str(hold_at)}
    if held:
        Path(held["HOLD"]).touch()
    started = []
    for index in range(agents):
        env = {
            "HOLDFAST_RUN_DIR": str(path / "run"),
            "HOLDFAST_ATTEMPT": str(attempt),
            "HOLDFAST_TERMINATION_LOG": str(path / f"replica-{attempt}-{index}"),
            "OMP_NUM_THREADS": "1",
            **held,
        }
        command = [
            sys.executable,
            "-m",
            "holdfast_trainer.torchrun",
            f"--nnodes={agents}",
            f"--node-rank={index}",
        ]
        command += [f"--nproc-per-node={per_agent}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command += ["--monitor-interval=0.1", "--shutdown-timeout=20", "--", "--die-with-parent", "--"]
        command += [sys.executable, str(LOOP), json.dumps(options)]
        log = open(path / f"agent-{attempt}-{index}.log", "w")  # noqa: SIM115
        started.append(processes.start(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    return started


def wait_for_step(history: History, attempt: int, step: int, path: Path) -> None:
    wait_until(
        lambda: history.last_step(attempt) >= step,
        f"step {step}; logs: {[p.read_text() for p in path.glob(f'agent-{attempt}-*.log')]}",
    )


@pytest.mark.slow
def test_layouts_of_one_world_size_are_one_run(
    workshop: Workshop, processes: Processes, tmp_path: Path
) -> None:
    untouched = workshop.finish("untouched", ranks=2, **OPTIONS)
    history = History(RunDir(tmp_path / "run"))
    slow = {**OPTIONS, "pause": 0.01}

    # One agent with two ranks is given notice: both save at one step, and torchrun still exits with 1.
    (agent,) = start_agents(processes, tmp_path, 1, agents=1, per_agent=2, options=slow, hold_at=12)
    wait_for_step(history, 1, 8, tmp_path)
    agent.send_signal(signal.SIGTERM)
    (tmp_path / "held-1").unlink()
    assert agent.wait(300) == 1
    message = Termination.from_json((tmp_path / "replica-1-0").read_text())
    assert message is not None
    assert message == Termination("interrupted", message.step, message.step)

    # Two agents with one rank each; one of them is lost with all its processes.
    agents = start_agents(
        processes, tmp_path, 2, agents=2, per_agent=1, options=slow, hold_at=message.step + 12
    )
    wait_for_step(history, 2, message.step + 10, tmp_path)
    assert history.events("attempt_start", 2)[0]["resumed_step"] == message.step
    for process in processes.running():
        with suppress(psutil.NoSuchProcess):  # an agent's end takes others along
            if process.environ().get("HOLDFAST_TERMINATION_LOG") == str(tmp_path / "replica-2-1"):
                process.kill()
    (tmp_path / "held-2").unlink()
    for agent in agents:
        agent.wait(300)
    survivor = Termination.from_json((tmp_path / "replica-2-0").read_text())
    assert survivor is not None
    assert survivor.outcome in ("failed", "interrupted")
    assert (tmp_path / "replica-2-1").read_text() == "", "it had no time for a word"

    # And to the end, again in one.
    (agent,) = start_agents(processes, tmp_path, 3, agents=1, per_agent=2, options=OPTIONS)
    assert agent.wait(300) == 0, (tmp_path / "agent-3-0.log").read_text()
    assert history.losses() == untouched.losses()
    assert history.stop()["digest"] == untouched.stop()["digest"] != ""
    assert history.stop()["outcome"] == "finished"
