"""`holdfast up` as a process: how it starts, what it refuses, how it ends, and that nothing is lost."""

from __future__ import annotations

import enum
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Processes
from pydantic_core import SchemaValidator, core_schema
from waiting import Deadline

from holdfast_controller.__main__ import main
from holdfast_controller.cli.up import Voice
from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Spec, Status, TrainingJob, Verdict
from holdfast_controller.server import claim
from holdfast_controller.settings import load_settings

pytestmark = pytest.mark.long

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
JOB = """
metadata: {name: count}
spec:
  command: [SCRIPT]
  replicas: 1
  graceSeconds: 5
"""
COUNT = """#!PYTHON
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("attempt", os.environ["HOLDFAST_ATTEMPT"], flush=True)
while not os.path.exists("FINISH"):
    time.sleep(0.02)
"""

Up = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def up(processes: Processes, tmp_path: Path, deadline: Deadline) -> Up:
    """Starts a controller in `tmp_path`/data on a free port, and waits until it answers."""

    def start(*words: str) -> subprocess.Popen[str]:
        command = [HOLDFAST, "--data-dir", str(tmp_path / "data"), "up", "--port", "0", *words]
        with (tmp_path / "up.out").open("w") as output, (tmp_path / "up.err").open("a") as log:
            started = processes.start(command, stdout=output, stderr=log)

        def answers() -> bool:
            assert started.poll() is None, (tmp_path / "up.err").read_text()
            server = tmp_path / "data/server.json"
            return server.exists() and json.loads(server.read_text())["pid"] == started.pid

        deadline.wait_until(answers, "the controller to listen")
        return started

    return start


