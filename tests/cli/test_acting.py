"""Commands that act on jobs and wait for what comes of it, against the real server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from served import TOKEN, Served, history, ingress, job_yaml, served
from typed import Holdfast, command
from waiting import wait_until

from holdfast_controller import client
from holdfast_controller.cli.connection import JobAddress
from holdfast_controller.cli.watching import looks
from holdfast_controller.client import Client, Unreachable
from holdfast_controller.jobs import Phase
from holdfast_controller.local.ports import free_port


@contextmanager
def dying(port: int) -> Iterator[list[bytes]]:
    """A controller that dies as soon as it was asked for something, and what that was."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", port))

    def take_one() -> None:
        connection, _ = listener.accept()
        listener.close()
        with connection:
            asked.append(connection.recv(1 << 16))

    taking = threading.Thread(target=take_one, daemon=True)
    taking.start()
    yield asked
    taking.join(300)


def test_a_submission_outlives_the_controller_that_took_it(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that one had made the job nobody knows: the next one is asked by the same key."""
    port = free_port()
    monkeypatch.setenv("HOLDFAST_SERVER", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    submitted = threading.Event()

    def controllers() -> None:
        with dying(port) as asked:
            wait_until(lambda: asked, "the submission")
        with served(tmp_path, port=port) as second:
            submitted.wait(300)
            assert second.job("gpt-small")

    with ThreadPoolExecutor() as replaced:
        end = replaced.submit(controllers)
        assert command("submit", str(job_file)).stdout == "default/gpt-small submitted\n"
        submitted.set()
        end.result(300)


def test_that_nobody_knows_whether_a_job_was_submitted_is_said(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That no controller answered there was half of it: one had been asked."""
    port = free_port()
    monkeypatch.setenv("HOLDFAST_SERVER", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    monkeypatch.setattr(client, "SUBMIT_SECONDS", 0.5)
    with dying(port):
        told = command("submit", str(job_file), code=1).stderr
    assert "before it answered: whether the job was submitted is not known; `holdfast get` tells" in told
    told = command("submit", str(job_file), code=1).stderr
    assert "no controller answers at" in told, "nobody can have taken this one"


def test_drill_suspend_resume_delete(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    assert "is Queued: nothing of it runs" in holdfast("drill", "gpt-small", code=1).stderr
    server.set_status("gpt-small", phase="Running", attempt=1)
    server.engine.running["default/gpt-small"] = [0, 1]
    done = holdfast("drill", "gpt-small", "--replica", "1", "--kind", "notice").stdout
    assert done == "default/gpt-small: replica 1 of attempt 1 given notice\n"
    told = holdfast("drill", "gpt-small", "--replica", "1", "-o", "json").stdout
    assert json.loads(told) == {"attempt": 1, "replica": 1, "kind": "kill"}
    assert "'flood' is not one of" in holdfast("drill", "gpt-small", "--kind", "flood", code=2).stderr
    assert (
        "default/gpt-small does not train again after 0 s"
        in holdfast("drill", "gpt-small", "--wait", "--timeout", "0", code=4).stderr
    )
    assert "is being suspended; `holdfast resume default/gpt-s" in holdfast("suspend", "gpt-small").stdout
    assert server.job("gpt-small").spec.suspend
    server.set_status("gpt-small", phase="Suspended", attempt=1)
    assert "is suspended; `holdfast resume default/gpt-small`" in holdfast("suspend", "gpt-small").stdout
    holdfast("resume", "gpt-small")
    assert not server.job("gpt-small").spec.suspend
    assert (
        "is not gone after 0.1 s"
        in holdfast("delete", "gpt-small", "--wait", "--timeout", "0.1", code=4).stderr
    )


def test_a_drill_whose_job_ends_with_it_is_reported_without_the_steps(
    holdfast: Holdfast, server: Served, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster rank 0 tells the steps, and it has gone with the job: the notice came at the last step."""
    holdfast("submit", str(job_file))
    history(server)
    server.engine.running["default/gpt-small"] = [0, 1]
    monkeypatch.setattr(server.engine, "no_steps", "no rank 0 runs that could tell its steps")

    def finish_once_drilled() -> None:
        wait_until(lambda: server.engine.drills, "the drill")
        *before, last = server.job("gpt-small").status.model_dump()["attempts"]
        last |= {"verdict": "Finished", "ended_at": datetime.now(UTC)}
        server.set_status("gpt-small", phase="Succeeded", attempts=[*before, last])

    server.engine.drills.clear()
    reconciler = threading.Thread(target=finish_once_drilled, daemon=True)
    reconciler.start()
    result = holdfast("drill", "gpt-small", "--kind", "notice", "--wait")
    reconciler.join(300)
    assert "verdict   Finished" in result.stdout
    assert "resume    not known" in result.stdout
    assert "no proof: no rank 0 runs that could tell its steps" in result.stderr


def test_a_drill_of_a_program_that_tells_nothing_of_its_steps_is_reported_as_such(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """No checkpoint of it is known: there is no step to count, and nobody is asked for its steps."""
    holdfast("submit", str(job_file))
    server.engine.running["default/gpt-small"] = [0, 1]
    for known in (server.engine.drills, server.engine.ledger_lines, server.engine.step_lines):
        known.clear()
    first = {"number": 1, "opened_at": datetime.now(UTC)}
    server.set_status("gpt-small", phase="Running", attempt=1, attempts=[first])

    def go_on_once_drilled() -> None:
        wait_until(lambda: server.engine.drills, "the drill")
        hit = first | {"verdict": "Disrupted", "reason": "replica 1: Drilled: killed on request"}
        after = {"number": 2, "opened_at": datetime.now(UTC)}
        server.set_status("gpt-small", phase="Running", attempt=2, attempts=[hit, after])

    reconciler = threading.Thread(target=go_on_once_drilled, daemon=True)
    reconciler.start()
    result = holdfast("drill", "gpt-small", "--replica", "1", "--wait")
    reconciler.join(300)
    assert result.stdout.splitlines()[1:] == [
        "  verdict   Disrupted: replica 1: Drilled: killed on request",
        "  lost      not known: its program tells nothing of its steps; "
        "`Run` from holdfast_trainer.run makes them known",
    ]
    assert result.stderr == ""


def test_a_drill_s_report_has_the_keys_of_the_ledger(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """It had others, such as lost_steps: who reads both with one program found no lostSteps in it."""
    holdfast("submit", str(job_file))
    history(server)
    server.engine.running["default/gpt-small"] = [0, 1]
    *before, last = server.job("gpt-small").status.model_dump()["attempts"]
    ended = last | {"verdict": "Finished", "ended_at": datetime.now(UTC)}

    def finish_once_drilled() -> None:
        wait_until(lambda: server.engine.drills, "the drill")
        server.set_status("gpt-small", phase="Succeeded", attempts=[*before, ended])

    server.engine.drills.clear()
    reconciler = threading.Thread(target=finish_once_drilled, daemon=True)
    reconciler.start()
    report = json.loads(holdfast("drill", "gpt-small", "--wait", "-o", "json").stdout)
    reconciler.join(300)
    account = json.loads(holdfast("ledger", "gpt-small", "-o", "json").stdout)["attempts"][-1]
    both = {"attempt", "verdict", "reason", "lastStep", "durableStep", "resumedStep", "lostSteps"}
    assert both <= report.keys() & account.keys()
    assert report.keys() - account.keys() == {"again", "different", "proof"}
    assert report["lastStep"] == account["lastStep"]


def test_what_may_be_out_of_date_is_said_once(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    server.store.fault = "cannot write jobs.db: the disk is full"
    done = holdfast("describe", "gpt-small")
    assert done.stderr == (
        "warning: what is told of jobs may be out of date: cannot write jobs.db: the disk is full\n"
    )
    server.store.fault = None
    assert holdfast("describe", "gpt-small").stderr == ""


def test_a_job_that_is_not_there_keeps_no_other_from_being_deleted(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    holdfast("submit", str(job_file))
    done = holdfast("delete", "gone", "gpt-small", code=1)
    assert done.stdout == "default/gpt-small is being deleted\n"
    assert "error: no job default/gone" in done.stderr
    assert server.job("gpt-small").metadata.deletion_timestamp


@pytest.fixture
def sweep(holdfast: Holdfast, server: Served, tmp_path: Path) -> list[str]:
    """Three jobs of a sweep; the first failed ten days ago, the second came through just now."""
    names = ["lr-1", "lr-2", "lr-3"]
    for name in names:
        (tmp_path / "one.yaml").write_text(job_yaml(name=name))
        holdfast("submit", str(tmp_path / "one.yaml"), "--set", "metadata.labels={sweep: lr}")
    now = datetime.now(UTC)
    ended = {"attempt": 1, "message": "no retry is left"}
    server.set_status("lr-1", phase="Failed", finished_at=now - timedelta(days=10), **ended)
    server.set_status("lr-2", phase="Succeeded", finished_at=now, **ended)
    server.set_status("lr-3", phase="Running", attempt=1)
    return names


def test_several_jobs_are_named_or_selected_by_their_labels(
    holdfast: Holdfast, server: Served, sweep: list[str]
) -> None:
    """Who has fifty jobs of a sweep would write a loop around each command."""
    assert holdfast("get", "lr-3", "lr-1", "-o", "name").stdout == "lr-3\nlr-1\n"
    assert holdfast("get", "-A", "--phase", "failed", "-o", "name").stdout == "default/lr-1\n"
    assert "one of Queued," in holdfast("get", "--phase", "lost", code=2).stderr
    shown = holdfast("top", "--once", "-A", "-l", "sweep=other").stdout
    assert "lr-" not in shown

    suspended = holdfast("suspend", "-l", "sweep=lr", code=1)
    assert suspended.stdout.startswith("default/lr-3 is being suspended")
    assert suspended.stderr.count("error: ") == 2, "those that have ended, and they keep no other from it"
    assert holdfast("resume", "lr-3", "gone", code=1).stdout == "default/lr-3 goes on\n"

    waited = holdfast("wait", *sweep, "--timeout", "0", code=3)
    assert waited.stdout == "default/lr-2 is Succeeded\n"
    assert "lr-1 is Failed and will never be Succeeded: no retry" in waited.stderr
    assert "lr-3 is Running, not Succeeded, after 0 s" in waited.stderr
    assert "no such jobs in namespace default" in holdfast("wait", "-l", "sweep=none", code=1).stderr
    for command_ in ("suspend", "resume", "delete", "wait"):
        assert "name one or several jobs" in holdfast(command_, code=2).stderr
        for selector in (",", " ", "sweep=lr,"):  # as of variables that are not set: it was each job there is
            assert "an empty term in" in holdfast(command_, "-l", selector, code=1).stderr
        assert "a JOB cannot be given together" in holdfast(command_, "lr-1", "-l", "a", code=2).stderr


def test_old_jobs_are_deleted_by_how_long_ago_they_ended(
    holdfast: Holdfast, server: Served, sweep: list[str]
) -> None:
    """Their checkpoints go with them, so the command can be tried first; what runs has not ended."""
    old = ("delete", "--finished-for", "7d", "-l", "sweep")
    assert holdfast(*old, "--dry-run").stdout == "default/lr-1 would be deleted\n"
    assert server.job("lr-1").metadata.deletion_timestamp is None
    assert holdfast(*old).stdout == "default/lr-1 is being deleted\n"
    assert server.job("lr-1").metadata.deletion_timestamp
    rest = holdfast("delete", "--finished-for", "0s", "--phase", "Succeeded").stdout
    assert rest == "default/lr-2 is being deleted\n"
    assert not server.job("lr-3").metadata.deletion_timestamp
    assert "write it as 90s, 30m, 12h or 7d" in holdfast("delete", "--finished-for", "week", code=2).stderr


@pytest.mark.parametrize(
    "words",
    [
        ["delete", "-l", "sweep=lr", "--finished-for", ""],
        ["delete", "--finished-for", "7d", "-l", ""],
        ["delete", "-l", "sweep=lr", "-n", ""],
        ["--server", "", "delete", "lr-1"],
        ["--data-dir", "", "delete", "lr-1"],
        ["--token-file", "", "delete", "lr-1"],
        ["up", "--data-dir", ""],
    ],
    ids=" ".join,
)
def test_what_is_typed_and_empty_is_not_taken_for_what_is_left_out(
    holdfast: Holdfast, server: Served, sweep: list[str], words: list[str]
) -> None:
    """As where a script's variable is not set: of --finished-for "$AGE" jobs that run were deleted, of
    --data-dir "$DIR" the current directory was the controller's."""
    assert "it is empty, as of a variable that is not set" in holdfast(*words, code=2).output
    assert all(server.job(name).metadata.deletion_timestamp is None for name in sweep)


def test_delete_waits_until_it_is_gone(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))

    def remove_once_marked() -> None:
        wait_until(lambda: server.job("gpt-small").metadata.deletion_timestamp, "the deletion")
        server.run(server.store.remove(server.job("gpt-small")))

    reconciler = threading.Thread(target=remove_once_marked, daemon=True)
    reconciler.start()
    assert holdfast("delete", "gpt-small", "--wait").stdout.endswith("default/gpt-small is gone\n")
    reconciler.join(300)


@pytest.mark.parametrize("words", [["delete"], ["drill", "--kind", "kill"]], ids=["delete", "drill"])
def test_who_waits_for_what_a_command_brings_about_outlives_the_controller(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced after it took the request: the one that comes carries it out."""
    port = free_port()
    monkeypatch.setenv("HOLDFAST_SERVER", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    ready, done = threading.Event(), threading.Event()

    def asked_for(server: Served) -> bool:
        return bool(server.engine.drills or server.job("gpt-small").metadata.deletion_timestamp)

    def controllers() -> None:
        with served(tmp_path, port=port) as first, Client(first.url, TOKEN) as client:
            client.submit(yaml.safe_load(job_yaml()), "default")
            first.set_status("gpt-small", phase="Running", attempt=1)
            first.engine.running["default/gpt-small"] = [0, 1]
            ready.set()
            wait_until(lambda: asked_for(first), "the request")
        with ingress(port, 503) as refused:
            wait_until(lambda: refused, "the wait to ask while there is none")
        with served(tmp_path, port=port) as second:
            if words == ["delete"]:
                second.run(second.store.remove(second.job("gpt-small")))
            else:
                history(second)
            done.wait(300)

    replaced = threading.Thread(target=controllers, daemon=True)
    replaced.start()
    assert ready.wait(300)
    result = command(words[0], "gpt-small", *words[1:], "--wait", code=None)
    done.set()
    replaced.join(300)
    # Nobody listens between the first one's end and the 503s: which of the two it meets first is open.
    assert "; waiting for it" in result.stderr
    told = "default/gpt-small is gone" if words == ["delete"] else "verdict   Disrupted: replica 1 was killed"
    assert told in result.stdout


@pytest.mark.parametrize(
    ("phase", "words", "code", "told"),
    [
        ("Succeeded", [], 0, "default/gpt-small is Succeeded"),
        ("Failed", [], 3, "is Failed and will never be Succeeded: no retry is left"),
        ("Failed", ["--for", "failed"], 0, "default/gpt-small is Failed"),
        ("Failed", ["--for", "Final"], 3, "default/gpt-small is Failed"),
        ("Succeeded", ["--for", "Running"], 3, "is Succeeded and will never be Running"),
        ("Running", ["--timeout", "0"], 4, "is Running, not Succeeded, after 0 s"),
    ],
)
def test_wait(
    holdfast: Holdfast, server: Served, job_file: Path, phase: str, words: list[str], code: int, told: str
) -> None:
    holdfast("submit", str(job_file))
    server.set_status("gpt-small", phase=phase, message="no retry is left")
    assert told in holdfast("wait", "gpt-small", *words, code=code).output


@pytest.mark.parametrize("colours", ["0", "1"])
def test_submit_and_stay_until_it_failed(
    holdfast: Holdfast, server: Served, job_file: Path, monkeypatch: pytest.MonkeyPatch, colours: str
) -> None:
    """Where a runner of CI asks for colours, its log still has lines: it had all that moves a cursor."""
    monkeypatch.setenv("FORCE_COLOR", colours)

    def run() -> None:
        wait_until(lambda: server.run(server.store.list_jobs()), "the job")
        server.set_status("gpt-small", phase="Running", attempt=1, progress={"step": 1, "total_steps": 10})
        server.set_status("gpt-small", phase="Failed", attempt=1, message="no retry is left")

    reconciler = threading.Thread(target=run, daemon=True)
    reconciler.start()
    result = holdfast("submit", str(job_file), "-w", code=3)
    reconciler.join(300)
    assert "Failed  attempt 1  step 1/10" in result.stdout
    assert "\x1b" not in result.stdout
    assert (
        "error: default/gpt-small failed: no retry is left; `holdfast describe default/gpt-small` has"
        in result.stderr
    )


def test_a_wait_outlives_the_controller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs run on while the controller is away; whoever waits for one goes on waiting."""
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", TOKEN) as client:
        seen = looks(client, JobAddress("default", "gpt-small"))
        with served(tmp_path, port=port) as first:
            client.submit(yaml.safe_load(job_yaml()), "default")
            assert next(seen).status.phase == Phase.QUEUED
            first.set_status("gpt-small", phase="Running")
            assert next(seen).status.phase == Phase.RUNNING
        phases: list[Phase] = []
        waiting = threading.Thread(target=lambda: phases.append(next(seen).status.phase), daemon=True)
        waiting.start()
        wait_until(lambda: "waiting for it" in capsys.readouterr().err, "the wait to notice")
        with served(tmp_path, port=port):
            waiting.join(300)
    assert phases == [Phase.RUNNING]


def test_a_first_look_does_not_wait_for_a_controller() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}", TOKEN) as client,
        pytest.raises(Unreachable, match="no controller answers at"),
    ):
        next(looks(client, JobAddress("default", "gpt-small")))
