"""What the GPU exporter costs: time and CPU of a scrape, memory, for 1, 8 and 16 GPUs.

`holdfast exporter` runs as it does on a node, in processes of its own. NVML is the tests' stand-in, which
answers at once: a real driver adds the time of its own calls, which this does not measure. The rest is
real: as many live processes as a subject names, found through /proc, and a kubelet's answer over gRPC
with a share for each of them.

CPU at a 5 s interval is measured over such intervals, idle time between scrapes included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from tests.exporter.kubelet import kubelet, pod
from tests.nvml.stand_in import GIB, CannotCompile, Process, Script, build, busy_gpu

from .report import Measure, Report, ReportError, refuse_unwritable, run, take_turns

SIZES = ((1, 8), (8, 32), (16, 64))
"""GPUs and processes."""
NAMED = (8, 32)
INTERVAL_SECONDS = 5.0
SCRAPES = 20
"""A sample is the mean of as many scrapes in a row."""
UNITS = {
    "scrape": "s",
    "CPU of a scrape": "s",
    "memory": "MiB",
    "size of a scrape": "KiB",
    "CPU at a 5 s interval": "share of a core",
}


@dataclass(frozen=True)
class Running:
    """An exporter and the process that reads NVML for it."""

    name: str
    url: str
    process: psutil.Process

    def scrape(self) -> int:
        """Bytes of the answer. Raises ReportError where there is none, or NVML was not read."""
        try:
            with urllib.request.urlopen(self.url, timeout=60) as answer:
                text: bytes = answer.read()
        except OSError as error:
            raise ReportError(f"{self.name}: {self.url}: {error}") from error
        if b'holdfast_gpu_exporter_up{source="nvml"} 1.0' not in text:
            raise ReportError(f"{self.name}: {self.url}: the exporter did not read the stand-in for NVML")
        return len(text)

    def both(self) -> list[psutil.Process]:
        return [self.process, *self.process.children()]

    def cpu_seconds(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self.both())

    def memory_mib(self) -> float:
        """What would be free without it: pages shared with others count as their part of them."""
        return float(sum(each.memory_full_info().pss for each in self.both()) / 2**20)


def subject(gpus: int, processes: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}, {processes} processes"


@contextmanager
def ranks(count: int) -> Iterator[list[int]]:
    """Live processes that carry the names of a job's ranks."""
    started = []
    try:
        for rank in range(count):
            names = {"HOLDFAST_JOB": "team-a/bench", "HOLDFAST_ATTEMPT": "1", "RANK": str(rank)}
            started.append(subprocess.Popen(["sleep", "3600"], env=names, executable="/bin/sleep"))
        yield [each.pid for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()


@contextmanager
def exporter(directory: Path, library: Path, gpus: int, pids: list[int]) -> Iterator[Running]:
    """One over `gpus` GPUs that `pids` share evenly."""
    name = subject(gpus, len(pids))
    directory.mkdir()
    script = Script(directory / "gpus.txt", [busy_gpu(number) for number in range(gpus)])
    shares = []
    for number, pid in enumerate(pids):
        gpu = script.gpus[number % gpus]
        gpu.processes.append(Process(pid, GIB, 2))
        shares.append(pod(f"bench-1-worker-{number}", f"{gpu.uuid}::{number // gpus}"))
    script.write()
    socket = directory / "kubelet.sock"
    offered = [device for each in shares for device in each.containers[0].devices[0].device_ids]
    command = [sys.executable, "-m", "holdfast_controller", "exporter", "--port", "0"]
    with kubelet(socket, lambda: shares, offered):
        process = subprocess.Popen(
            [*command, "--pod-resources", str(socket)],
            env={"PATH": "/usr/bin:/bin", **script.environment(library)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ReportError(f"{name}: the exporter ended with {process.wait()}; it says above why")
            yield Running(name, line.split()[-1], psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def scraped(running: Running) -> Measure:
    def measure() -> Mapping[str, float]:
        cpu, began = running.cpu_seconds(), time.perf_counter()
        for _ in range(SCRAPES):
            size = running.scrape()
        seconds = time.perf_counter() - began
        return {
            "scrape": seconds / SCRAPES,
            "CPU of a scrape": (running.cpu_seconds() - cpu) / SCRAPES,
            "memory": running.memory_mib(),
            "size of a scrape": size / 1024,
        }

    return measure


def cpu_share(running: Running, intervals: int) -> float:
    """Of one core, over scrapes that come every INTERVAL_SECONDS."""
    cpu, began = running.cpu_seconds(), time.perf_counter()
    for number in range(1, intervals + 1):
        running.scrape()
        time.sleep(max(0.0, began + number * INTERVAL_SECONDS - time.perf_counter()))
    return (running.cpu_seconds() - cpu) / (time.perf_counter() - began)


def measured(report: Report, rounds: int, intervals: int, heard: Callable[[str], None]) -> None:
    """All subjects. Raises ReportError, CannotCompile."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        library = build(place)
        pids = stack.enter_context(ranks(max(processes for _, processes in SIZES)))
        running = {
            subject(gpus, count): stack.enter_context(
                exporter(place / f"{gpus}-{count}", library, gpus, pids[:count])
            )
            for gpus, count in SIZES
        }
        subjects = {name: scraped(each) for name, each in running.items()}
        take_turns(report, subjects, UNITS, rounds=rounds, heard=heard)
        metric = "CPU at a 5 s interval"
        for sample in range(3):
            heard(f"{metric}: sample {sample + 1} of 3, {intervals * INTERVAL_SECONDS:g} s each")
            named = subject(*NAMED)
            report.add(named, metric, UNITS[metric], cpu_share(running[named], intervals))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-exporter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="samples of each subject (default 7)")
    parser.add_argument("--intervals", type=int, default=4, help="of 5 s in a sample of CPU (default 4)")
    given = parser.parse_args()
    if min(given.rounds, given.intervals) < 1:
        parser.error(f"--rounds {given.rounds} --intervals {given.intervals}: at least 1 of each is needed")
    refuse_unwritable(parser)

    console = Console()
    report = Report("exporter")
    try:
        with console.status("") as status:
            measured(report, given.rounds, given.intervals, status.update)
    except CannotCompile as error:
        parser.error(str(error))
    named = subject(*NAMED)
    report.ratios["scrape_seconds_8x32"] = report.median(named, "scrape")
    report.ratios["cpu_share_at_5s"] = report.median(named, "CPU at a 5 s interval")
    report.ratios["memory_mib"] = report.median(named, "memory")
    report.finish(console)
    return 0


if __name__ == "__main__":
    sys.exit(run("exporter", main))
