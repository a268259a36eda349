"""What people type, against the real server: what they see, and what the exit code says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from served import TOKEN, Served, ingress, job_yaml, served
from typer.testing import CliRunner, Result
from waiting import wait_until

from holdfast_controller.cli import create_cli
from holdfast_controller.cli.connection import Connection, JobAddress, complete_job
from holdfast_controller.cli.watching import looks
from holdfast_controller.client import Client, Unreachable
from holdfast_controller.cluster import Event
from holdfast_controller.jobs import Phase
from holdfast_controller.local.ports import free_port

Holdfast = Callable[..., Result]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def server(running: Served) -> Served:
    for job in running.run(running.store.list_jobs()):
        running.run(running.store.remove(job))
    return running


@pytest.fixture
def holdfast(server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Holdfast:
    """The command, with the server and token in the environment; the second line of a test's story."""
    monkeypatch.setenv("HOLDFAST_SERVER", server.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path / "nothing-here"))
    return command


def command(*words: str, given: str = "", code: int | None = 0) -> Result:
    def no_controller(*_: Any) -> None:
        raise AssertionError("only `up` starts a controller")

    result = CliRunner().invoke(create_cli(no_controller, no_controller), list(words), input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml())
    return path


# ------------------------------------------------------------------- submit


def test_submit_and_get(holdfast: Holdfast, job_file: Path) -> None:
    assert holdfast("submit", str(job_file)).stdout == "default/gpt-small submitted\n"
    table = holdfast("get").stdout.splitlines()
    assert table[0].split() == ["NAME", "PHASE", "STEP", "ATTEMPT", "DISRUPTIONS", "LOST", "GOODPUT", "AGE"]
    assert table[1].split()[:6] == ["gpt-small", "Queued", "-", "0", "0", "0"]
    assert holdfast("get", "-o", "name").stdout == "gpt-small\n"


def test_submit_from_a_pipe_with_changes(holdfast: Holdfast) -> None:
    holdfast(
        "submit", "-", "--set", "spec.replicas=3", "--set", "spec.config.train.lr=1e-3",
        "--set", "metadata.name=other", "-n", "team-a", given=job_yaml(),
    )  # fmt: skip
    document = json.loads(holdfast("get", "team-a/other", "-o", "json").stdout)
    assert document["spec"]["replicas"] == 3
    assert document["spec"]["config"] == {"train": {"lr": 0.001}}


def test_what_get_prints_can_be_submitted(holdfast: Holdfast, job_file: Path) -> None:
    commit, run = "--set=metadata.labels.commit='12345e67'", "--set=spec.config.run='1e5'"
    holdfast("submit", str(job_file), commit, run)
    text = holdfast("get", "gpt-small", "-o", "yaml").stdout
    holdfast("submit", "-", "--set", "metadata.name=twin", given=text)
    assert holdfast("get", "-o", "name").stdout == "gpt-small\ntwin\n"
    twin = json.loads(holdfast("get", "twin", "-o", "json").stdout)
    assert twin["metadata"]["labels"] == {"commit": "12345e67"}
    assert twin["spec"]["config"] == {"run": "1e5"}, "text stays text"


@pytest.mark.parametrize(
    ("more", "words", "told"),
    [
        ("  env: {NO: '1'}\n", [], "spec.env: the key False is a true/false value; write it in quotes"),
        ("  config: {1: a}\n", [], "spec.config: the key 1 is a number; write it in quotes"),
        ("  config: {a: !!binary aGk=}\n", [], "spec.config.a: a bytes cannot be kept as JSON"),
        ("  config: {a: !!set {b}}\n", [], "spec.config.a: a set cannot be kept as JSON"),
        ("", ["--set", "spec.env={ON: x}"], "spec.env: the key True is a true/false value"),
        ("", ["--set", "spec.config.lr=.inf", "--dry-run"], "spec.config.lr: inf is no JSON number"),
    ],
)
def test_what_json_would_change_is_refused_as_rest_refuses_it(
    holdfast: Holdfast, more: str, words: list[str], told: str
) -> None:
    """`NO` is false to YAML. The job must not run without it, under a variable `false`."""
    assert told in holdfast("submit", "-", *words, given=job_yaml() + more, code=1).stderr
    assert holdfast("get", "-o", "name").stdout == ""


