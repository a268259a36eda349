"""A benchmark's figures are what was measured: fair turns, honest medians, nothing invented."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bench.report import (
    ROOT,
    Report,
    ReportError,
    commit_here,
    machine_facts,
    refuse_unwritable,
    take_turns,
)
from processes import Processes
from rich.console import Console


def measured() -> Report:
    report = Report("loading")
    for value in (3.0, 1.0, 2.0):
        report.add("ours", "seconds", "s", value)
        report.add("peer", "seconds", "s", value * 4)
    return report


def test_subjects_take_turns_and_warm_up_is_left_out() -> None:
    order: list[str] = []
    cost = {"ours": iter([99.0, 1.0, 2.0, 3.0]), "peer": iter([99.0, 4.0, 8.0, 6.0])}

    def subject(name: str):
        def measure() -> dict[str, float]:
            order.append(name)
            return {"seconds": next(cost[name])}

        return measure

    report = Report("turns")
    told: list[str] = []
    subjects = {name: subject(name) for name in cost}
    take_turns(report, subjects, {"seconds": "s"}, rounds=3, warmup=1, heard=told.append)

    assert order == ["peer", "ours", "ours", "peer", "peer", "ours", "ours", "peer"]
    assert told[0] == "warm-up: peer"
    assert told[-1] == "round 3 of 3: peer"
    rows = {row.subject: row for row in report.rows()}
    assert (rows["ours"].median, rows["ours"].min, rows["ours"].max, rows["ours"].n) == (2, 1, 3, 3)
    assert rows["peer"].median == 6


def test_what_was_measured_before_a_subject_fails_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    def crashes() -> dict[str, float]:
        raise ReportError("the peer ended with 1")

    subjects = {"ours": lambda: {"seconds": 1.25}, "peer": crashes}
    with pytest.raises(ReportError, match="the peer ended with 1"):
        take_turns(Report("turns"), subjects, {"seconds": "s"}, rounds=1, warmup=0)
    assert "1.25" in capsys.readouterr().out


def test_sigterm_leaves_nothing_of_what_is_measured_behind(tmp_path: Path) -> None:
    code = """if True:
        import os, signal, sys
        from pathlib import Path
        from bench.report import run, scratch

        def main():
            with scratch(Path(sys.argv[1]), "tune"):
                os.kill(os.getpid(), signal.SIGTERM)
            return 0

        sys.exit(run("tune", main))
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == 143
    assert list(tmp_path.iterdir()) == []


FAILS = """
import os, sys
if " ".join(sys.orig_argv[1:]).startswith(%r):
    os.write(2, b"no such wheel")
    os._exit(1)
"""


@pytest.mark.parametrize(
    ("name", "words", "broken", "said"),
    [
        ("startup", (), "-c pass", "bench-startup: `python -c pass` ended with 1: no such wheel"),
        (
            "checkpoint",
            ("--small",),
            "-m bench.checkpointing",
            "bench-checkpoint: limits (tiny) ended with 1: no such wheel",
        ),
    ],
)
def test_a_subject_that_fails_is_named_with_its_words_and_no_traceback(
    name: str, words: tuple[str, ...], broken: str, said: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILS % broken)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"bench.{name}", *words]
    bench = processes.start(command, env={"PYTHONPATH": path}, cwd=ROOT, stdout=-1, stderr=-1)
    _, told = bench.communicate(timeout=100)
    assert bench.returncode == 1
    assert said in told
    assert "Traceback" not in told


def test_a_ratio_comes_from_the_rows_beside_it() -> None:
    report = measured()
    assert report.ratio("ours_vs_peer", "seconds", "ours", "peer") == 0.25
    assert report.ratios == {"ours_vs_peer": 0.25}


def test_the_file_has_the_one_format(tmp_path: Path) -> None:
    report = measured()
    report.ratio("ours_vs_peer", "seconds", "ours", "peer")
    body = json.loads(report.write(tmp_path / "bench").read_text())
    assert set(body) == {"machine", "commit", "rows", "ratios"}
    assert set(body["machine"]) >= {"cpu", "cores", "memory_gib", "gpu", "torch"}
    assert body["rows"][0] == {
        "subject": "ours",
        "metric": "seconds",
        "unit": "s",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "n": 3,
    }
    assert body["ratios"] == {"ours_vs_peer": 0.25}
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["loading.json"]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda r: r.add("ours", "seconds", "s", float("nan")), r"ours: seconds = nan is no figure"),
        (lambda r: r.add("ours", "seconds", "ms", 1.0), r"ours: seconds is measured in s and in ms"),
        (lambda r: r.median("theirs", "seconds"), r"theirs: seconds was not measured; there is ours"),
        (lambda r: r.ratio("x", "bytes", "ours", "peer"), r"peer: bytes was not measured"),
        (lambda r: Report("empty").write(), r"empty: nothing was measured, so nothing is written"),
        (
            lambda r: take_turns(r, {"ours": lambda: {"mass": 1.0}}, {"seconds": "s"}, rounds=1),
            r"ours: mass has no unit; known are seconds",
        ),
    ],
)
def test_what_is_no_figure_is_refused(do, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        do(measured())


def test_a_ratio_to_nothing_is_refused() -> None:
    report = measured()
    report.add("idle", "seconds", "s", 0.0)
    with pytest.raises(ReportError, match="the median of idle is 0 s"):
        report.ratio("x", "seconds", "ours", "idle")


def test_the_table_shows_every_row_and_ratio() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report = measured()
    report.ratio("ours_vs_peer", "seconds", "ours", "peer")
    report.show(console)
    console.file.close()
    text = console.export_text()
    assert "peer" in text
    assert "ours_vs_peer = 0.25" in text


def test_where_nothing_can_be_written_nothing_is_measured_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_unwritable(argparse.ArgumentParser(), tmp_path / "new" / "bench")
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        refuse_unwritable(argparse.ArgumentParser(), tmp_path / "file")
    assert f"{tmp_path}/file: what is measured could not be written there" in capsys.readouterr().err


def test_what_was_measured_is_seen_though_it_cannot_be_written(tmp_path: Path) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        measured().finish(console, tmp_path / "file")
    assert "peer" in console.export_text()


def test_machine_facts_are_of_this_machine() -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0
    assert isinstance(facts["gpu"], list)


def test_the_commit_says_when_files_were_changed_after_it(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    assert commit_here(tmp_path / "nowhere") is None
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    clean = commit_here(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert commit_here(tmp_path) == f"{clean} (with changes)"


def test_a_benchmark_that_cannot_be_made_here_keeps_none_of_the_others_from_it(tmp_path: Path) -> None:
    for name, code in (("images", "raise SystemExit('needs root')"), ("startup", "print('measured')")):
        (tmp_path / "bench").mkdir(exist_ok=True)
        (tmp_path / "bench" / f"{name}.py").write_text(code)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "install.py").touch()
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shutil.copy(ROOT / "Makefile", tmp_path)
    made = subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={sys.executable}", "ARGS=", "bench"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "needs root" in made.stderr
    assert made.stdout.splitlines()[0] == "measured", made.stderr
    assert made.returncode == 2


STARTS_ONE = """
import os, signal, subprocess, sys
from bench.report import run

def main():
    child = subprocess.Popen(["sleep", "3600"])
    print(child.pid, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))  # before anybody has noted what to end

run("nothing", main)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_what_was_being_started_as_a_signal_came_ends_too(name: str) -> None:
    """It held the streams of who had started the benchmark."""
    command = [sys.executable, "-c", STARTS_ONE, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert not psutil.pid_exists(int(done.stdout))
