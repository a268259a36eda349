"""A supervised command: its end is always known, and it never outlives its supervisor."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from disks import break_disk, fill_whole, real_disk, unserved
from processes import Processes
from waiting import wait_until

from holdfast_trainer import supervise
from holdfast_trainer.contract import ENV_TERMINATION_LOG, EXIT_CONFIG_ERROR, Outcome, Termination
from holdfast_trainer.kept_room import KeptFile
from holdfast_trainer.still_disk import MOST, Apart
from holdfast_trainer.tee import LONGEST_LINE

SUPERVISE = (sys.executable, "-m", "holdfast_trainer.supervise")


def supervised(tmp_path: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SUPERVISE, "--log", str(tmp_path / "log"), "--exit", str(tmp_path / "exit"), "--", *command],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def ended(path: Path) -> dict[str, Any]:
    """The exit file, once it is there."""
    wait_until(path.exists, f"{path.name} to be written")
    body: dict[str, Any] = json.loads(path.read_text())
    return body


def started(log: Path) -> int:
    """The pid a command wrote into its log."""
    return int(wait_until(lambda: log.exists() and log.read_text().strip(), "the command to start"))


def test_the_log_and_the_exit_file_tell_how_it_went(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    done = supervised(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert done.returncode == 3
    assert (tmp_path / "log").read_text() == "before\nout\nerr\n"
    exit_file = ended(tmp_path / "exit")
    assert exit_file["code"] == 3
    assert exit_file["ended"] > 0
    assert "signal" not in exit_file


@pytest.mark.parametrize("tee", [False, True])
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "import sys; print('fine', flush=True); sys.exit('cannot: no such \\x1b[1mfile\\x1b[0m')",
            "fine\ncannot: no such file",
        ),
        ("print('one\\n\\n  two  \\r\\n'); import sys; sys.exit(3)", "one\n  two"),
        ("import sys; sys.exit(3)", None),
        ("print('all is well')", None),
        ("import os; print('all is well', flush=True); os.kill(os.getpid(), 9)", None),
        ("import sys; print('x' * 3000 + 'the end'); sys.exit(3)", "..." + "x" * 1016 + "the end"),
        ("import sys; sys.stdout.buffer.write(b'\\xc3' * 2000); sys.exit(3)", None),
    ],
    ids=["words", "lines", "silent", "well", "killed", "long", "no text"],
)
def test_beside_a_bad_exit_code_stands_what_was_said_last(
    tmp_path: Path, script: str, said: str | None, tee: bool
) -> None:
    words = ["--log", str(tmp_path / "log"), "--exit", str(tmp_path / "exit"), *(["--tee"] if tee else [])]
    subprocess.run([*SUPERVISE, *words, "--", sys.executable, "-c", script], check=False, capture_output=True)
    assert json.loads((tmp_path / "exit").read_text()).get("said") == said


def test_a_signal_is_told_as_one(tmp_path: Path) -> None:
    assert supervised(tmp_path, "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL
    assert ended(tmp_path / "exit")["signal"] == signal.SIGKILL


def test_rank_in_a_path_comes_from_the_environment(tmp_path: Path) -> None:
    command = [*SUPERVISE, "--exit", str(tmp_path / "rank-{RANK}.exit"), "--", "true"]
    subprocess.run(command, env={**os.environ, "RANK": "7"}, check=True, timeout=300)
    assert ended(tmp_path / "rank-7.exit")["code"] == 0
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    refused = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert refused.returncode == 64
    assert "names {RANK}, but RANK is not set: torchrun sets it" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no command given; it follows `--`"),
        (("--logs", "x", "--", "true"), "unknown option '--logs'; the command follows `--`"),
        (("--log", "--", "true"), "--log needs a path"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words: tuple[str, ...], message: str) -> None:
    refused = subprocess.run([*SUPERVISE, *words], capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 64
    assert message in refused.stderr


@pytest.mark.parametrize("kind", ["missing", "not executable", "no interpreter"])
def test_a_command_that_cannot_run_is_a_configuration_error(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "script"
    if kind != "missing":
        script.write_text("no shebang")
        script.chmod(0o755 if kind == "no interpreter" else 0o644)
    termination = tmp_path / "termination"
    done = supervised(tmp_path, str(script), HOLDFAST_TERMINATION_LOG=str(termination))
    remedy = {
        "missing": "there is no such command on PATH; check the job's `command`",
        "not executable": "the file is not executable",
        "no interpreter": "put its interpreter (python, bash) first in the job's `command`",
    }[kind]
    assert done.returncode == EXIT_CONFIG_ERROR
    assert ended(tmp_path / "exit")["code"] == EXIT_CONFIG_ERROR
    message = Termination.from_json(termination.read_text())
    assert message is not None
    assert message.config_error
    assert message.error.startswith(f"cannot run '{script}': ")
    assert remedy in message.error
    assert remedy in (tmp_path / "log").read_text()


def test_the_command_starts_in_the_directory_that_is_named_for_it(tmp_path: Path) -> None:
    elsewhere, told = tmp_path / "else where", tmp_path / "termination"
    words = [*SUPERVISE, "--log", str(tmp_path / "log"), "--directory", str(elsewhere), "--", "pwd"]
    environment = {**os.environ, ENV_TERMINATION_LOG: str(told)}
    refused = subprocess.run(words, env=environment, timeout=300, check=False)
    assert refused.returncode == EXIT_CONFIG_ERROR
    message = Termination.from_json(told.read_text())
    assert message is not None
    assert message.config_error
    why = f"cannot enter the job's workingDir {elsewhere}: No such file or directory"
    assert message.error == why
    elsewhere.mkdir()
    subprocess.run(words, timeout=300, check=True)
    assert (tmp_path / "log").read_text() == f"supervise: {why}\n{elsewhere}\n"


@pytest.mark.parametrize("absolute", [True, False])
def test_a_script_that_is_not_there_is_a_configuration_error(tmp_path: Path, absolute: bool) -> None:
    """Python says so with exit code 2, as any failure's, and the job tried again and again."""
    told = tmp_path / "termination"
    script = str(tmp_path / "train.py") if absolute else "train.py"
    words = [*SUPERVISE, "--log", str(tmp_path / "log"), "--exit", str(tmp_path / "exit"), "--"]
    command = [*words, sys.executable, "-u", script, "--lr", "1"]
    environment = {**os.environ, ENV_TERMINATION_LOG: str(told)}
    refused = subprocess.run(command, env=environment, cwd=tmp_path, timeout=300, check=False)
    assert refused.returncode == EXIT_CONFIG_ERROR
    assert ended(tmp_path / "exit")["code"] == EXIT_CONFIG_ERROR
    message = Termination.from_json(told.read_text())
    assert message is not None
    assert message.config_error
    where = script if absolute else f"train.py in {tmp_path}"
    why = f"cannot read {where}: No such file or directory; check the job's `command`"
    assert message.error == why
    assert (tmp_path / "log").read_text() == f"supervise: {why}\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--directory", "{0}", "--", "pwd"), "cannot enter the job's workingDir {0}"),
        (("--", sys.executable, "{0}/train.py"), "cannot read {0}/train.py"),
        (("--", "python", "-u", "{0}/train.py", "-v"), "cannot read {0}/train.py"),
        (("--", "{0}/train.sh"), "cannot read {0}/train.sh"),
    ],
    ids=["workingDir", "script", "script, not buffered", "program"],
)
def test_what_the_attempts_before_had_is_waited_for(
    words: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    """The volume with the code is not mounted on the node to which a job was moved: its retries were spent in
    a minute, and it was over."""
    away, told, end = tmp_path / "away", tmp_path / "termination", tmp_path / "exit"
    words = tuple(word.format(away) for word in words)
    command = [*SUPERVISE, "--log", str(tmp_path / "log"), "--exit", str(end), *words]
    environment = {**os.environ, ENV_TERMINATION_LOG: str(told)}
    first = subprocess.run(command, env=environment, timeout=300, check=False)
    assert first.returncode not in (0, 74), "nobody has had it"
    told.unlink(missing_ok=True)
    again = subprocess.run(
        command, env=environment | {"HOLDFAST_DURABLE_STEP": "0"}, timeout=300, check=False
    )
    assert (again.returncode, ended(end)["code"]) == (74, 74)
    message = Termination.from_json(told.read_text())
    assert message is not None
    why = "No such file or directory, though attempts before have trained: is its volume mounted?"
    assert message.error == f"{what.format(away)}: {why}"
    assert (message.storage_unavailable, message.config_error) == (True, False)
    assert (tmp_path / "log").read_text().endswith(f"supervise: {message.error}\n")


@pytest.mark.parametrize("trained", [False, True], ids=["nothing has trained", "attempts before have"])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--directory", "{0}", "--", "pwd"), "cannot enter the job's workingDir {0}"),
        (("--", sys.executable, "{0}/train.py"), "cannot read {0}/train.py"),
        (("--", "{0}/train.sh"), "cannot read {0}/train.sh"),
    ],
    ids=["workingDir", "script", "program"],
)
def test_what_is_on_a_mount_that_does_not_answer_is_waited_for(
    words: tuple[str, ...], what: str, trained: bool, tmp_path: Path
) -> None:
    """It may well be there, so that a job that begins cannot be called wrong; a working directory was."""
    away, told, end = tmp_path / "away", tmp_path / "termination", tmp_path / "exit"
    words = tuple(word.format(away) for word in words)
    command = [*SUPERVISE, "--log", str(tmp_path / "log"), "--exit", str(end), *words]
    environment = {**os.environ, ENV_TERMINATION_LOG: str(told)}
    environment |= {"HOLDFAST_DURABLE_STEP": "0"} if trained else {}
    with unserved(away):
        done = subprocess.run(command, env=environment, timeout=300, check=False)
    assert (done.returncode, ended(end)["code"]) == (74, 74)
    message = Termination.from_json(told.read_text())
    assert message is not None
    assert message.error == f"{what.format(away)}: Transport endpoint is not connected"
    assert (message.storage_unavailable, message.config_error) == (True, False)
    assert (tmp_path / "log").read_text() == f"supervise: {message.error}\n"


