"""The one format of every measurement, and the way it is taken.

A benchmark has subjects: ours, named peers, a bare limit. They take turns within one run, each round
starting with another one, so that a machine which slows down or heats up slows all of them; warm-up
rounds are left out. What is kept are medians with their spread, and ratios computed from the rows
beside them, never from figures of another day.

build/bench/NAME.json::

    {"machine": {"cpu", "cores", "memory_gib", "gpu", "torch", "python", "system", "load"},
     "commit": "3ec1ed0... (with changes)",
     "rows": [{"subject", "metric", "unit", "median", "min", "max", "n"}],
     "ratios": {name: number}}
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "bench"


class ReportError(Exception):
    """The message names the figure and what is wrong with it."""


@dataclass(frozen=True)
class Row:
    """One metric of one subject: the median of `n` samples and their spread, in `unit`."""

    subject: str
    metric: str
    unit: str
    median: float
    min: float
    max: float
    n: int


class Report:
    """Gathers samples of one benchmark, turns them into rows and ratios, writes and prints them."""

    def __init__(self, name: str):
        self.name = name
        self.ratios: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        """What else a reader needs, beside what machine_facts tells of any machine."""
        self._samples: dict[tuple[str, str], list[float]] = {}
        self._units: dict[tuple[str, str], str] = {}

    def add(self, subject: str, metric: str, unit: str, value: float) -> None:
        """One sample. Raises ReportError for what is no finite number, or a second unit of a metric."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ReportError(f"{subject}: {metric} = {value!r} is no figure")
        key = (subject, metric)
        if self._units.setdefault(key, unit) != unit:
            raise ReportError(f"{subject}: {metric} is measured in {self._units[key]} and in {unit}")
        self._samples.setdefault(key, []).append(float(value))

    def rows(self) -> list[Row]:
        """In the order in which subjects and metrics first appeared."""
        return [
            Row(
                subject,
                metric,
                self._units[subject, metric],
                statistics.median(values),
                min(values),
                max(values),
                len(values),
            )
            for (subject, metric), values in self._samples.items()
        ]

    def median(self, subject: str, metric: str) -> float:
        """Raises ReportError where nothing was measured under these names."""
        try:
            return statistics.median(self._samples[subject, metric])
        except KeyError:
            known = ", ".join(f"{s}: {m}" for s, m in self._samples) or "nothing"
            raise ReportError(f"{subject}: {metric} was not measured; there is {known}") from None

    def ratio(self, name: str, metric: str, of: str, to: str) -> float:
        """Median of subject `of` / median of subject `to`, kept under `name`."""
        below = self.median(to, metric)
        if below == 0:
            raise ReportError(f"{name}: the median of {to} is 0 {self._units[to, metric]}")
        self.ratios[name] = self.median(of, metric) / below
        return self.ratios[name]

    def to_dict(self, machine: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
        return {
            "machine": {**machine, **self.facts},
            "commit": commit,
            "rows": [asdict(row) for row in self.rows()],
            "ratios": dict(self.ratios),
        }

    def write(self, folder: Path = RESULTS) -> Path:
        """Write NAME.json, whole or not at all. Raises ReportError where there is no row."""
        if not self._samples:
            raise ReportError(f"{self.name}: nothing was measured, so nothing is written")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        temporary = path.with_suffix(".json.tmp")
        text = json.dumps(self.to_dict(machine_facts(), commit_here()), indent=2)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
        return path

    def show(self, console: Console | None = None) -> None:
        """The rows and ratios as tables."""
        console = console or Console()
        table = Table(title=self.name, title_justify="left")
        table.add_column("subject", overflow="fold")
        table.add_column("metric", overflow="fold")
        for heading in ("median", "min", "max", "n"):
            table.add_column(heading, justify="right")
        for row in self.rows():
            figures = (f"{value:,.4g}" for value in (row.median, row.min, row.max))
            table.add_row(row.subject, f"{row.metric} ({row.unit})", *figures, str(row.n))
        console.print(table)
        for name, value in self.ratios.items():
            console.print(f"{name} = {value:,.4g}", highlight=False)

    def finish(self, console: Console | None = None, folder: Path = RESULTS) -> Path:
        """Show and write; what a benchmark ends with. What was measured is seen though the disk is full."""
        console = console or Console()
        self.show(console)
        path = self.write(folder)
        console.print(f"written to {path}", highlight=False)
        return path


def refuse_unwritable(parser: argparse.ArgumentParser, folder: Path = RESULTS) -> None:
    """End as for wrong usage where no report can be written to `folder`: not after all was measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"{folder}: what is measured could not be written there: {error.strerror}")


@contextmanager
def scratch(where: Path, name: str) -> Iterator[Path]:
    """A directory below `where` for what is measured; gone afterwards."""
    where.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(name: str, main: Callable[[], int], *told: type[Exception]) -> int:
    """A benchmark's exit code. SIGTERM ends what it has started, as Ctrl-C does; of ReportError, and what
    else is `told`, the words are shown: a traceback would speak of the benchmark, not of the subject."""
    signal.signal(signal.SIGTERM, _end)
    expected: tuple[type[Exception], ...] = (ReportError, *told)
    try:
        return main()
    except expected as error:
        print(f"bench-{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _end_children()
        return 128 + signal.SIGINT
    except SystemExit:
        _end_children()
        raise


def _end(number: int, frame: object) -> None:
    """An end that `finally` sees; a second notice is too many."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _end_children() -> None:
    """Who was being started as a signal came is in nobody's list of what to end."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


Measure = Callable[[], Mapping[str, float]]
"""Runs a subject once; the value of each metric."""


def take_turns(
    report: Report,
    subjects: Mapping[str, Measure],
    units: Mapping[str, str],
    *,
    rounds: int,
    warmup: int = 1,
    heard: Callable[[str], None] | None = None,
) -> None:
    """Measure every subject once a round, `rounds` times after `warmup` rounds that are left out.

    Round r, counted from 0, starts with subject r (modulo their number). `units` names each metric's
    unit; `heard` is told what runs now. Raises ReportError for a metric without a unit; what a subject
    raises passes, and what `report` has by then is shown: none of it will be written.
    """
    try:
        _take_turns(report, subjects, units, rounds, warmup, heard)
    except BaseException:  # of a peer that crashed, or Ctrl-C: hours may have been measured
        if report.rows():
            report.show()
        raise


def _take_turns(
    report: Report,
    subjects: Mapping[str, Measure],
    units: Mapping[str, str],
    rounds: int,
    warmup: int,
    heard: Callable[[str], None] | None,
) -> None:
    names = list(subjects)
    for turn in range(warmup + rounds):
        first = (turn - warmup) % len(names)
        for name in names[first:] + names[:first]:
            if heard:
                stage = "warm-up" if turn < warmup else f"round {turn - warmup + 1} of {rounds}"
                heard(f"{stage}: {name}")
            values = subjects[name]()
            for metric, value in values.items():
                if metric not in units:
                    raise ReportError(f"{name}: {metric} has no unit; known are {', '.join(units)}")
                if turn >= warmup:
                    report.add(name, metric, units[metric], value)


# ---------------------------------------------------------------- where it ran


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge a figure; None where this machine does not say."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu_names(),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "load": round(os.getloadavg()[0], 2),
    }


def commit_here(root: Path = ROOT) -> str | None:
    """The commit that is checked out, marked where tracked files differ from it; None outside git."""
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit} (with changes)" if changed else commit


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Processor", "cpu model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or None


def _gpu_names() -> list[str]:
    listing = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return listing.splitlines() if listing else []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