def test_a_dry_run_shows_the_plan(holdfast: Holdfast, job_file: Path) -> None:
    shown = holdfast("submit", str(job_file), "--dry-run")
    assert "- torchrun" in shown.stdout
    assert "it can run here, on the scripted engine; nothing was submitted" in shown.stdout
    refused = holdfast("submit", str(job_file), "--dry-run", "--set", "spec.gpus=32", code=1)
    assert "it cannot run here: spec.gpus: the job needs 64 GPUs and this machine has none" in refused.stderr
    assert json.loads(holdfast("submit", str(job_file), "--dry-run", "-o", "json").stdout)["feasible"] is True
    assert holdfast("get", "-o", "name").stdout == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "job.yaml: line 2, column 1: did not find expected node content"),
        (
            "metadata: {name: j}\nspec: {command: [x], replica: 2}",
            "spec.replica: unknown key; did you mean 'replicas'?",
        ),
        ("apiVersion: v1\nkind: TrainingJob", "apiVersion: 'v1' should be 'holdfast.dev/v1alpha1'"),
        ("kind: Deployment", "kind: 'Deployment' should be 'TrainingJob'"),
        (
            "metadata: {name: j}\nspec: {command: [x], gpus: 64}",
            "the job needs 64 GPUs and this machine has none",
        ),
        ("metadata: {name: A}\nspec: {comand: [x]}", "error: 3 things are wrong"),
    ],
)
def test_a_faulty_file(holdfast: Holdfast, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text + "\n")
    assert told in holdfast("submit", str(path), code=1).stderr


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("spec.replicas", "write it as a dotted path and a value, e.g. spec.replicas=2"),
        ("spec..x=1", "write it as a dotted path"),
        ("spec.command.x=1", "spec.command is ['python', 'train.py'], not a mapping"),
        ("spec.config=[1", "--set spec.config=[1: line 2, column 1"),
    ],
)
def test_a_faulty_set(holdfast: Holdfast, job_file: Path, assignment: str, told: str) -> None:
    assert told in holdfast("submit", str(job_file), "--set", assignment, code=1).stderr


def test_a_missing_file_and_a_taken_name(holdfast: Holdfast, job_file: Path, tmp_path: Path) -> None:
    assert f"there is no file {tmp_path}/no.yaml" in holdfast("submit", f"{tmp_path}/no.yaml", code=1).stderr
    assert "Is a directory" in holdfast("submit", str(tmp_path), code=1).stderr
    holdfast("submit", str(job_file))
    assert "default/gpt-small exists" in holdfast("submit", str(job_file), code=1).stderr


def test_wrong_usage_exits_2(holdfast: Holdfast) -> None:
    assert "No such command 'sumbit'" in holdfast("sumbit", code=2).stderr
    assert "Missing argument 'FILE'" in holdfast("submit", code=2).stderr
    assert "a/b names namespace 'a', but -n says 'c'" in holdfast("get", "a/b", "-n", "c", code=2).stderr
    assert "--for Done: one of Queued" in holdfast("wait", "j", "--for", "Done", code=2).stderr


# ------------------------------------------------------- finding the server


