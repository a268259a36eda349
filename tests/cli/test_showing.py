"""Commands that show jobs, their ledger and their logs, against the real server."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.text import Text
from served import Served, history, job_yaml
from typed import Holdfast

from holdfast_controller.cli import tables
from holdfast_controller.cli.formats import count, figure
from holdfast_controller.cli.live import top_view
from holdfast_controller.cli.tables import Column, event_columns, show, table
from holdfast_controller.cluster import Event
from holdfast_controller.jobs import Metadata, Phase, Spec, Status, TrainingJob


def test_the_ledger(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    assert "default/gpt-small has had no attempt yet" in holdfast("ledger", "gpt-small").stderr
    history(server)
    lines = holdfast("ledger", "gpt-small").stdout.splitlines()
    assert lines[1].split()[:9] == ["1", "Disrupted", "0", "1", "32", "20", "12", "1", "-"]
    assert lines[2].split()[:9] == ["2", "running", "20", "21", "50", "20", "-", "0", "17s"]
    assert [line.split()[9:11] for line in lines[:2]] == [["TIME", "GOODPUT"], ["40s", "55.0%"]]
    assert lines[2].split()[10] == "-", "of the second nobody has told what its steps took"
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


def test_an_attempt_that_waits_for_its_start_does_not_run(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    holdfast("submit", str(job_file), "--set", "metadata.name=waits")
    server.set_status("waits", attempt=1, attempts=[{"number": 1, "opened_at": datetime.now(UTC)}])
    assert holdfast("ledger", "waits").stdout.splitlines()[1].split()[:2] == ["1", "waiting"]


def test_describe(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    history(server)
    told = Event(datetime.now(UTC), "Warning", "Disrupted", "replica 1 was killed", count=2)
    server.run(server.store.record_event(server.job("gpt-small"), told))
    shown = holdfast("describe", "gpt-small").stdout
    for part in (
        "default/gpt-small  Running",
        "50/200  25%, 3m12s left",
        "loss         2.3457, smoothed 2.4000, gradient norm 0.7500, epoch 1.25 ",
        "memory       rank 0 took 3.21 GB at most",
        "12,346 tokens/s",
        "saved        up to step 40",
        "directory    /runs/default/gpt-small",  # for `checkpoint ls`, `du` and `cp`
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


def test_a_loop_that_tells_no_samples_is_not_said_to_be_measured_soon(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """Whoever logs the loss alone read of a speed that is not measured yet, after thousands of steps."""
    holdfast("submit", str(job_file))
    progress: dict[str, object] = {"step": 1, "total_steps": 9000}
    server.set_status("gpt-small", phase="Running", progress=progress)
    assert "speed        not measured yet" in holdfast("describe", "gpt-small").stdout
    progress |= {"step": 5000, "verdict": "a step takes 205.2 ms"}
    server.set_status("gpt-small", phase="Running", progress=progress)
    shown = holdfast("describe", "gpt-small").stdout
    assert "speed        not known: the script tells run.log no samples" in shown


def test_a_speed_that_is_of_some_time_ago_says_so(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    """A job whose rank hung was shown at full speed until it was ended for it."""
    holdfast("submit", str(job_file))
    for ago, said in ((20, False), (125, True)):
        when = datetime.now(UTC) - timedelta(seconds=ago)
        progress = {"step": 9, "tokens_per_second": 2955.0, "updated_at": when}
        server.set_status("gpt-small", phase="Running", progress=progress)
        shown = " ".join(holdfast("describe", "gpt-small").stdout.split())
        assert "speed 2,955 tokens/s" in shown
        assert bool(re.search(r"tokens/s, all as of 2m\d+s ago", shown)) is said


def test_where_no_step_is_done_there_is_no_speed(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    when = datetime.now(UTC) - timedelta(seconds=45)
    progress = {"step": 9, "memory_bytes": 10**9, "verdict": "a step takes 9.0 ms", "updated_at": when}
    server.set_status("gpt-small", phase="Running", progress=progress)
    assert re.search(r"speed +none: no step was done for 4[5-9]s", holdfast("describe", "gpt-small").stdout)
    server.set_status("gpt-small", progress=progress | {"eta_seconds": 900.0})
    shown = holdfast("describe", "gpt-small").stdout
    assert re.search(r"speed +not known: the script tells run.log no samples", shown), "its steps are long"


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (0.0, "0.0000"),
        (2.34567, "2.3457"),
        (3.14159e-5, "3.142e-05"),
        (-4e-9, "-4e-09"),
        (12345.6, "1.235e+04"),
    ],
)
def test_a_loss_that_is_small_is_not_shown_as_none(loss: float, shown: str) -> None:
    assert figure(loss) == shown


@pytest.mark.parametrize(
    ("rate", "shown"), [(0, "0"), (0.0167, "0.017"), (0.25, "0.2"), (1.5, "1.5"), (12345.6, "12,346")]
)
def test_a_speed_that_is_small_is_not_shown_as_none(rate: float, shown: str) -> None:
    assert count(rate) == shown


def test_what_happened_to_all_jobs_is_one_list(holdfast: Holdfast, server: Served, tmp_path: Path) -> None:
    """Who looks into an incident of the night does not know yet which of fifty jobs it hit."""
    now = datetime.now(UTC)
    told = [("a", 7200, "Disrupted"), ("b", 60, "Failed"), ("a", 30, "AttemptOpened")]
    for name in ("a", "b"):
        (tmp_path / "job.yaml").write_text(job_yaml(name))
        holdfast("submit", str(tmp_path / "job.yaml"), "--set", f"metadata.labels.name={name}")
    for name, ago, reason in told:
        event = Event(now - timedelta(seconds=ago), "Normal", reason, f"{reason} of {name}")
        server.run(server.store.record_event(server.job(name), event))

    def seen(*words: str) -> list[str]:
        lines = holdfast("events", *words).stdout.splitlines()[1:]
        return [" ".join(line.split()[1:4:2]) for line in lines]

    assert seen() == ["default/a Disrupted", "default/b Failed", "default/a AttemptOpened"]
    assert seen("-A", "--since", "1h") == ["default/b Failed", "default/a AttemptOpened"]
    assert seen("-A", "--since", "999999d") == seen(), "longer ago than there are years"
    assert seen("-l", "name=b") == ["default/b Failed"]
    told_of_a = json.loads(holdfast("events", "a", "--since", "1h", "-o", "json").stdout)["items"]
    assert [event["reason"] for event in told_of_a] == ["AttemptOpened"]
    nothing = holdfast("events", "-n", "none", "--since", "1h").stderr
    assert nothing == "the jobs of namespace none have no events of the newest 1h\n"
    assert "to one JOB" in holdfast("events", "-w", code=2).stderr


def test_events_are_all_shown_where_describe_has_the_newest(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """What took the first of many attempts: of eleven events `describe` has ten, and nothing had them all."""
    assert "gpt-small" in holdfast("events", "gpt-small", code=1).stderr, "there is no such job"
    holdfast("submit", str(job_file))
    none = holdfast("events", "gpt-small")
    assert (none.stdout, none.stderr) == ("", "default/gpt-small has no events\n")
    assert json.loads(holdfast("events", "gpt-small", "-o", "json").stdout) == {"items": []}
    told = [Event(datetime.now(UTC), "Warning", "Disrupted", "[red]replica 1 was killed", count=2)]
    told += [
        Event(datetime.now(UTC), "Normal", "Started", f"attempt {number} starts") for number in range(10)
    ]
    for event in told:
        server.run(server.store.record_event(server.job("gpt-small"), event))
    lines = holdfast("events", "gpt-small").stdout.splitlines()
    assert lines[0].split() == ["AGE", "TYPE", "REASON", "MESSAGE"]
    assert re.fullmatch(r" *\d+s  Warning  Disrupted  \[red\]replica 1 was killed \(x2\) *", lines[1])
    assert [line.split()[1:] for line in lines[2:]] == [
        ["Normal", "Started", "attempt", str(number), "starts"] for number in range(10)
    ]
    assert "replica 1 was killed" not in holdfast("describe", "gpt-small").stdout
    document = json.loads(holdfast("events", "default/gpt-small", "-o", "json").stdout)
    assert [item["message"] for item in document["items"]] == [event.message for event in told]
    assert document == yaml.safe_load(holdfast("events", "gpt-small", "-o", "yaml").stdout)


@pytest.mark.parametrize("width", [34, 40, 80])
def test_no_word_of_what_happened_is_cut_on_a_narrow_terminal(width: int) -> None:
    """Of forty columns the end of each line of a message was beyond the edge."""
    message = "attempt 1: replica 1: Drilled: given notice on request; 1 steps are to be done again"
    event = {"time": "2026-11-27T21:00:00Z", "type": "Warning", "reason": "AttemptOpened", "count": 1}
    screen = Console(width=width, file=io.StringIO())
    screen.print(table(event_columns([{**event, "message": message}]), width))
    assert isinstance(screen.file, io.StringIO)
    said = message.split()
    assert screen.file.getvalue().split()[-len(said) :] == said


def test_what_a_program_told_its_terminal_is_not_done_to_that_of_a_reader(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """The screen of whoever asked why a job had failed was cleared, and what came next was red."""
    holdfast("submit", str(job_file))
    tail = "\x1b[31mred, to the end\n\x1b[2J\x1b[Hcleared\x1b]0;named\x07\n\x9b2J\x1bcreset\ncut short\x1b["
    server.set_status(
        "gpt-small", phase="Failed", attempt=1,
        attempts=[{"number": 1, "verdict": "Failed", "log_tail": {"0": tail}}],
    )  # fmt: skip
    shown = holdfast("describe", "gpt-small").stdout
    assert "\x1b" not in shown
    assert "\x9b" not in shown, "the same in one character, which many terminals take as well"
    for part in ("  red, to the end", "  cleared", "reset", "  cut short"):
        assert part in shown, shown


def test_the_command_that_is_shown_is_the_one_that_runs(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """`sh -c cd src; python t.py`, as it was shown, is another one to who copies it."""
    words = ["sh", "-c", "cd src; python t.py $0", "", "\x1b[2J it's"]
    holdfast("submit", str(job_file), f"--set=spec.command={json.dumps(words)}")
    shown = holdfast("describe", "gpt-small").stdout
    assert r"""command      sh -c 'cd src; python t.py $0' '' ' it'"'"'s'""" in shown
    assert "\x1b" not in shown


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
    assert f"command      {shlex.join(words)}" in shown
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


def test_a_part_that_mig_cut_is_not_shown_as_a_gpu(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    holdfast("submit", str(job_file))
    size = "2 replicas, 1 rank each,"
    for mig, gpus, told in (
        ("1g.10gb", "1g.10gb", "a part of a GPU per replica (1g.10gb)"),
        (None, "1", "1 GPU per replica"),
    ):
        opened = {"number": 1, "replicas": 2, "processes": 1, "gpus": "1", "mig": mig}
        server.set_status("gpt-small", phase="Starting", attempt=1, attempts=[opened])
        header, row = holdfast("get", "-o", "wide").stdout.splitlines()
        assert dict(zip(header.split(), row.split(), strict=False))["GPUS"] == gpus
        assert f"{size} {told}" in holdfast("describe", "gpt-small").stdout


def test_top_shows_each_job_and_the_sum(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    assert "No jobs. Submit one" in holdfast("top", "--once").stdout
    holdfast("submit", str(job_file))
    history(server)
    shown = holdfast("top", "--once").stdout
    assert "1 Running   12,346 tokens/s" in shown
    assert "50/200" in shown
    assert "██▒···········" in shown, "the saved part of the bar is solid, what a loss would take is light"


def test_top_draws_as_many_jobs_as_the_terminal_has_room_for() -> None:
    """Of five thousand that had ended each look took ten seconds, and showed no more."""
    spec, ended, runs = Spec(command=["true"]), Status(phase=Phase.SUCCEEDED), Status(phase=Phase.RUNNING)
    jobs = [
        TrainingJob(metadata=Metadata(name=f"job-{n}"), spec=spec, status=runs if n == 4000 else ended)
        for n in range(5000)
    ]
    for known, rows in ((jobs, 20), (jobs[4000:4005], 5)):
        screen = Console(file=io.StringIO(), width=120, height=24)
        with screen.capture() as drawn:
            screen.print(top_view(known, "http://here", 120, None, height=24))
        lines = drawn.get().splitlines()
        assert len(lines) <= 24
        shown = [line.split()[0] for line in lines if line.startswith("job-")]
        assert (len(shown), shown[0]) == (rows, "job-4000")
        assert ("20 of 5,000 jobs fit here; holdfast get tells of all" in lines) is (known is jobs)


@pytest.mark.parametrize("seconds", ["1e10", "nan"])
def test_top_is_given_a_pause_that_can_be(holdfast: Holdfast, seconds: str) -> None:
    """Of years it drew once and ended in a traceback, as no clock here counts so far."""
    assert "'--interval'" in holdfast("top", "--interval", seconds, code=2).stderr


def test_top_on_a_terminal_that_only_goes_on_shows_the_jobs_once(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """As in an editor, with TERM=dumb: nothing was shown there, until Ctrl-C."""
    holdfast("submit", str(job_file))
    ours, theirs = os.openpty()
    with open(ours, encoding="utf-8") as screen:
        command = [sys.executable, "-m", "holdfast_controller", "top"]
        try:
            subprocess.run(
                command, env={**os.environ, "TERM": "dumb"}, stdout=theirs, timeout=300, check=True
            )
        finally:
            os.close(theirs)
        assert screen.readline().startswith("Holdfast http://"), "the jobs, and no code that moves a cursor"


def test_a_terminal_without_the_characters_is_shown_all_the_same(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """As under LC_ALL=de_DE, whose encoding is not UTF-8: it was a traceback."""
    holdfast("submit", str(job_file), "--set", "spec.command=[train-ş]")
    history(server)
    for words, part in ((["top", "--once"], "##=..........."), (["describe", "gpt-small"], r"train-\u015f")):
        shown = subprocess.run(
            [sys.executable, "-m", "holdfast_controller", *words],
            env={**os.environ, "PYTHONIOENCODING": "iso8859-1"},
            capture_output=True,
            encoding="iso8859-1",
            timeout=300,
            check=False,
        )
        assert (shown.returncode, shown.stderr) == (0, "")
        assert part in shown.stdout


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_a_document_is_the_same_where_the_output_has_not_all_characters(
    holdfast: Holdfast, server: Served, job_file: Path, output: str, read: Callable[[str], Any]
) -> None:
    """Under LC_ALL=de_DE a smile made it none that JSON knows, and in YAML another text."""
    words = ["say", "\N{WINKING FACE}", "\N{LATIN SMALL LETTER S WITH CEDILLA}"]
    holdfast("submit", str(job_file), f"--set=spec.command={json.dumps(words, ensure_ascii=False)}")
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast_controller", "get", "gpt-small", "-o", output],
        env={**os.environ, "PYTHONIOENCODING": "iso8859-1"},
        capture_output=True,
        encoding="iso8859-1",
        timeout=300,
        check=True,
    )
    assert read(shown.stdout)["spec"]["command"] == words


def test_logs(holdfast: Holdfast, server: Served, job_file: Path) -> None:
    holdfast("submit", str(job_file))
    assert "default/gpt-small has had no attempt yet" in holdfast("logs", "gpt-small", code=1).stderr
    server.set_status("gpt-small", phase="Succeeded", attempt=1)
    server.engine.output[("default/gpt-small", 1, 0)] = ["a", "b\rc", "[bold]d"]
    assert holdfast("logs", "gpt-small").stdout == "a\nb\rc\n[bold]d\n"
    assert holdfast("logs", "gpt-small", "--tail", "1", "--attempt", "1").stdout == "[bold]d\n"
    assert holdfast("logs", "-f", "gpt-small").stdout == "==> attempt 1 <==\na\nb\rc\n[bold]d\n"
    assert "rank 7: default/gpt-small has 2" in holdfast("logs", "gpt-small", "--rank", "7", code=1).stderr


def test_logs_of_an_attempt_that_has_written_nothing_yet(
    holdfast: Holdfast, server: Served, job_file: Path
) -> None:
    """It showed nothing and ended well, as of a job that never wrote a line."""
    holdfast("submit", str(job_file))
    server.set_status("gpt-small", phase="Running", attempt=2)
    server.engine.output |= {("default/gpt-small", *where): [] for where in ((2, 0), (1, 1))}
    shown = holdfast("logs", "gpt-small")
    assert (shown.stdout, shown.stderr) == (
        "",
        "nothing is there of rank 0 of attempt 2 of default/gpt-small; "
        "`holdfast logs default/gpt-small --attempt 1` shows what was before\n",
    )
    told = "nothing is there of rank 1 of attempt 1 of default/gpt-small\n"
    assert holdfast("logs", "gpt-small", "--attempt", "1", "--rank", "1").stderr == told
    assert holdfast("logs", "gpt-small", "--tail", "0").stderr == "", "as it was asked for"


COLUMNS = [
    Column("NAME", cells=[Text("gpt"), Text("größe-模型"), Text("")]),
    Column("PHASE", cells=[Text("Running", "bold cyan"), Text("Failed", "bold red"), Text("")]),
    Column("STEP", 1, True, cells=[Text("3,000"), Text.assemble(("##", "cyan"), "--"), Text("-")]),
    Column(
        "MESSAGE", 8, wraps=True, cells=[Text("a sentence of more than 24 characters"), Text(), Text("b")]
    ),
]


@pytest.mark.parametrize("colours", [None, "standard"])
@pytest.mark.parametrize("titled", [True, False])
def test_a_table_that_fits_is_drawn_a_line_a_row_as_rich_would_draw_it(
    colours: Any, titled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 jobs took rich eight seconds, and holdfast get with it."""

    def drawn() -> list[list[tuple[str, Style | None]]]:
        """Each character, and its style where it can be seen; without blanks at the end of a line."""
        screen = Console(file=io.StringIO(), width=70, color_system=colours, force_terminal=bool(colours))
        each = table(COLUMNS, 68)
        each.show_header = titled
        screen.print(each)
        screen.print(Padding(each, (0, 0, 0, 2), expand=False))
        assert isinstance(screen.file, io.StringIO)
        shown = [Text.from_ansi(line) for line in screen.file.getvalue().splitlines()]
        return [
            [
                (c, None if c == " " else line.get_style_at_offset(screen, n))
                for n, c in enumerate(line.plain.rstrip())
            ]
            for line in shown
        ]

    with monkeypatch.context() as without:
        without.setattr(tables, "Table", None)
        ours = drawn()
    monkeypatch.setattr(tables, "_is_of_lines", lambda columns, width: False)
    assert ours == drawn()


