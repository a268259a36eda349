"""A preparation is killed or the disk fills up: the same command goes on and ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import Processes
from waiting import wait_until

from holdfast_trainer.token_index import read_index

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def write_corpus(root: Path, megabytes: int) -> Path:
    root.mkdir()
    chooser = random.Random(5)
    for number in range(megabytes * 4):
        text = " ".join(chooser.choice(WORDS) + str(chooser.randrange(10_000)) for _ in range(23_000))
        (root / f"{number:03d}.txt").write_text(text)
    return root


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    """The slow encoder leaves time to be killed in; which one it is changes no byte."""
    options = ["--vocab-size", "400", "--shard-tokens", "50000", "--validation-fraction", "0.1"]
    options += ["--encoder", "tokenizers"]
    return [sys.executable, "-m", "holdfast_trainer", "prepare", "--source", str(corpus), "--out", str(out),
            *options, *more]  # fmt: skip


def give(words: list[str], *, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=check, timeout=300, capture_output=True, text=True)


def run_until(processes: Processes, words: list[str], out: Path, unit: int) -> subprocess.Popen[str]:
    """Start the command and let it record that `unit` units are done."""
    run = processes.start(words, stderr=subprocess.PIPE)
    wait_until(lambda: units_done(out) >= unit or run.poll() is not None, f"unit {unit}")
    return run


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def units_done(out: Path) -> int:
    try:
        return int(json.loads((out / ".prepare.json").read_text())["next_unit"])
    except FileNotFoundError:
        return -1


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A corpus, and the bytes of a preparation that nobody disturbed."""
    root = tmp_path_factory.mktemp("untouched")
    corpus = write_corpus(root / "corpus", 6)
    give(command(corpus, root / "out", "--workers", "1"), check=True)
    return corpus, contents(root / "out")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_again_and_again_it_ends_with_the_same_bytes(
    untouched: tuple[Path, dict[str, bytes]], tmp_path: Path, processes: Processes, workers: int
) -> None:
    corpus, expected = untouched
    out = tmp_path / "out"
    reached = -1
    for until in (0, 1, 2):
        run = run_until(processes, command(corpus, out, "--workers", str(workers)), out, until)
        run.kill()
        run.communicate()
        assert run.returncode == -signal.SIGKILL
        assert not (out / "index.json").exists()
        assert units_done(out) >= max(reached, until)  # never back
        reached = units_done(out)
        wait_until(lambda: not processes.running(), "the workers to leave with their parent")
    finished = json.loads((out / ".prepare.json").read_text())["shards"]
    kept = {shard["file"]: (out / shard["file"]).stat().st_mtime_ns for shard in finished}
    assert kept
    done = give(command(corpus, out, "--workers", "2", "--encoder", "auto"), check=True)
    assert f"continuing in {out}" in done.stderr
    assert kept == {name: (out / name).stat().st_mtime_ns for name in kept}  # not written again
    assert contents(out) == expected


def test_a_source_that_changed_meanwhile_is_noticed(
    untouched: tuple[Path, dict[str, bytes]], tmp_path: Path, processes: Processes
) -> None:
    corpus = shutil.copytree(untouched[0], tmp_path / "corpus")
    out = tmp_path / "out"
    run = run_until(processes, command(corpus, out, "--workers", "1"), out, 1)
    run.kill()
    run.communicate()
    first = corpus / "000.txt"
    first.write_text(first.read_text().swapcase())
    done = give(command(corpus, out))
    assert done.returncode == 1
    assert f"error: {out} belongs to another preparation: the text was 24 files" in done.stderr


@pytest.mark.slow
def test_ctrl_c_says_how_to_continue(
    untouched: tuple[Path, dict[str, bytes]], tmp_path: Path, processes: Processes
) -> None:
    corpus, expected = untouched
    out = tmp_path / "out"
    run = run_until(processes, command(corpus, out, "--workers", "2"), out, 1)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    _, told = run.communicate(timeout=300)
    assert run.returncode == 130
    assert told.endswith(f"stopped; the same command continues in {out}\n")
    assert "Traceback" not in told
    done = give(command(corpus, out), check=True)
    assert contents(out) == expected
    assert re.search(r"prepared \S+ in [\d.]+ s since it went on: ", done.stderr), "it took longer in all"


def workers_of(processes: Processes) -> list[psutil.Process]:
    found = []
    for process in processes.running():
        with suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def tokenizer(untouched: tuple[Path, dict[str, bytes]]) -> str:
    """To train one takes longer than what is looked at here."""
    return str(untouched[0].parent / "out" / "tokenizer.json")


@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_while_workers_start_says_so_too(
    untouched: tuple[Path, dict[str, bytes]], tokenizer: str, tmp_path: Path, processes: Processes, seed: int
) -> None:
    """They ignore it from their first moment on: none of them prints what it was doing."""
    out = tmp_path / "out"
    words = command(untouched[0], out, "--workers", "2", "--tokenizer", tokenizer)
    run = processes.start(words, stderr=subprocess.PIPE)
    wait_until(lambda: workers_of(processes), "a worker to be started")
    time.sleep(random.Random(seed).uniform(0, 0.1))  # at any moment
    os.killpg(run.pid, signal.SIGINT)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 130
    assert told.endswith(f"stopped; the same command continues in {out}\n")
    assert "Traceback" not in told


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("done", [-1, 1], ids=["as soon as it is there", "at work"])
def test_a_worker_that_dies_is_told_with_a_remedy(
    untouched: tuple[Path, dict[str, bytes]],
    tokenizer: str,
    tmp_path: Path,
    processes: Processes,
    which: int,
    done: int,
) -> None:
    """Whenever it dies, also while the others start: nothing waits for it."""
    out = tmp_path / "out"
    words = command(untouched[0], out, "--workers", "2", "--tokenizer", tokenizer)
    run = processes.start(words, stderr=subprocess.PIPE)
    wait_until(lambda: units_done(out) >= done and len(workers_of(processes)) > which, "a worker to be there")
    workers_of(processes)[which].kill()
    _, told = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "error: a worker process died, perhaps for want of memory; run the same command again" in told
    assert "Traceback" not in told
    wait_until(lambda: not processes.running(), "the other worker to be gone")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = give(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)])
    if mounted.returncode:
        pytest.skip(f"a small file system can not be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_nothing_done_is_lost(
    untouched: tuple[Path, dict[str, bytes]], small_disk: Path
) -> None:
    corpus, expected = untouched
    out = small_disk / "out"
    done = give(command(corpus, out))
    assert done.returncode == 1
    assert f"error: no space left for {out}/" in done.stderr
    assert done.stderr.rstrip().endswith(
        "free some, and run the same command again: it continues where it stopped"
    )
    assert "Traceback" not in done.stderr
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    again = give(command(corpus, out), check=True)
    assert "continuing in" in again.stderr
    assert contents(out) == expected
    read_index(out)
