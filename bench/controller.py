"""How much the controller carries: many jobs on many nodes, beside what the apiserver itself allows.

On a control plane of its own, whose nodes kwok plays and whose operator bench/controlling/operator.py,
jobs are submitted by REST until all of them run. The bare client makes the same writes for as many jobs,
with nothing to decide and nothing to watch; both take turns, with the operator's part slowed down to the
pace of the real one meanwhile, and let go afterwards. A pod runs for ever and says nothing of its progress.

  jobs                 from the first submission to the last PyTorchJob
  submit               a REST request, in the crowd: 16 clients, each request after the other
  to PyTorchJob        from when a TrainingJob was seen to when its PyTorchJob was; in the crowd, and steady:
                       so many jobs a second as the machine can take
  CPU per job          of the controller, from its submission until it runs; all that it does besides counts
  requests per job     that the controller sends to the apiserver in the same time; writes among them
  memory at rest       of the controller, when all jobs run and nothing changes
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .controlling.api import Api, api, side_by_side
from .controlling.jobs import raw_writes
from .controlling.load import CLIENTS, Sightings, keys, sightings, submit, until
from .controlling.world import Controller, OperatorPart, World, world
from .report import ROOT, Report

OURS, BARE = "holdfast", "bare client"
WRITES_A_JOB = 4
OPERATOR_PACE = 10.0
"""PyTorchJobs of one pod a second: the real operator makes about ten pods a second on two cores."""
QUIET_SECONDS = 2.0
"""Without a write, after which the controller counts as done."""
REST_SECONDS = 10.0
"""For which it is then watched."""


@dataclass
class Bench:
    """One run: who takes part, and what was seen."""

    report: Report
    server: Api
    controller: Controller
    operator: OperatorPart
    seen: Sightings
    options: argparse.Namespace
    console: Console
    submitted: int = 0
    raw: int = 0

    def say(self, line: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {line}", highlight=False)

    def check(self) -> None:
        """Raises ReportError where somebody who takes part has ended."""
        self.controller.figures()
        self.operator.check()

    def take(self, count: int) -> range:
        self.submitted += count
        return range(self.submitted - count, self.submitted)

    # ------------------------------------------------------------------ turns

    async def crowd(self, count: int, *, kept: bool = True) -> None:
        """Submit all at once; until the last has its PyTorchJob."""
        numbers = self.take(count)
        before, began = self.controller.figures(), time.perf_counter()
        took = await submit(self.controller, numbers, self.options.replicas)
        accepted = time.perf_counter() - began
        names = keys(numbers)
        wanted = self.submitted + self.raw
        await until("PyTorchJobs", lambda: len(self.seen.pytorch_jobs) >= wanted, self.operator.check)
        ended = max(self.seen.pytorch_jobs[name] for name in names)
        after = self.controller.figures()
        rate = count / (ended - began)
        passes = (after.passes - before.passes) / (ended - began)
        self.say(f"{OURS}: {count} jobs, {count / accepted:.0f} submissions/s, {rate:.0f} jobs/s")
        if not kept:
            return
        add = self.report.add
        add(OURS, "jobs", "jobs/s", rate)
        add(OURS, "submissions", "1/s", count / accepted)
        add(OURS, "submit, p50", "s", statistics.median(took))
        add(OURS, "submit, p99", "s", percentile(took, 99))
        add(OURS, "reconcile passes", "1/s", passes)
        self._latency("in the crowd", names)

    async def bare(self, count: int) -> None:
        """The same writes by a client that does nothing else."""
        work = [raw_writes(number, self.options.replicas) for number in range(self.raw, self.raw + count)]
        self.raw += count

        async def job(writes: Sequence[tuple[str, str, bytes, str]]) -> None:
            for method, path, body, kind in writes:
                await self.server.send(method, path, body, kind)

        began = time.perf_counter()
        await side_by_side(work, job, CLIENTS)
        seconds = time.perf_counter() - began
        self.say(f"{BARE}: {count} jobs, {count / seconds:.0f} jobs/s")
        self.report.add(BARE, "jobs", "jobs/s", count / seconds)
        self.report.add(BARE, "writes", "1/s", WRITES_A_JOB * count / seconds)

    async def steady(self, where: str, count: int) -> None:
        """Submit at a pace that leaves room; until all run. What a job costs, with so many there."""
        numbers, before = self.take(count), self.controller.figures()
        await submit(self.controller, numbers, self.options.replicas, self.options.steady)
        await self.settled()
        after = self.controller.figures()
        cpu = (after.cpu_seconds - before.cpu_seconds) / count
        self.say(f"steady, {where}: {count} jobs, {cpu * 1000:.1f} ms CPU each")
        self.report.add(OURS, f"CPU per job, {where}", "s", cpu)
        self.report.add(OURS, f"requests per job, {where}", "", (after.requests - before.requests) / count)
        self.report.add(OURS, f"writes per job, {where}", "", (after.writes - before.writes) / count)
        self._latency(f"steady, {where}", keys(numbers))

    def _latency(self, where: str, names: Sequence[str]) -> None:
        delays = [self.seen.pytorch_jobs[name] - self.seen.jobs[name] for name in names]
        self.report.add(OURS, f"to PyTorchJob, {where}, p50", "s", statistics.median(delays))
        self.report.add(OURS, f"to PyTorchJob, {where}, p99", "s", percentile(delays, 99))

    # ------------------------------------------------------------------- rest

    async def settled(self) -> None:
        """Until all pods run, and the controller has nothing more to write."""
        pods = (self.submitted + self.raw) * self.options.replicas
        await until("all pods to run", lambda: len(self.seen.running) >= pods, self.check, 0.5)
        quiet, writes = time.perf_counter(), -1.0

        def rests() -> bool:
            nonlocal quiet, writes
            now = self.controller.figures()
            if now.writes != writes or now.waiting:
                quiet, writes = time.perf_counter(), now.writes
            return time.perf_counter() - quiet > QUIET_SECONDS

        await until("the controller to rest", rests, self.operator.check, 0.2)

    async def rest(self) -> None:
        before = self.controller.figures()
        await asyncio.sleep(REST_SECONDS)
        after = self.controller.figures()
        self.report.add(OURS, "memory at rest", "MiB", after.memory_mib)
        self.report.add(OURS, "CPU at rest", "cores", (after.cpu_seconds - before.cpu_seconds) / REST_SECONDS)
        self.report.add(OURS, "requests at rest", "1/s", (after.requests - before.requests) / REST_SECONDS)
        self.say(f"at rest: {after.memory_mib:.0f} MiB")


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile: a value that was measured."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


async def run(report: Report, there: World, options: argparse.Namespace, console: Console) -> None:
    controller, operator = there.controller(), there.operator()
    try:
        async with api(there.kubectl.kubeconfig) as server, sightings(server) as seen:
            bench = Bench(report, server, controller, operator, seen, options, console)
            few = max(1, options.jobs // 100)
            probe = max(1, min(200, options.jobs // 20))
            crowd = (options.jobs - few - 2 * probe) // options.rounds
            bench.say(f"{there.nodes} nodes; the first {few} jobs warm it up")
            await bench.crowd(few, kept=False)
            await bench.settled()
            await bench.steady("few jobs", probe)
            for turn in range(options.rounds):
                operator.pace(OPERATOR_PACE)
                turns = (bench.bare(options.raw), bench.crowd(crowd))
                for take in turns if turn % 2 == 0 else reversed(turns):
                    await take
            bench.say("the operator's part is let go")
            operator.pace(0)
            await bench.settled()
            await bench.rest()
            await bench.steady("all jobs", probe)
    finally:
        operator.close()


def ratios(report: Report) -> None:
    """The issue's figures, of the rows beside them."""
    report.ratios["jobs_per_second"] = report.median(OURS, "jobs")
    report.ratio("share_of_raw_rate", "jobs", OURS, BARE)
    report.ratios["memory_mib_at_10000"] = report.median(OURS, "memory at rest")
    few, all_jobs = (report.median(OURS, f"CPU per job, {where}") for where in ("few jobs", "all jobs"))
    report.ratios["cost_growth_100_to_10000"] = all_jobs / few
    report.ratios["rest_p99_seconds"] = report.median(OURS, "submit, p99")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-controller",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=10_000, help="submitted in all (%(default)s)")
    parser.add_argument("--nodes", type=int, default=1_000, help="fake ones (%(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="pods of a job (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (%(default)s)")
    parser.add_argument("--raw", type=int, default=300, help="jobs of the bare client a turn (%(default)s)")
    parser.add_argument("--steady", type=float, default=20, help="jobs/s of the steady pace (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="where the JSON goes")
    options = parser.parse_args()
    for name, least in (("jobs", 20), ("nodes", 1), ("replicas", 1), ("rounds", 1), ("raw", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: at least {least} is needed")

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and end what was started
    console, report = Console(), Report("controller")
    with world(options.nodes) as there:
        asyncio.run(run(report, there, options, console))
    ratios(report)
    path = report.write(options.out)
    report.show(console)
    console.print(f"written to {path}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