@pytest.mark.parametrize(("said", "width"), [("two\nlines", 80), ("more than this terminal is wide", 20)])
def test_a_sentence_that_needs_several_lines_has_them(said: str, width: int) -> None:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(table([Column("A", cells=[Text("a")]), Column("B", wraps=True, cells=[Text(said)])], width))
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()[1:]
    assert len(lines) > 1
    assert " ".join(" ".join(line[1:] for line in lines).split()) == " ".join(said.split())


def test_what_became_of_a_job_with_a_long_name_is_told_whole() -> None:
    """On 80 columns a name of 52 characters left nothing of the message, and one of 40 a letter a line."""
    said = "attempt 1: replica 0: rank 0 ended with exit code 3"
    event = {"type": "Warning", "reason": "JobFailed", "message": said, "count": 1}
    for name, width in (("x" * 52, 80), ("x" * 40, 80), ("x" * 20, 40)):
        time = datetime.now(UTC).isoformat()
        screen = Console(file=io.StringIO(), width=width)
        show(event_columns([{**event, "time": time, "job": f"default/{name}"}], jobs=True), screen)
        assert isinstance(screen.file, io.StringIO)
        lines = screen.file.getvalue().splitlines()
        assert lines[1].endswith(f"default/{name}  JobFailed  {said}")
        assert lines[0].endswith("MESSAGE"), "blanks would be a line of their own"
