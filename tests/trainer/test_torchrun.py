"""torchrun that forks its ranks: neither they nor who looks at them can tell it from being executed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import Processes
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.utils import macros
from waiting import wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer import in_place
from holdfast_trainer.contract import Termination
from holdfast_trainer.torchrun import arguments, others_may_ask, tell_shutdown_timeout, wait_for_first

PROGRAM = Path(__file__).with_name("forked_program.py")
TORCHRUN = (sys.executable, "-m", "holdfast_trainer.torchrun")
FORKED, EXECUTED = "forked", "executed"
forks = pytest.mark.skipif(
    not in_place.can_show(), reason="the kernel has no CONFIG_CHECKPOINT_RESTORE: ranks are executed"
)


def rank_command(way: str, *arguments: str, script: Path = PROGRAM) -> list[str]:
    """A rank of the program; an option that only an interpreter understands has it executed."""
    options = [] if way == FORKED else ["-X", "utf8"]
    return [sys.executable, *options, str(script), *arguments]


def gang(
    directory: Path, command: list[str], ranks: int = 1, torchrun: Sequence[str] = TORCHRUN
) -> list[str]:
    port = free_port()
    options = [f"--nproc-per-node={ranks}", "--rdzv-backend=static", "--master-addr=127.0.0.1"]
    options += [f"--master-port={port}", "--max-restarts=0", "--monitor-interval=0.1"]
    options += ["--shutdown-timeout=60", f"--log-dir={directory}"]
    supervise = ["--log", str(directory / "rank-{RANK}.log"), "--exit", str(directory / "rank-{RANK}.exit")]
    return [*torchrun, *options, "--", "--die-with-parent", *supervise, "--", *command]


def ran(
    directory: Path, command: list[str], ranks: int = 1, torchrun: Sequence[str] = TORCHRUN
) -> tuple[int, str, str]:
    """torchrun's exit code, what rank 0 said, and what torchrun said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ADDED": "by the test"}
    done = subprocess.run(
        gang(directory, command, ranks, torchrun),
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    log = directory / "rank-0.log"
    return done.returncode, log.read_text() if log.exists() else "", done.stdout + done.stderr


def staying(processes: Processes, directory: Path, argument: str, ranks: int = 1) -> subprocess.Popen[str]:
    """torchrun, once its rank 0 is up and stays; what it says is in agent.log."""
    command = gang(directory, rank_command(FORKED, argument), ranks)
    with open(directory / "agent.log", "w") as out:
        agent = processes.start(command, env={"OMP_NUM_THREADS": "1"}, cwd=directory, stdout=out, stderr=out)
    log = directory / "rank-0.log"
    wait_until(lambda: log.exists() and "staying" in log.read_text(), "rank 0 to be up", 300)
    return agent


def how(directory: Path, rank: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((directory / f"rank-{rank}.exit").read_text())
    return body


@forks
def test_a_forked_rank_sees_what_an_executed_one_sees(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    for way in (FORKED, EXECUTED):
        directory = tmp_path / way
        directory.mkdir()
        code, said, torchrun_said = ran(directory, rank_command(way, "look", "a b"))
        assert code == 0, said + torchrun_said
        seen[way] = json.loads(said.splitlines()[0])
        assert said.splitlines()[1:] == ["a thread ended", "an exit handler ran"]
        assert how(directory)["code"] == 0
    modules = {way: seen[way].pop("torch came with the process") for way in seen}
    assert modules == {FORKED: True, EXECUTED: False}, "or both were made in the same way"
    assert seen[FORKED].pop("cmdline") == rank_command(FORKED, "look", "a b")
    assert seen[EXECUTED].pop("cmdline") == rank_command(EXECUTED, "look", "a b")
    for way, body in seen.items():
        assert body.pop("directory") == str(tmp_path / way)
        shown = body.pop("environ")
        assert shown["RANK"] == "0"
        assert shown["ADDED"] == "by the test"
        assert shown.items() <= body.pop("environment").items()
    assert seen[FORKED] == seen[EXECUTED]


@forks
@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch was built without CUDA")
def test_a_rank_to_which_a_fork_leaves_no_cuda_is_executed_and_says_so(tmp_path: Path) -> None:
    """To ask for a GPU is enough, be there one or not: no forked process may use CUDA afterwards."""
    asks = "import sys, torch; torch.cuda.is_available(); from holdfast_trainer.torchrun import main"
    torchrun = (sys.executable, "-c", f"{asks}; main(sys.argv[1:])")
    code, said, torchrun_said = ran(tmp_path, rank_command(FORKED, "look", "a b"), torchrun=torchrun)
    assert code == 0, said + torchrun_said
    told, looked, *_ = said.splitlines()
    assert told.startswith("supervise: CUDA was initialized before this rank was forked: it is executed")
    seen = json.loads(looked)
    assert not seen["CUDA is spoilt"]
    assert not seen["torch came with the process"]
    assert seen["cmdline"] == rank_command(FORKED, "look", "a b")
    assert seen["environ"]["RANK"] == "0"


@pytest.mark.slow
def test_ranks_that_were_forked_train_together_and_load_data_in_workers(tmp_path: Path) -> None:
    code, said, torchrun_said = ran(tmp_path, rank_command(FORKED, "work"), ranks=2)
    assert code == 0, said + torchrun_said
    other = (tmp_path / "rank-1.log").read_text()
    for rank, text in enumerate((said, other)):
        assert f"rank {rank}: sum 3" in text
        assert "spawn: [2, 4] 28.0" in text
        assert "fork: [2, 4] 28.0" in text
    drawn = [re.findall(r"draws (\S+) (\S+)", text)[0] for text in (said, other)]
    assert drawn[0][0] != drawn[1][0], "numpy's numbers differ between ranks"
    assert drawn[0][1] != drawn[1][1], "and so do PyTorch's"


@pytest.mark.parametrize("way", [pytest.param(FORKED, marks=forks), EXECUTED])
def test_a_rank_that_fails_shows_its_own_traceback_and_its_code(tmp_path: Path, way: str) -> None:
    code, said, torchrun_said = ran(tmp_path, rank_command(way, "fail"))
    assert code == 1
    assert how(tmp_path)["code"] == 1
    assert "ValueError: boom" in said
    assert 'raise ValueError("boom")' in said
    assert "in_place.py" not in said, "nothing of what stands around it"
    assert "runpy" not in said
    assert torchrun_said.endswith("torchrun: rank 0 ended with exit code 1\n")
    assert "Traceback" not in torchrun_said, "on a cluster it would stand for the rank's own last lines"
    assert "ProcessExitedException" not in torchrun_said


@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [("exit 3", 3, ""), ("exit with words", 1, "with words\n"), ("os.abort", -signal.SIGABRT, "")],
)
def test_every_end_is_told_as_it_was(tmp_path: Path, argument: str, code: int, said: str) -> None:
    returned, log, torchrun_said = ran(tmp_path, rank_command(FORKED, argument))
    assert returned == 1, torchrun_said
    assert how(tmp_path).get("code", -how(tmp_path).get("signal", 0)) == code
    assert said in log


@forks
def test_where_torchrun_has_no_room_for_semaphores_it_is_said_where(tmp_path: Path) -> None:
    """It was "no space left on device", of no device, and a failure of the job's."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a /dev/shm of its own needs root")
    full = 'mount -t tmpfs -o nr_inodes=1 full /dev/shm && HOLDFAST_TERMINATION_LOG="$0" exec "$@"'
    told = tmp_path / "termination"
    torchrun = ("unshare", "--mount", "sh", "-c", full, str(told), *TORCHRUN)
    code, _, _ = ran(tmp_path, rank_command(FORKED), torchrun=torchrun)
    error = "cannot make a semaphore, which lies in /dev/shm: No space left on device"
    assert code == 74
    assert Termination.from_json(told.read_text()) == Termination(
        "failed", 0, 0, error, storage_unavailable=True
    )
    assert ran(tmp_path, ["true"], torchrun=torchrun)[0] == 0, "a rank that is executed needs none"


def test_a_module_that_is_not_there_is_reported_by_the_interpreter_itself(tmp_path: Path) -> None:
    code, said, _ = ran(tmp_path, [sys.executable, "-m", "no_such.module"])
    assert code == 1
    assert "Error while finding module specification for 'no_such.module'" in said


def below(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    """All that it has started; not what multiprocessing itself has from Python 3.14 on."""
    found = psutil.Process(agent.pid).children(recursive=True)
    return [process for process in found if "resource_tracker" not in " ".join(process.cmdline())]


@forks
def test_a_notice_reaches_a_forked_rank_and_its_supervisor_is_told_apart_from_it(
    processes: Processes, tmp_path: Path
) -> None:
    agent = staying(processes, tmp_path, "stay")
    supervisor, rank = below(agent)
    assert supervisor.children() == [rank]
    assert supervisor.cmdline()[:3] == [sys.executable, "-m", "holdfast_trainer.supervise"]
    assert rank.cmdline() == rank_command(FORKED, "stay")
    assert rank.environ()["RANK"] == supervisor.environ()["RANK"] == "0"
    assert "RANK" not in psutil.Process(agent.pid).environ()
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(300) == 1
    assert "forcefully" not in (tmp_path / "agent.log").read_text(), "it ended by itself"
    assert (tmp_path / "rank-0.log").read_text().endswith("noticed\n")
    assert how(tmp_path)["code"] == 0


@forks
def test_a_rank_that_is_done_holds_up_no_notice(processes: Processes, tmp_path: Path) -> None:
    agent = staying(processes, tmp_path, "rank 0 stays", ranks=2)
    wait_until((tmp_path / "rank-1.exit").exists, "rank 1 to be done", 300)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(300) == 1
    assert "forcefully" not in (tmp_path / "agent.log").read_text()
    assert [how(tmp_path, rank)["code"] for rank in (0, 1)] == [0, 0]


@forks
def test_a_rank_does_not_outlive_its_torchrun(processes: Processes, tmp_path: Path) -> None:
    agent = staying(processes, tmp_path, "stay")
    started = below(agent)
    assert len(started) == 2
    agent.kill()
    agent.wait(300)
    gone, alive = psutil.wait_procs(started, timeout=300)
    assert not alive, gone


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["python", "-m", "pkg.mod", "a", "-m"], in_place.Program("pkg.mod", None, ("a", "-m"))),
        (["python", str(PROGRAM), "-x"], in_place.Program(None, str(PROGRAM), ("-x",))),
        (["python", "-u", str(PROGRAM)], in_place.Program(None, str(PROGRAM), (), unbuffered=True)),
        ([sys.executable, "-m", "mod"], in_place.Program("mod", None, ())),
        (["python", "-c", "pass"], None),
        (["python", "-O", str(PROGRAM)], None),
        (["python", "-m"], None),
        (["python", "no-such-file.py"], None),
        (["python"], None),
        (["python-of-another-place", "-m", "mod"], None),
        (["sh", "-c", "true"], None),
        ([], None),
    ],
)
def test_what_can_run_in_the_process_that_was_forked(
    command: list[str], program: in_place.Program | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert in_place.program_of(command) == program


def test_another_environments_interpreter_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are links to one executable, and each has its own packages."""
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert in_place.program_of(["python", "-m", "mod"]) is None


def test_where_the_kernel_shows_no_forked_rank_as_it_is_every_rank_is_executed() -> None:
    argv = ["--log-dir=logs", "--", "--tee", "--", *rank_command(FORKED)]
    forked, executed = (arguments(argv, may_fork=may) for may in (True, False))
    assert forked[:4] == ["--log-dir=logs", "--start-method=fork", "--run-path", "--"]
    assert forked[5:] == argv[2:]
    supervise = [sys.executable, "-m", "holdfast_trainer.supervise"]
    assert executed == ["--log-dir=logs", "--no-python", "--", *supervise, *argv[2:]]


def test_a_command_reaches_its_rank_with_all_its_dollars() -> None:
    """A shell's `$$` arrived as one `$`: of `echo > part.$$` all ranks wrote to one file."""
    for command in (["sh", "-c", "echo $$ $HOME ${local_rank} $"], [*rank_command(FORKED), "$$"]):
        for may_fork in (True, False):
            words = arguments(["--log-dir=logs", "--", "--tee", "--", *command], may_fork=may_fork)
            assert macros.substitute(words, "1")[-len(command) :] == command


def test_an_attempt_leaves_nothing_in_the_directory_for_temporary_files(tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    command = [word for word in gang(tmp_path, rank_command(FORKED, "fail")) if "--log-dir" not in word]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1, done.stderr
    assert how(tmp_path)["code"] == 1
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nnodes=1",), "the options of the supervisor follow torchrun's after `--`"),
        (("--nnodes=1", "--", "--tee"), "no command given; it follows the second `--`"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words: tuple[str, ...], message: str) -> None:
    refused = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 64
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("own", "may"),
    [
        (["--nnodes=1", "--node-rank=0"], False),
        (["--nnodes=1"], False),
        (["--nnodes=2", "--node-rank=0"], True),
        (["--nnodes=2", "--node-rank=1"], False),
        (["--nnodes=2"], True),
        (["--nnodes=1:4", "--node-rank=0"], True),
        (["--standalone"], True),  # it could leave at once, too, and nobody is the worse for it
    ],
)
def test_who_has_the_store_of_several_stays_until_it_is_taken_apart(own: list[str], may: bool) -> None:
    assert others_may_ask(own) == may


def first_at(port: int, replica: int) -> list[str]:
    return ["--nnodes=2", f"--node-rank={replica}", "--master-addr=127.0.0.1", f"--master-port={port}"]


def test_replicas_wait_until_the_first_one_listens() -> None:
    port, began, came = free_port(), threading.Event(), []

    def wait() -> None:
        began.set()
        came.append(wait_for_first(first_at(port, 1), 300))

    waiting = threading.Thread(target=wait)
    waiting.start()
    began.wait()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(300)
    assert came == [True]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(first_at(9, 0), id="it is the first itself"),
        pytest.param(["--rdzv-endpoint=host:1"], id="another rendezvous"),
        pytest.param(["--node-rank=1", "--master-addr=x", "--master-port=many"], id="no port"),
    ],
)
def test_who_has_nobody_to_wait_for_waits_for_nothing(options: list[str]) -> None:
    assert wait_for_first(options, 300)


def test_a_first_replica_that_does_not_come_is_left_to_torchrun() -> None:
    assert not wait_for_first(first_at(free_port(), 1), 0.05)


def test_a_torchrun_that_knows_no_shutdown_timeout_keeps_to_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of PyTorch 2.11, which is the oldest that we take, ended each attempt as it began."""
    monkeypatch.setattr(PContext.close, "__defaults__", PContext.close.__defaults__)  # and back again
    words = ["--max-restarts=0", "--shutdown-timeout=7", "--", "rank.py", "--shutdown-timeout=8"]
    newer = type("LaunchConfig", (), {"shutdown_timeout": None})
    assert tell_shutdown_timeout(words, newer) == words
    assert PContext.close.__defaults__ != (None, 7)
    older = type("LaunchConfig", (), {})
    assert tell_shutdown_timeout(words, older) == ["--max-restarts=0", *words[2:]]
    assert PContext.close.__defaults__ == (None, 7)
    assert tell_shutdown_timeout(["--", "rank.py"], older) == ["--", "rank.py"]
