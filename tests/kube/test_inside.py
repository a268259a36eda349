"""The program that runs inside a replica's container, run here as it is there: from its text, by a Python
that knows nothing of Holdfast, on real processes; and what is made of its answers, and of containers that
cannot give one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import MARK, Processes
from waiting import wait_until

from holdfast_controller import inside
from holdfast_controller.cluster import HoldfastError, Invalid, NotReady, Unavailable
from holdfast_controller.kube.execution import COMMAND, PROGRAM, Output, outcome
from holdfast_trainer.contract import STACK_SIGNAL

RANK = f"""
import faulthandler, threading, time
faulthandler.enable()
faulthandler.register({STACK_SIGNAL}, all_threads=False)
def is_never_asked():
    while True:
        time.sleep(0.001)
threading.Thread(target=is_never_asked, daemon=True).start()
print("up", flush=True)
def waits_for_its_peers():
    while True:
        time.sleep(1000)
waits_for_its_peers()
"""


class Container:
    """Processes of one attempt: torchrun, which has its node's RANK alone, and ranks below supervisors."""

    def __init__(self, processes: Processes, directory: Path):
        self.processes, self.directory = processes, directory
        self.environment = {"HOLDFAST_ATTEMPT_UID": f"{uuid.uuid4()}/1", "RANK": "0"}
        self.torchrun = self._start("torchrun", self.environment)
        self.ranks = [self._rank(number) for number in (0, 1)]

    def _rank(self, number: int) -> subprocess.Popen[str]:
        told = {**self.environment, "RANK": str(number), "LOCAL_RANK": str(number)}
        return self._start(f"rank-{number}", told)

    def _start(self, name: str, told: dict[str, str]) -> subprocess.Popen[str]:
        log = self.directory / f"{name}.log"
        with log.open("w") as output:
            started = self.processes.start(
                [sys.executable, "-c", RANK], env=told, stdout=output, stderr=output
            )
        wait_until(lambda: "up" in log.read_text(), f"{name} to be up")
        return started

    def run(self, *words: str) -> dict[str, Any]:
        """What the program says, as its container's Python runs it."""
        done = subprocess.run(
            [sys.executable, *COMMAND[1:], *words],
            input=PROGRAM,
            env={**self.environment, MARK: self.processes.mark},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        assert done.stderr == ""
        return dict(json.loads(done.stdout))


@pytest.fixture
def container(processes: Processes, tmp_path: Path) -> Iterator[Container]:
    there = Container(processes, tmp_path)
    yield there
    processes.end_all()
    for one in (there.torchrun, *there.ranks):
        one.wait()


def stands_still(process: subprocess.Popen[str]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_one_rank_is_stopped_and_no_other(container: Container) -> None:
    assert container.run("freeze", "1") == {"stopped": [container.ranks[1].pid]}
    wait_until(lambda: stands_still(container.ranks[1]), "rank 1 to stand still")
    assert not stands_still(container.ranks[0])
    assert not stands_still(container.torchrun)
    assert container.run("freeze", "7") == {"error": "rank 7 has not started yet"}


def test_ranks_tell_their_stacks_as_they_end_even_one_that_stands_still(container: Container) -> None:
    container.ranks[1].send_signal(signal.SIGSTOP)
    assert container.run("stacks", "60") == {"asked": [0, 1], "silent": []}
    for number, rank in enumerate(container.ranks):
        assert rank.wait(60) in (-signal.SIGABRT, -signal.SIGSEGV), "the stacks of all can crash it"
        first, _, then = (container.directory / f"rank-{number}.log").read_text().partition("Fatal Python")
        assert first.startswith("up\nStack (most recent call first):\n")
        assert "in waits_for_its_peers" in first
        assert "is_never_asked" not in first
        assert then, "and then those of all, as it ends"
    assert container.torchrun.poll() is None
    assert not list(container.directory.glob("core*"))


def test_a_rank_that_knows_no_such_signal_tells_its_stacks_all_the_same(container: Container) -> None:
    """A script without `Run`, and with Python's -X faulthandler: the signal would end it in silence."""
    code = "import time\nprint('up', flush=True)\ndef alone():\n    time.sleep(1000)\nalone()"
    told = {**container.environment, "RANK": "2", "LOCAL_RANK": "2"}
    log = container.directory / "rank-2.log"
    with log.open("w") as output:
        words = [sys.executable, "-X", "faulthandler", "-c", code]
        rank = container.processes.start(words, env=told, stdout=output, stderr=output)
    wait_until(lambda: "up" in log.read_text(), "rank 2 to be up")
    assert container.run("stacks", "60") == {"asked": [0, 1, 2], "silent": []}
    assert rank.wait(60) == -signal.SIGABRT
    assert "in alone" in log.read_text()


def test_the_signal_is_the_one_that_ranks_know() -> None:
    assert inside.STACK_SIGNAL == STACK_SIGNAL


def test_memory_is_filled_by_nobody_until_a_rank_ends(container: Container) -> None:
    """There is no limit here, so the filling ends at what was asked for: the ranks live on."""
    assert container.run("overfill", str(32 << 20)) == {"filling": 32 << 20}
    assert [container.torchrun.poll(), *(rank.poll() for rank in container.ranks)] == [None] * 3
    marked = [Path(f"/proc/{one.pid}/oom_score_adj").read_text().strip() for one in container.ranks]
    assert marked == ["1000", "1000"], "the kernel takes the ranks first"

    def fillers() -> list[int]:
        uid = container.environment["HOLDFAST_ATTEMPT_UID"]
        ours = {os.getpid(), container.torchrun.pid, *(rank.pid for rank in container.ranks)}
        found = []
        for one in psutil.process_iter():
            try:
                if one.pid not in ours and one.environ().get("HOLDFAST_ATTEMPT_UID") == uid:
                    found.append(one.pid)
            except psutil.Error:
                continue
        return found

    wait_until(lambda: fillers() == [], "what filled the memory to be gone")
    for rank in container.ranks:
        rank.kill()
        rank.wait()
    assert container.run("overfill", "1") == {"error": "none of its ranks has started yet, so none can grow"}


WELL = {"status": "Success"}
NO_PYTHON = {
    "status": "Failure",
    "reason": "InternalError",
    "message": 'exec failed: unable to start: exec: "python": executable file not found in $PATH',
}
FAILED = {
    "status": "Failure",
    "reason": "NonZeroExitCode",
    "details": {"causes": [{"reason": "ExitCode", "message": "2"}]},
}
KILLED = {**FAILED, "details": {"causes": [{"reason": "ExitCode", "message": "137"}]}}


@pytest.mark.parametrize(
    ("output", "kind", "said"),
    [
        (
            Output('{"error": "rank 1 has not started yet"}\n', status=WELL),
            NotReady,
            "^gpt-1: rank 1 has not",
        ),
        (
            Output("hello\n", status=WELL),
            Invalid,
            r"^gpt-1: `python` in its image is no Python 3.9 or newer: it",
        ),
        (Output("[1]\n", status=WELL), Invalid, "is no Python 3.9 or newer"),
        (
            Output(status=NO_PYTHON),
            Invalid,
            'needs `python`, 3.9 or newer, in the image: .*"python": executable',
        ),
        (
            Output("", "Unknown option: -I\nusage: python", status=FAILED),
            Invalid,
            "in the image: usage: python",
        ),
        (Output(status=KILLED), NotReady, "^gpt-1: its container ended meanwhile; try again"),
        (Output('{"stopped": [1]}'), Unavailable, "the stream to its container ended early; try again"),
    ],
)
def test_what_went_wrong_is_said(output: Output, kind: type[HoldfastError], said: str) -> None:
    with pytest.raises(kind, match=said):
        outcome("gpt-1", output)


def test_a_container_that_answers_nested_without_end_is_told_as_any_other_that_is_no_python() -> None:
    said = Output(said="[" * 100_000, status={"status": "Success"})
    with pytest.raises(Invalid, match=r"is no Python 3\.9 or newer"):
        outcome("gpt-1", said)


def test_messages_are_put_together_by_their_channel() -> None:
    output = Output()
    for message in (
        b"\x01",
        b'\x01{"stopp',
        b"\x02a warning\n",
        b'\x01ed": [7]}\n',
        b'\x03{"status": "Success"}',
    ):
        output.take(message)
    assert outcome("gpt-1", output) == {"stopped": [7]}
    output.take(b"\x01" + b"x" * 10**6)
    assert len(output.said) < 10**6, "a container that says more than enough"