@pytest.mark.parametrize(
    "words", [["true"], ["python", "-m", "train"], ["python", "-c", "pass"], ["python"], ["sh", "-c", "x"]]
)
def test_what_names_no_file_needs_none(words: list[str]) -> None:
    assert supervise.files_of(words) == []


def test_a_log_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = tmp_path / "termination"
    words = ("touch", str(tmp_path / "ran"))
    done = supervised(tmp_path / "file" / "below", *words, HOLDFAST_TERMINATION_LOG=str(told))
    assert done.returncode == 74
    assert "cannot write the log" in done.stderr
    assert "Not a directory" in done.stderr
    message = Termination.from_json(told.read_text())
    assert message is not None
    assert message.error in done.stderr
    assert not message.storage_unavailable
    assert not (tmp_path / "ran").exists()

    told.unlink()
    before = {"HOLDFAST_TERMINATION_LOG": str(told), "HOLDFAST_DURABLE_STEP": "20"}
    assert supervised(tmp_path / "file" / "below", *words, **before).returncode == 74
    message = Termination.from_json(told.read_text())
    assert message is not None
    why = "Not a directory, though attempts before have trained: is its volume mounted?"
    assert message.error.endswith(why)
    assert message.storage_unavailable, "it is not the job's fault that it is not what it was"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(fill_whole, "No space left on device"), (break_disk, "Read-only file system")],
    ids=["full", "read-only, as one that failed"],
)
def test_a_log_that_its_disk_does_not_take_says_so(
    spoil: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    """It is no fault of the job's, and the message tells it apart from one that is."""
    told = tmp_path / "termination"
    with real_disk(tmp_path / "disk", 8 << 20) as disk:
        spoil(disk)
        done = supervised(disk / "attempts" / "0002", "true", HOLDFAST_TERMINATION_LOG=str(told))
    assert done.returncode == 74
    error = f"cannot write the log {disk}/attempts/0002/log: {said}"
    assert Termination.from_json(told.read_text()) == Termination(
        "failed", 0, 0, error, storage_unavailable=True
    )


def test_a_rank_makes_its_own_attempt_directory(tmp_path: Path) -> None:
    """In a pod nobody was there before it."""
    done = supervised(tmp_path / "attempts" / "0001", "echo", "here")
    assert done.returncode == 0
    assert (tmp_path / "attempts" / "0001" / "log").read_text() == "here\n"
    assert ended(tmp_path / "attempts" / "0001" / "exit")["code"] == 0


def test_a_notice_reaches_the_command_once(tmp_path: Path, processes: Processes) -> None:
    log = tmp_path / "log"
    script = (
        "import signal,sys,time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('notice', flush=True))\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    supervisor = processes.start(
        [*SUPERVISE, "--log", log, "--exit", tmp_path / "exit", "--", sys.executable, "-c", script]
    )
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the command to be ready")
    supervisor.send_signal(signal.SIGTERM)
    wait_until(lambda: "notice" in log.read_text(), "the notice")
    supervisor.send_signal(signal.SIGTERM)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(300) == 5
    assert log.read_text() == "ready\nnotice\n"


def test_kill_9_of_the_supervisor_takes_the_command_with_it(tmp_path: Path, processes: Processes) -> None:
    log = tmp_path / "log"
    supervisor = processes.start([*SUPERVISE, "--log", log, "--", "sh", "-c", "echo $$; exec sleep 600"])
    child = started(log)
    supervisor.kill()
    supervisor.wait(300)
    wait_until(lambda: not lives(child), "the command to be gone")


def lives(pid: int) -> bool:
    """Not even if whoever adopted it has yet to bury it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_kill_9_at_the_top_takes_down_the_whole_stack(tmp_path: Path, processes: Processes) -> None:
    """As in an attempt: a supervisor around torchrun, another one around each rank."""
    log = tmp_path / "rank.log"
    rank = [*SUPERVISE, "--die-with-parent", "--log", log, "--", "sh", "-c", "echo $$; exec sleep 600"]
    agent = f"import subprocess; subprocess.run({[str(word) for word in rank]!r})"
    top = processes.start([*SUPERVISE, "--", sys.executable, "-c", agent])
    leaf = started(log)
    wait_until(lambda: len(processes.running()) == 4, "the four to show their mark")
    top.kill()
    top.wait(300)
    wait_until(lambda: not lives(leaf), "the rank to be gone")
    wait_until(lambda: not processes.running(), "everything to be gone")


def test_tee_shows_what_it_logs_and_waits_for_no_grandchild(tmp_path: Path, processes: Processes) -> None:
    command = [*SUPERVISE, "--tee", "--log", str(tmp_path / "log"), "--exit", str(tmp_path / "exit"), "--"]
    script = "echo shown; sleep 600 & exit 4"  # the sleeper keeps the pipe open
    done = processes.start([*command, "sh", "-c", script], stdout=subprocess.PIPE)
    assert done.wait(300) == 4
    assert done.stdout is not None
    assert done.stdout.readline() == "shown\n"
    done.stdout.close()
    assert (tmp_path / "log").read_text() == "shown\n"
    assert ended(tmp_path / "exit")["code"] == 4


def test_a_command_whose_log_hangs_is_shown_and_ends_all_the_same(
    tmp_path: Path, processes: Processes
) -> None:
    """Its supervisor waited for that disk for ever: nothing more was shown, the command was held up in what
    it printed, and nobody learned that it ended. A pipe that nobody reads stands in for the disk."""
    log, exit_file, message = tmp_path / "log", tmp_path / "exit", tmp_path / "message"
    held = tmp_path / ".exit.tmp"  # what the exit file is written to, before it has that name
    os.mkfifo(log)
    os.mkfifo(held)
    disk = [os.open(path, os.O_RDWR) for path in (log, held)]
    script = f"import sys; sys.stdout.write('a line\\n' * {3 * MOST // 7}); print('the last'); sys.exit(5)"
    words = ["--tee", "--tell-exit", "--log", str(log), "--exit", str(exit_file)]
    supervisor = processes.start(
        [*SUPERVISE, *words, "--", sys.executable, "-c", script],
        env={ENV_TERMINATION_LOG: str(message), "RANK": "0"},
        stdout=subprocess.PIPE,
    )
    try:
        assert supervisor.stdout is not None
        with supervisor.stdout as output:
            shown = [output.readline()]
            os.close(disk.pop())  # from here on who opens that waits for ever
            shown += output.readlines()
        assert supervisor.wait(300) == 5
    finally:
        for file in disk:
            os.close(file)
    assert shown[-1] == "the last\n"
    assert len(shown) == 3 * MOST // 7 + 1
    assert json.loads(message.read_text())["code"] == 5


def test_an_exit_file_whose_disk_hangs_holds_no_end_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "EXIT_SECONDS", 0.1)
    goes_on = threading.Event()
    exit_file = KeptFile(tmp_path / "exit")
    monkeypatch.setattr(exit_file, "write", lambda text: goes_on.wait(300))
    supervise.record(exit_file, supervise.how_it_ended(0))
    goes_on.set()
    assert f"cannot write {tmp_path / 'exit'}: its disk does not answer" in capfd.readouterr().err


def test_a_log_whose_disk_stood_still_for_a_while_says_what_it_lacks() -> None:
    """What came before, and what comes after, is in it."""
    goes_on, log = threading.Event(), list[bytes]()

    def disk(data: bytes) -> None:
        assert goes_on.wait(300)
        log.append(data)

    apart = Apart(disk, lambda: log.append(b"the end"))
    block = bytes(MOST // 4)
    for _ in range(6):
        apart(block)
    goes_on.set()
    wait_until(lambda: len(log) == 4, "the disk to take what waited")
    apart(b"after it\n")
    apart.end()
    note = b"\n[holdfast] %d bytes are left out here: the disk of this log stood still\n" % (2 * len(block))
    assert log == [*[block] * 4, note, b"after it\n", b"the end"]


def test_ranks_that_share_an_output_show_whole_lines_each_with_its_mark(
    tmp_path: Path, processes: Processes
) -> None:
    """Two ranks of one replica, whose lines come in pieces, one after the other's."""
    said = {
        0: "printf 'first '; {turn} printf 'half\\n[rank 0] marked already\\n'",
        3: "{turn} printf 'in between\\nand no'; printf ' end'",
    }
    went_on = tmp_path / "went-on"
    turns = {0: f"until test -e {went_on}; do sleep 0.02; done;", 3: ""}
    shown, ranks = tmp_path / "shown", []
    with shown.open("w") as out:
        for rank, script in said.items():
            command = [*SUPERVISE, "--tee", "--log", str(tmp_path / f"rank-{rank}.log"), "--", "sh", "-c"]
            ranks.append(
                processes.start(
                    [*command, script.replace("{turn}", turns[rank])],
                    env={"LOCAL_WORLD_SIZE": "2", "RANK": str(rank)},
                    stdout=out,
                )
            )
        assert ranks[1].wait(300) == 0
        went_on.touch()
        assert ranks[0].wait(300) == 0
    assert shown.read_text().splitlines() == [
        "[rank 3] in between",
        "[rank 3] and no end",
        "[rank 0] first half",
        "[rank 0] marked already",
    ]
    assert (tmp_path / "rank-3.log").read_text() == "in between\nand no end", "the log is as it was said"


def test_a_line_without_an_end_is_shown_before_it_fills_the_memory(tmp_path: Path) -> None:
    length = LONGEST_LINE * 3
    command = [*SUPERVISE, "--tee", "--log", str(tmp_path / "log"), "--", sys.executable, "-c"]
    done = subprocess.run(
        [*command, f"print('x' * {length}, end='')"],
        env={**os.environ, "LOCAL_WORLD_SIZE": "2", "RANK": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 1
    assert "".join(line.removeprefix("[rank 1] ") for line in lines) == "x" * length


@pytest.mark.parametrize("said", ["", Termination("failed", 5, 0, "ValueError: nan").to_json()])
def test_on_a_disk_that_fills_up_it_is_told_how_the_command_ended(tmp_path: Path, said: str) -> None:
    with real_disk(tmp_path / "disk", 8 << 20) as disk:
        message, up = disk / "message", tmp_path / "up"
        script = (
            f"touch {up}; while [ -e {up} ]; do sleep 0.02; done; printf %s '{said}' >> {message}; exit 9"
        )
        command = [*SUPERVISE, "--exit", str(disk / "exit"), "--tell-exit", "--", "sh", "-c", script]
        with subprocess.Popen(command, env={**os.environ, ENV_TERMINATION_LOG: str(message)}) as supervisor:
            wait_until(up.exists, "the command to start")
            fill_whole(disk)
            up.unlink()
            assert supervisor.wait(300) == 9
        assert ended(disk / "exit")["code"] == 9
        assert message.read_text() == said if said else json.loads(message.read_text())["code"] == 9


def test_an_exit_file_that_cannot_be_written_leaves_the_exit_code(tmp_path: Path) -> None:
    command = [*SUPERVISE, "--exit", str(tmp_path / "missing" / "exit"), "--", "sh", "-c", "exit 9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 9
    assert "cannot write" in done.stderr
    with open("/dev/full", "w") as full:  # as on one machine, where its own output lies on that disk
        assert subprocess.run(command, stderr=full, timeout=300, check=False).returncode == 9


TALKS = "for i in range(60_000): print('line', i, '.' * 60)"
SAID = "".join(f"line {i} {'.' * 60}\n" for i in range(60_000)).encode()
LIMIT = 1 << 20


def test_a_long_log_keeps_its_beginning_and_its_end_and_says_how_much_it_lacks(tmp_path: Path) -> None:
    """4 MB of a script that talks too much, on a disk that the checkpoints need."""
    log = tmp_path / "log"
    done = supervised(tmp_path, sys.executable, "-c", TALKS, HOLDFAST_LOG_BYTES=str(LIMIT))
    assert done.returncode == 0
    assert log.stat().st_blocks * 512 <= LIMIT
    said = log.read_bytes()
    assert len(said) == len(SAID), "who follows it stays where he is"
    found = re.search(rb"\n\[holdfast\] (\d+) bytes are left out here[^\n]*\n\0+", said)
    assert found is not None
    assert len(found[0]) == int(found[1])
    first, newest = said[: found.start()], said[found.end() :]
    assert min(len(first), len(newest)) > LIMIT // 3
    assert SAID.startswith(first)
    assert SAID.endswith(newest)


def test_a_log_is_kept_to_its_limit_while_it_is_written(tmp_path: Path, processes: Processes) -> None:
    log = tmp_path / "log"
    script = f"{TALKS}\nsys.stdout.flush(); time.sleep(600)"
    command = [*SUPERVISE, "--log", log, "--", sys.executable, "-c", f"import sys, time\n{script}"]
    supervisor = processes.start(command, env={"HOLDFAST_LOG_BYTES": str(LIMIT)})
    wait_until(lambda: log.exists() and log.stat().st_size == len(SAID), "it to say all")
    wait_until(lambda: log.stat().st_blocks * 512 <= LIMIT, "the log to be cut")
    supervisor.kill()
    supervisor.wait(300)


def test_a_log_that_is_shown_too_is_kept_to_its_limit(tmp_path: Path) -> None:
    """As in a pod, where all is shown."""
    log = tmp_path / "log"
    command = [*SUPERVISE, "--tee", "--log", str(log), "--", sys.executable, "-c", TALKS]
    environment = {**os.environ, "HOLDFAST_LOG_BYTES": str(LIMIT)}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300)
    assert done.stdout == SAID
    assert log.stat().st_blocks * 512 <= LIMIT
    assert log.read_bytes().endswith(SAID[-LIMIT // 3 :])


@pytest.mark.parametrize("tee", [True, False])
def test_where_no_holes_can_be_made_a_long_log_still_has_both_its_ends(tmp_path: Path, tee: bool) -> None:
    """As on NFS before 4.2. Here the log can be appended to and nothing else (chattr +a)."""
    with real_disk(tmp_path / "disk", 16 << 20) as disk:
        log = disk / "log"
        log.touch()
        subprocess.run(["chattr", "+a", log], check=True)
        command = [*SUPERVISE, *(["--tee"] if tee else []), "--log", str(log), "--", sys.executable, "-c"]
        environment = {**os.environ, "HOLDFAST_LOG_BYTES": str(LIMIT)}
        done = subprocess.run(
            [*command, TALKS], env=environment, capture_output=True, timeout=300, check=True
        )
        assert done.stdout == (SAID if tee else b"")
        said = log.read_bytes()
    notes = re.split(rb"\n\[holdfast\] ([^\n]*)\n", said)
    first, why, _, left_out, newest = notes
    assert why.startswith(b"its file system makes no holes, so what follows is left out, but for its end")
    assert min(len(first), len(newest)) > LIMIT // 3
    assert SAID.startswith(first)
    assert SAID.endswith(newest)
    assert left_out.startswith(b"%d bytes were left out here" % (len(SAID) - len(first) - len(newest)))


def test_it_starts_without_torch_and_numpy() -> None:
    script = "import sys, holdfast_trainer.supervise; print(sorted({'torch','numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("outcome", "option", "code"),
    [("interrupted", True, 143), ("interrupted", False, 0), ("finished", True, 0), (None, True, 0)],
)
def test_a_rank_that_saved_on_notice_keeps_no_torchrun_waiting(
    tmp_path: Path, outcome: Outcome | None, option: bool, code: int
) -> None:
    message = tmp_path / "message"
    if outcome is not None:
        message.write_text(Termination(outcome, 21, 21).to_json())
    words = ["--fail-on-notice"] if option else []
    command = [*SUPERVISE, "--exit", str(tmp_path / "exit"), *words, "--", "true"]
    environment = {**os.environ, ENV_TERMINATION_LOG: str(message)}
    assert subprocess.run(command, env=environment, check=False, timeout=300).returncode == code
    assert ended(tmp_path / "exit")["code"] == 0, "how the rank itself ended stays true"


@pytest.mark.parametrize(
    ("script", "said", "told"),
    [
        ("kill -9 $$", None, {"rank": 3, "signal": 9}),
        ("kill -SEGV $$", None, {"rank": 3, "signal": 11}),
        ("exit 7", None, {"rank": 3, "code": 7}),
        ("exit 0", None, None),
        ("kill -9 $$", Termination("failed", 5, 0, "ValueError: nan"), None),
    ],
    ids=["killed", "crashed", "a bad code", "all is well", "it has spoken itself"],
)
def test_a_bad_end_that_nobody_explains_is_told_by_the_supervisor(
    tmp_path: Path, script: str, said: Termination | None, told: dict[str, int] | None
) -> None:
    """In a pod: torchrun exits 1 whatever ended its rank."""
    message = tmp_path / "message"
    message.write_text(said.to_json() if said else "")
    command = [*SUPERVISE, "--exit", str(tmp_path / "exit"), "--tell-exit", "--", "sh", "-c", script]
    environment = {**os.environ, ENV_TERMINATION_LOG: str(message), "RANK": "3"}
    subprocess.run(command, env=environment, check=False, timeout=300)
    if told is None:
        assert message.read_text() == (said.to_json() if said else "")
        return
    end = json.loads(message.read_text())
    assert {key: end[key] for key in told} == told
    assert {key: value for key, value in end.items() if key != "rank"} == ended(tmp_path / "exit")