def test_no_controller(holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HOLDFAST_SERVER", address)
    told = holdfast("get", code=1).stderr
    assert told.startswith(f"error: no controller answers at {address}: start one with `holdfast up`;")
    assert "kubectl port-forward" in told
    monkeypatch.setenv("HOLDFAST_SERVER", f"http://127.0.0.2:{free_port()}")
    told = holdfast("get", code=1).stderr
    assert "look whether that is its address (--server, HOLDFAST_SERVER)" in told
    monkeypatch.setenv("HOLDFAST_SERVER", "localhost:1")
    assert "it should start with http://" in holdfast("get", code=1).stderr


def test_a_wrong_token(holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "wrong")
    assert "error: this token is not the controller's" in holdfast("get", code=1).stderr
    monkeypatch.delenv("HOLDFAST_TOKEN")
    assert "`holdfast up` prints where it is" in holdfast("get", code=1).stderr


def test_the_data_directory_leads_to_the_server(
    holdfast: Holdfast, server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOLDFAST_SERVER", "HOLDFAST_TOKEN", "HOLDFAST_DATA_DIR"):
        monkeypatch.delenv(name)
    (tmp_path / "server.json").write_text(json.dumps({"url": server.url, "tokenFile": "x", "pid": 1}))
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    holdfast("--data-dir", str(tmp_path), "get")
    token.chmod(0o644)
    assert "has mode 0644" in holdfast("--data-dir", str(tmp_path), "get", code=1).stderr


def test_this_machines_token_is_not_sent_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    assert Connection("http://127.0.0.1:8765", None, tmp_path).token() == TOKEN
    assert Connection("https://elsewhere.example", None, tmp_path).token() is None


# ---------------------------------------------------------------- showing


def history(server: Served) -> None:
    """A job that was killed once and has gone on."""
    now = datetime.now(UTC)
    server.set_status(
        "gpt-small", phase="Running", attempt=2, disruptions=1, lost_steps=12, goodput=0.934,
        first_started_at=now - timedelta(seconds=100), message="attempt 2 trains",
        progress={"step": 50, "total_steps": 200, "durable_step": 40, "loss": 2.345678,
                  "tokens_per_second": 12345.6, "eta_seconds": 192.0,
                  "save_fault": "step 45 could not be saved: No space left on device",
                  "verdict": "a step takes 9.0 ms, of which 40% waits for data: tokenise beforehand"},
        attempts=[
            {"number": 1, "started_at": now - timedelta(seconds=100), "ended_at": now - timedelta(seconds=60),
             "verdict": "Disrupted", "reason": "replica 1 was killed", "log_tail": {"0": "one\nlast words"}},
            {"number": 2, "started_at": now - timedelta(seconds=50), "resumed_step": 20,
             "resume_differences": ["ranks: 4 -> 2"], "passed_over": ["step-00000025: torn"]},
        ],
    )  # fmt: skip
    zero = now.timestamp() - 100
    key = "default/gpt-small"
    server.engine.ledger_lines[key] = [
        {"event": "attempt_start", "time": zero, "attempt": 1, "resumed_step": 0, "world_size": 2},
        {"event": "first_step", "time": zero + 5, "attempt": 1, "step": 1, "seconds": 1.0},
        {"event": "checkpoint", "time": zero + 30, "attempt": 1, "step": 20},
        {"event": "attempt_start", "time": zero + 50, "attempt": 2, "resumed_step": 20, "world_size": 2},
        {"event": "first_step", "time": zero + 54, "attempt": 2, "step": 21, "seconds": 1.0},
    ]
    server.engine.step_lines[key] = [
        *({"attempt": 1, "step": step, "time": zero + 5 + step, "loss": 3.0} for step in range(1, 33)),
        *({"attempt": 2, "step": step, "time": zero + 33 + step, "loss": 2.0} for step in range(21, 51)),
    ]


def test_the_ledger(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    assert "default/gpt-small has had no attempt yet" in holdfast("ledger", "gpt-small").stderr
    history(server)
    lines = holdfast("ledger", "gpt-small").stdout.splitlines()
    assert lines[1].split()[:9] == ["1", "Disrupted", "0", "1", "32", "20", "12", "1", "-"]
    assert lines[2].split()[:9] == ["2", "running", "20", "21", "50", "20", "-", "0", "17s"]
    assert lines[4].split()[:3] == ["ATTEMPT", "RECOVERY", "DETECT"]
    assert lines[6].split()[:3] == ["2", "17s", "-"]
    told = "2 attempts; 1 disruption; 0 failures; 12 steps lost; back after 17s; goodput 93.4%; "
    assert re.match(rf"{told}[1-9]m\d", lines[-1]), "the last grows with the clock"
    document = json.loads(holdfast("ledger", "gpt-small", "-o", "json").stdout)
    assert document["totals"]["lostSteps"] == 12
    assert (
        document["attempts"]
        == yaml.safe_load(holdfast("ledger", "gpt-small", "-o", "yaml").stdout)["attempts"]
    )


def test_what_a_plain_script_lost_is_not_called_nothing(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """It has never told of a step: what it did before it was killed is done again."""
    holdfast("submit", str(job_file))
    shown = holdfast("get").stdout.splitlines()
    assert shown[1].split()[2:6] == ["-", "0", "0", "0"], "nothing was begun, so nothing is lost"
    now = datetime.now(UTC)
    server.set_status(
        "gpt-small", phase="Running", attempt=2, disruptions=1, first_started_at=now,
        attempts=[
            {"number": 1, "started_at": now, "ended_at": now, "verdict": "Disrupted", "reason": "killed"},
            {"number": 2, "started_at": now},
        ],
    )  # fmt: skip
    server.engine.ledger_lines["default/gpt-small"] = server.engine.step_lines["default/gpt-small"] = []
    shown = holdfast("get").stdout.splitlines()
    assert shown[1].split()[2:6] == ["-", "2", "1", "-"]
    lines = holdfast("ledger", "gpt-small").stdout.splitlines()
    assert lines[1].split()[:8] == ["1", "Disrupted", "-", "-", "-", "-", "-", "-"]
    assert lines[-1].startswith("2 attempts; 1 disruption; 0 failures; lost steps not known")


def test_an_attempt_of_which_nobody_knows_the_end_does_not_run(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """The status forgets the oldest attempts. One was killed after its last line, one could write none."""
    holdfast("submit", str(job_file))
    history(server)
    job = server.job("gpt-small")
    mute = job.status.attempts[0].model_copy(update={"number": 2, "ended_at": None, "verdict": None})
    newest = job.status.attempts[1].model_copy(update={"number": 3})
    status = job.status.model_copy(update={"attempt": 3, "attempts": [mute, newest]})
    server.run(server.store.replace_status(job, status))
    for lines in (
        server.engine.ledger_lines["default/gpt-small"],
        server.engine.step_lines["default/gpt-small"],
    ):
        lines[:] = [{**line, "attempt": 3 if line["attempt"] == 2 else 1} for line in lines]
    shown = [line.split() for line in holdfast("ledger", "gpt-small").stdout.splitlines()]
    assert [row[1] for row in shown[1:4]] == ["-", "-", "running"]
    assert [row[9] for row in shown[1:3]] == ["37s", "-"], "from its start to its last step; nobody knows"


def test_describe(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    history(server)
    told = Event(datetime.now(UTC), "Warning", "Disrupted", "replica 1 was killed", count=2)
    server.run(server.store.record_event(server.job("gpt-small"), told))
    shown = holdfast("describe", "gpt-small").stdout
    for part in (
        "default/gpt-small  Running",
        "50/200  25%, 3m12s left",
        "12,346 tokens/s",
        "saved        up to step 40",
        "save failed  step 45 could not be saved: No space left on device",
        "diagnosis    a step takes 9.0 ms, of which 40% waits for data: tokenise beforehand",
        "resumed      attempt 2 goes on from step 20, as nothing newer can be used: step-00000025: torn",
        "resumed      attempt 2 goes on from step 20, and from there bits may differ: ranks: 4 -> 2",
        "2 replicas, 1 rank each, on CPU",
        "1 (any number allowed)",
        "0 (3 restarts allowed)",
        "Disrupted  replica 1 was killed",
        "Last lines of rank 0 in attempt 1",
        "  last words",
    ):
        assert part in shown, shown
    assert max(map(len, shown.splitlines())) < 200, "nothing is padded to the width of a pipe"


def test_what_a_program_told_its_terminal_is_not_done_to_that_of_a_reader(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """The screen of whoever asked why a job had failed was cleared, and what came next was red."""
    holdfast("submit", str(job_file))
    tail = "\x1b[31mred, to the end\n\x1b[2J\x1b[Hcleared\x1b]0;named\x07\n\x1bcreset\ncut short\x1b["
    server.set_status(
        "gpt-small", phase="Failed", attempt=1,
        attempts=[{"number": 1, "verdict": "Failed", "log_tail": {"0": tail}}],
    )  # fmt: skip
    shown = holdfast("describe", "gpt-small").stdout
    assert "\x1b" not in shown
    for part in ("  red, to the end", "  cleared", "reset", "  cut short"):
        assert part in shown, shown


def test_brackets_are_shown_as_they_were_written(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    """As Hydra's lists have them; to a console that takes them for markup they are a style, or a fault."""
    words = ["python", "t.py", "data.paths=[/data/a,/data/b]", "--betas=[beta1,beta2]", "--say=:warning:"]
    odd = "[red]step[/] 3 of [/data/a] :warning:"
    holdfast("submit", str(job_file), f"--set=spec.command={json.dumps(words)}")
    server.set_status(
        "gpt-small", phase="Running", attempt=1, message=odd, progress={"step": 1, "verdict": odd},
        attempts=[{"number": 1, "started_at": datetime.now(UTC), "verdict": "Failed", "reason": odd,
                   "resumed_step": 1, "resume_differences": [odd], "log_tail": {"0": odd}}],
    )  # fmt: skip
    server.run(
        server.store.record_event(server.job("gpt-small"), Event(datetime.now(UTC), "Warning", "Odd", odd))
    )
    shown = holdfast("describe", "gpt-small").stdout
    assert f"command      {' '.join(words)}" in shown
    assert shown.count(odd) == 6, "message, diagnosis, resumed, attempt, event, last words"
    assert odd in holdfast("get", "-o", "wide").stdout
    assert odd in holdfast("top", "--once").stdout
    assert odd in holdfast("ledger", "gpt-small").stdout


def test_get_wide_and_of_all_namespaces(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    holdfast("submit", str(job_file), "-n", "team-a", "--set", "metadata.labels.team=a")
    history(server)
    wide = holdfast("get", "-o", "wide").stdout
    assert "attempt 2 trains" in wide
    assert "12,346" in wide
    assert [line.split()[0] for line in holdfast("get", "-A").stdout.splitlines()[1:]] == [
        "default",
        "team-a",
    ]
    assert holdfast("get", "-A", "-l", "team=a", "-o", "name").stdout == "team-a/gpt-small\n"
    assert len(json.loads(holdfast("get", "-A", "-o", "json").stdout)["items"]) == 2
    assert holdfast("get", "-n", "none").stderr == "no jobs in namespace none\n"


def test_top_shows_each_job_and_the_sum(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    assert "No jobs. Submit one" in holdfast("top", "--once").stdout
    holdfast("submit", str(job_file))
    history(server)
    shown = holdfast("top", "--once").stdout
    assert "1 Running   12,346 tokens/s" in shown
    assert "50/200" in shown
    assert "██▒···········" in shown, "the saved part of the bar is solid, what a loss would take is light"


def test_logs(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    assert "default/gpt-small has had no attempt yet" in holdfast("logs", "gpt-small", code=1).stderr
    server.set_status("gpt-small", phase="Succeeded", attempt=1)
    server.engine.output[("default/gpt-small", 1, 0)] = ["a", "b\rc", "[bold]d"]
    assert holdfast("logs", "gpt-small").stdout == "a\nb\rc\n[bold]d\n"
    assert holdfast("logs", "gpt-small", "--tail", "1", "--attempt", "1").stdout == "[bold]d\n"
    assert holdfast("logs", "-f", "gpt-small").stdout == "==> attempt 1 <==\na\nb\rc\n[bold]d\n"
    assert "rank 7: default/gpt-small has 2" in holdfast("logs", "gpt-small", "--rank", "7", code=1).stderr


# ---------------------------------------------------------------- changing


def test_drill_suspend_resume_delete(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    assert "is Queued: nothing of it runs" in holdfast("drill", "gpt-small", code=1).stderr
    server.set_status("gpt-small", phase="Running", attempt=1)
    server.engine.running["default/gpt-small"] = [0, 1]
    done = holdfast("drill", "gpt-small", "--replica", "1", "--kind", "notice").stdout
    assert done == "default/gpt-small: replica 1 of attempt 1 given notice\n"
    assert "'flood' is not one of" in holdfast("drill", "gpt-small", "--kind", "flood", code=2).stderr
    assert (
        "default/gpt-small does not train again after 0 s"
        in holdfast("drill", "gpt-small", "--wait", "--timeout", "0", code=4).stderr
    )
    assert "gpt-small is being suspended; `holdfast resume gpt-s" in holdfast("suspend", "gpt-small").stdout
    assert server.job("gpt-small").spec.suspend
    server.set_status("gpt-small", phase="Suspended", attempt=1)
    assert "gpt-small is suspended; `holdfast resume gpt-small`" in holdfast("suspend", "gpt-small").stdout
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
    assert "the server answered 503 without a reason; waiting for it" in result.stderr
    told = "default/gpt-small is gone" if words == ["delete"] else "verdict   Disrupted: replica 1 was killed"
    assert told in result.stdout


# ----------------------------------------------------------------- waiting


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


def test_submit_and_stay_until_it_failed(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    def run() -> None:
        wait_until(lambda: server.run(server.store.list_jobs()), "the job")
        server.set_status("gpt-small", phase="Running", attempt=1, progress={"step": 1, "total_steps": 10})
        server.set_status("gpt-small", phase="Failed", attempt=1, message="no retry is left")

    reconciler = threading.Thread(target=run, daemon=True)
    reconciler.start()
    result = holdfast("submit", str(job_file), "-w", code=3)
    reconciler.join(300)
    assert "Failed  attempt 1  step 1/10" in result.stdout
    assert "error: default/gpt-small failed: no retry is left" in result.stderr


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


# -------------------------------------------------------------- completion


def test_job_names_are_completed(
    holdfast: Holdfast, server: Served, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast("submit", str(job_file))
    holdfast("submit", str(job_file), "--set", "metadata.name=resnet")
    ctx = typer.Context(typer.main.get_command(create_cli(lambda *_: None, lambda *_: None)))
    ctx.params = {"server": server.url}
    assert complete_job(ctx, "") == ["gpt-small", "resnet"]
    assert complete_job(ctx, "g") == ["gpt-small"]
    ctx.params = {"server": f"http://127.0.0.1:{free_port()}"}
    assert complete_job(ctx, "g") == [], "no controller, no names, no traceback in the user's line"