def holdfast(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HOLDFAST, "--data-dir", str(tmp_path / "data"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def end(process: subprocess.Popen[str], tmp_path: Path, number: signal.Signals = signal.SIGINT) -> str:
    """Signal it and return what it printed, once it has ended by itself without an error."""
    process.send_signal(number)
    assert process.wait(300) == 0
    return (tmp_path / "up.out").read_text()


def test_start_use_and_end(up: Up, tmp_path: Path) -> None:
    controller = up()
    data = tmp_path / "data"
    assert stat.S_IMODE((data / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert holdfast(tmp_path, "get").stderr == "no jobs in namespace default\n"
    url = json.loads((data / "server.json").read_text())["url"]
    output = end(controller, tmp_path, signal.SIGTERM)
    assert f"answers at {url}" in output
    assert f"token  {data}/token" in output
    assert f"holdfast --data-dir {data} submit job.yaml" in output
    assert output.endswith("Stopped. No job runs.\n")
    gone = holdfast(tmp_path, "get")
    assert gone.returncode == 1
    assert f"no controller runs with the data directory {data}: start one" in gone.stderr


def test_a_second_controller_on_one_directory_or_port(up: Up, tmp_path: Path) -> None:
    first = up()
    server = json.loads((tmp_path / "data/server.json").read_text())
    second = holdfast(tmp_path, "up", "--port", "0")
    assert second.returncode == 1
    assert f"another controller already uses the data directory {tmp_path}/data" in second.stderr
    assert f"(process {first.pid}, at {server['url']})" in second.stderr
    port = server["url"].rsplit(":", 1)[1]
    third = holdfast(tmp_path, "up", "--data-dir", str(tmp_path / "other"), "--port", port)
    assert third.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in third.stderr
    assert "Traceback" not in second.stderr + third.stderr
    assert holdfast(tmp_path, "get").returncode == 0, "the first one is unharmed"
    end(first, tmp_path)


def test_the_commands_that_it_says_come_next_can_be_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(data_dir=tmp_path / "my jobs", listen_port=0)
    with claim(settings) as listening:
        voice = Voice()
        voice.started(settings, listening)
    told = capsys.readouterr().out
    assert f"  holdfast --data-dir '{tmp_path}/my jobs' top\n" in told
    assert f"  data   {tmp_path}/my jobs (new: no jobs were there)\n" in told, (
        "as where a disk is not mounted"
    )
    settings.directory.database.touch()
    with claim(settings) as listening:
        Voice().started(settings, listening)
    assert f"  data   {tmp_path}/my jobs\n" in capsys.readouterr().out
    runs = Status(attempts=[AttemptRecord(number=1)])
    a = TrainingJob(metadata=Metadata(name="a"), spec=Spec(command=["x"]), status=runs)
    b = TrainingJob(metadata=Metadata(name="b"), spec=Spec(command=["x"], suspend=True))
    voice.ended([a, b])
    up = f"`holdfast --data-dir '{tmp_path}/my jobs' up`"
    assert capsys.readouterr().out == (
        f"Stopped. default/a goes on without the controller; {up} finds it again. default/b is still being "
        f"suspended: it ends after a checkpoint, or under the next {up}; "
        f"`holdfast --data-dir '{tmp_path}/my jobs' resume` lets a job go on then.\n"
    ), "who typed `holdfast up` found no job"


def test_it_refuses_a_wide_address_without_a_token(tmp_path: Path) -> None:
    refused = holdfast(tmp_path, "up", "--host", "0.0.0.0", "--no-token")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: refusing to listen on 0.0.0.0 without a token")
    assert not (tmp_path / "data").exists()


def test_it_refuses_to_start_in_a_directory_that_was_removed(tmp_path: Path) -> None:
    """As in a terminal that was left open: it ended in a traceback."""
    up = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone; exec {HOLDFAST} up --port 0"
    refused = subprocess.run(
        ["sh", "-c", up],
        env={**os.environ, "HOLDFAST_DATA_DIR": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: this terminal's directory was removed")


def test_it_refuses_to_start_where_hardly_a_file_may_be_opened(tmp_path: Path) -> None:
    """It said that its database was somebody else's, or showed a traceback."""
    up = f"ulimit -n 12; exec {HOLDFAST} --data-dir {tmp_path}/data up --port 0"
    refused = subprocess.run(["sh", "-c", up], capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "error: a process may have 12 files open here, which is too few to start"
    )
    assert not (tmp_path / "data").exists()


def test_it_refuses_a_directory_that_its_locale_cannot_name(tmp_path: Path) -> None:
    """It took jobs, started none of those that name such a file, and answered 500 to who described one."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [HOLDFAST, "--data-dir", tmp_path / "dätä", "up", "--port", "0"],
        env={**os.environ, **ascii_only},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "this process's locale (ascii) has no characters for " in done.stderr
    assert "LC_ALL=C.UTF-8" in done.stderr
    assert not (tmp_path / "dätä").exists()


def test_a_directory_whose_name_is_of_another_encoding_is_not_blamed_on_the_locale(tmp_path: Path) -> None:
    """It advised LC_ALL=C.UTF-8, which was set."""
    data = tmp_path / os.fsdecode(b"d\xe4ta")
    done = subprocess.run(
        [HOLDFAST, "--data-dir", data, "up", "--port", "0"],
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "d\\udce4ta' has a name that is not UTF-8, which no JSON takes: rename it, or start" in done.stderr
    assert not data.exists()


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("get",), "cannot tell what ~ is, the home of user 54321: set HOME, or give a data directory"),
        (("--data-dir", "~nobody-at-all/x", "up"), "cannot tell what ~nobody-at-all is, the home of nobody"),
    ],
)
def test_a_user_without_a_home_is_told_to_name_a_directory(words: tuple[str, ...], refused: str) -> None:
    """As in a container that is run as a number that its /etc/passwd does not know."""
    number = ("unshare", "--user", "--map-user=54321")
    if subprocess.run([*number, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no user namespaces here")
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_DATA_HOME")}
    told = subprocess.run(
        [*number, HOLDFAST, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert told.returncode == 1
    assert told.stderr.startswith(f"error: {refused}")


def test_a_directory_that_is_named_needs_no_home(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "~nobody-at-all")  # the one way to have none without another user
    end(up(), tmp_path)


def test_it_refuses_a_token_that_others_can_read(tmp_path: Path) -> None:
    token = tmp_path / "data/token"
    token.parent.mkdir()
    token.write_text("x" * 43)
    token.chmod(0o644)
    refused = holdfast(tmp_path, "up", "--port", "0")
    assert refused.returncode == 1
    assert f"chmod 600 {token}" in refused.stderr


def test_a_controller_that_was_killed_is_simply_started_again(up: Up, tmp_path: Path) -> None:
    first = up()
    first.send_signal(signal.SIGKILL)
    first.wait(300)
    stale = holdfast(tmp_path, "get")
    assert "no controller answers at" in stale.stderr
    second = up()
    assert holdfast(tmp_path, "get").returncode == 0
    end(second, tmp_path)


def test_a_client_command_does_not_load_the_server() -> None:
    script = (
        "import sys; from holdfast_controller.__main__ import main; import holdfast_controller.client;"
        "heavy = {'fastapi', 'uvicorn', 'aiosqlite', 'torch', 'structlog'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def _interrupted_import() -> None:
    raise KeyboardInterrupt


def _interrupted_model() -> None:
    class Member(enum.Enum):
        ONE = 1

        @property
        def value(self) -> int:
            raise KeyboardInterrupt

    SchemaValidator(core_schema.enum_schema(Member, [Member.ONE]))


@pytest.mark.parametrize("interrupted", [_interrupted_import, _interrupted_model])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(
    interrupted: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["holdfast", "version"])
    monkeypatch.setattr("holdfast_controller.cli.app.version", lambda _: interrupted())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    monkeypatch.setattr("holdfast_controller.cli.create_cli", lambda *_: _interrupted_import())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_help_loads_no_more_than_the_command_tree() -> None:
    script = (
        "import sys; from holdfast_controller.cli import create_cli;"
        "create_cli(lambda *_: None, lambda *_: None);"
        "heavy = {'pydantic', 'httpx', 'yaml', 'rich.live'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    told = subprocess.run(
        [HOLDFAST, "--help"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert "Exit codes: 0 done; 1 an error" in told


def test_a_full_disk_under_the_output_is_told_in_a_line_and_a_closed_pipe_is_no_error(
    up: Up, tmp_path: Path
) -> None:
    """A table, a document or the help into a file on a full disk, or into a pipe that nobody reads."""
    controller = up()
    job = tmp_path / "job.yaml"
    job.write_text("metadata: {name: sleeper}\nspec: {command: [sleep, '600'], suspend: true}\n")
    holdfast(tmp_path, "submit", str(job))
    ours, theirs = socket.socketpair()
    ours.close()
    with open("/dev/full", "w") as full, theirs:
        for words in ("get", "get -o yaml", "get --help", "--help"):
            command = [HOLDFAST, "--data-dir", str(tmp_path / "data"), *words.split()]
            for output, code, told in (
                (full, 1, "error: the output could not be written: No space left on device\n"),
                (theirs, 141, ""),
            ):
                done = subprocess.run(
                    command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=300, check=False
                )
                assert (done.returncode, done.stderr) == (code, told), words
    end(controller, tmp_path)


@pytest.mark.slow
def test_jobs_are_suspended_on_the_way_out_where_nobody_is_left_to_be_told(
    up: Up, processes: Processes, tmp_path: Path, deadline: Deadline
) -> None:
    """Its terminal was closed, or it is `holdfast up --stop-jobs | tee up.log` and Ctrl-C ended tee first."""
    command = [HOLDFAST, "--data-dir", str(tmp_path / "data"), "up", "--port", "0", "--stop-jobs"]
    with (tmp_path / "up.err").open("a") as log:
        controller = processes.start(command, stdout=subprocess.PIPE, stderr=log)
    assert controller.stdout is not None
    deadline.wait_until((tmp_path / "data/server.json").exists, "the controller to listen")
    controller.stdout.readline()
    job = tmp_path / "job.yaml"
    job.write_text("metadata: {name: sleeper}\nspec: {command: [sleep, '600'], graceSeconds: 5}\n")
    assert holdfast(tmp_path, "submit", str(job)).stdout == "default/sleeper submitted\n"
    controller.stdout.close()
    controller.send_signal(signal.SIGHUP)
    controller.wait(300)
    assert not (tmp_path / "data/server.json").exists()
    assert "Traceback" not in (tmp_path / "up.err").read_text()

    second = up()
    shown = json.loads(holdfast(tmp_path, "get", "sleeper", "-o", "json").stdout)
    assert shown["status"]["phase"] == "Suspended"
    end(second, tmp_path)


def test_a_closed_terminal_ends_it_in_order(processes: Processes, tmp_path: Path, deadline: Deadline) -> None:
    """Its last words found no terminal; the log, in a file, ended in a traceback, and its status was 1."""
    terminal, theirs = os.openpty()
    log = tmp_path / "up.err"
    with log.open("a") as told:
        command = [HOLDFAST, "--data-dir", str(tmp_path / "data"), "up", "--port", "0"]
        controller = processes.start(command, stdout=theirs, stderr=told)
    os.close(theirs)
    deadline.wait_until((tmp_path / "data/server.json").exists, "the controller to listen")
    read = b""
    while b"logs -f JOB" not in read:
        read += os.read(terminal, 4096)
    os.close(terminal)
    controller.send_signal(signal.SIGHUP)
    assert controller.wait(300) == 0
    assert "Traceback" not in log.read_text()
    assert not (tmp_path / "data/server.json").exists()


def test_what_waits_out_a_back_off_is_not_said_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of it runs; who believes that and leaves the machine alone comes back to no more steps."""

    def job(name: str, verdict: Verdict | None) -> TrainingJob:
        record = AttemptRecord(number=1, verdict=verdict)
        status = Status(phase=Phase.RECOVERING, attempt=1, attempts=[record])
        return TrainingJob(metadata=Metadata(name=name), spec=Spec(command=["x"]), status=status)

    ended = Voice().ended
    ended([job("a", None), job("b", Verdict.FAILED)])
    ended([job("b", Verdict.FAILED), job("c", Verdict.DISRUPTED)])
    assert capsys.readouterr().out.splitlines() == [
        "Stopped. default/a goes on without the controller; `holdfast up` finds it again. "
        "default/b starts again under the next `holdfast up`, after a back-off.",
        "Stopped. No job runs. "
        "default/b, default/c start again under the next `holdfast up`, after a back-off.",
    ]


def test_nohup_keeps_it_when_its_terminal_is_closed(tmp_path: Path) -> None:
    script = (
        "import asyncio, signal; from holdfast_controller.server import signals_set\n"
        "async def main():\n"
        "    async with signals_set(asyncio.Event()):\n"
        "        print(signal.getsignal(signal.SIGHUP).name)\n"
        "asyncio.run(main())\n"
    )
    told = subprocess.run(
        ["nohup", sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    assert told.stdout == "SIG_IGN\n"


def test_more_connections_than_files_may_be_open_are_told_of_once_and_end(
    processes: Processes, tmp_path: Path, deadline: Deadline
) -> None:
    """They say nothing, and need no token for that: the log grew by megabytes a second, and nobody, not the
    jobs either, had a turn; afterwards it answers as before."""
    up = f"{HOLDFAST} --data-dir {tmp_path}/data up --port 0"
    told = tmp_path / "up.err"
    with told.open("a") as log:
        controller = processes.start(["sh", "-c", f"ulimit -n 48; exec {up}"], stdout=log, stderr=log)
    server = tmp_path / "data/server.json"
    deadline.wait_until(server.exists, "the controller to listen")
    assert holdfast(tmp_path, "get").returncode == 0
    host, port = json.loads(server.read_text())["url"].removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(60)]
    deadline.wait_until(lambda: "ulimit -n" in told.read_text(), "the controller to say so")
    for connection in silent:
        connection.close()
    assert holdfast(tmp_path, "get").returncode == 0
    controller.send_signal(signal.SIGTERM)
    assert controller.wait(300) == 0
    assert told.read_text().count("ulimit -n") <= 2
    assert "Traceback" not in told.read_text()
    assert "out of system resource" not in told.read_text()


def test_closed_standard_streams_lead_nowhere(up: Up, tmp_path: Path) -> None:
    """As cron jobs and services may start it; the job store had the number of the closed one."""
    controller = up()

    def closed(words: str) -> subprocess.CompletedProcess[str]:
        command = f"{HOLDFAST} --data-dir {tmp_path}/data {words}"
        return subprocess.run(
            ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )

    listed = closed("get >&-")
    assert (listed.returncode, listed.stderr) == (0, "no jobs in namespace default\n")
    read = closed("submit - <&-")
    assert read.returncode == 1
    assert read.stderr.startswith("error: stdin")
    end(controller, tmp_path)


@pytest.mark.slow
def test_a_job_outlives_the_controller_unless_told_otherwise(
    up: Up, tmp_path: Path, deadline: Deadline
) -> None:
    """Ctrl-C leaves the job running; the next controller finds it; --stop-jobs suspends it first."""
    script = tmp_path / "count.py"
    script.write_text(COUNT.replace("PYTHON", sys.executable).replace("FINISH", str(tmp_path / "finish")))
    script.chmod(0o755)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("SCRIPT", str(script)))

    def logs() -> str:
        return holdfast(tmp_path, "logs", "count").stdout

    first = up()
    assert holdfast(tmp_path, "submit", str(job)).stdout == "default/count submitted\n"
    deadline.wait_until(lambda: logs() == "attempt 1\n", "the job to start")
    assert "Stopped. default/count goes on without the controller" in end(first, tmp_path)

    second = up("--stop-jobs")
    assert logs() == "attempt 1\n", "found again, not started again"
    output = end(second, tmp_path)
    assert "Suspending all jobs" in output
    assert output.endswith("Stopped. No job runs.\n")

    third = up()
    assert (
        json.loads(holdfast(tmp_path, "get", "count", "-o", "json").stdout)["status"]["phase"] == "Suspended"
    )
    assert holdfast(tmp_path, "resume", "count").returncode == 0
    deadline.wait_until(lambda: logs() == "attempt 2\n", "the job to go on")
    (tmp_path / "finish").touch()
    waited = holdfast(tmp_path, "wait", "count", "--timeout", "280")
    assert waited.stdout == "default/count is Succeeded\n", waited.stderr
    assert holdfast(tmp_path, "delete", "count", "--wait").returncode == 0
    assert not list((tmp_path / "data/runs").glob("*/*"))
    end(third, tmp_path)


SLOW_TO_SAVE = """#!PYTHON
import os, signal, sys, time
def notice(*_):
    print("saves", flush=True)
    while not os.path.exists("SAVED"):
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, notice)
print("attempt", os.environ["HOLDFAST_ATTEMPT"], flush=True)
while True:
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_jobs_that_are_being_suspended(
    up: Up, tmp_path: Path, deadline: Deadline
) -> None:
    """They save and end without the controller, which says so; the next one has them suspended."""
    script, saved = tmp_path / "slow.py", tmp_path / "saved"
    script.write_text(SLOW_TO_SAVE.replace("PYTHON", sys.executable).replace("SAVED", str(saved)))
    script.chmod(0o755)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("SCRIPT", str(script)).replace("graceSeconds: 5", "graceSeconds: 600"))

    def said(word: str) -> bool:
        return any(word in log.read_text() for log in tmp_path.glob("data/runs/*/*/attempts/*/rank-0.log"))

    first = up("--stop-jobs")
    assert holdfast(tmp_path, "submit", str(job)).stdout == "default/count submitted\n"
    deadline.wait_until(lambda: said("attempt 1"), "the job to start")
    first.send_signal(signal.SIGINT)
    deadline.wait_until(lambda: said("saves"), "the job to be told")
    output = end(first, tmp_path)
    assert "Suspending all jobs; a second Ctrl-C does not wait for them." in output
    assert "Stopped. default/count is still being suspended: it ends after a checkpoint" in output
    saved.touch()

    second = up()

    def suspended() -> bool:
        shown = json.loads(holdfast(tmp_path, "get", "count", "-o", "json").stdout)
        return bool(shown["status"]["phase"] == "Suspended")

    deadline.wait_until(suspended, "the job to be suspended")
    end(second, tmp_path)
