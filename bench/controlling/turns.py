"""The turns of both sides: a crowd, a bare client, a steady pace; and what is measured of each."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.controlling.api import Api, side_by_side
from bench.controlling.jobs import raw_writes
from bench.controlling.load import CLIENTS, Sightings, keys, submit, until
from bench.controlling.trainers import Trainers
from bench.controlling.world import Controller, Figures, OperatorPart, cpu_between
from bench.report import Report
from rich.console import Console

OURS, BARE = "holdfast", "bare client"
WRITES_A_JOB = 4
OPERATOR_PACE = 10.0
"""PyTorchJobs of one pod a second: the real operator makes about ten pods a second on two cores."""
STEP_SECONDS = 0.25
QUIET_SECONDS = 2.0
"""Without a write, after which the controller counts as done."""


@dataclass
class Bench:
    """One run: who takes part, and what was seen."""

    report: Report
    server: Api
    controller: Controller
    operator: OperatorPart | None
    """None where the real one works."""
    seen: Sightings
    options: argparse.Namespace
    console: Console
    subject: str = OURS
    submitted: int = 0
    raw: int = 0

    def say(self, line: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {line}", highlight=False)

    def check(self) -> None:
        """Raises ReportError where somebody who takes part has ended."""
        self.controller.check()
        if self.operator is not None:
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
        await until("PyTorchJobs", lambda: len(self.seen.pytorch_jobs) >= wanted, self.check, 0.5)
        ended = max(self.seen.pytorch_jobs[name] for name in names)
        after = self.controller.figures()
        rate = count / (ended - began)
        passes = (after.passes - before.passes) / (ended - began)
        self.say(f"{self.subject}: {count} jobs, {count / accepted:.0f} submissions/s, {rate:.0f} jobs/s")
        if not kept:
            return
        add = self.report.add
        add(self.subject, "jobs", "jobs/s", rate)
        add(self.subject, "submissions", "1/s", count / accepted)
        add(self.subject, "submit, p50", "s", statistics.median(took))
        add(self.subject, "submit, p99", "s", percentile(took, 99))
        add(self.subject, "reconcile passes", "1/s", passes)
        add(self.subject, "writes per job, in the crowd", "", (after.writes - before.writes) / count)
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
        idle = await self.rest(where)
        numbers, before, began = self.take(count), self.controller.figures(), time.perf_counter()
        await submit(self.controller, numbers, self.options.replicas, self.options.steady)
        after, seconds = await self.settled(), time.perf_counter() - began
        cpu = (cpu_between(before, after) - idle * seconds) / count
        told = f"{cpu * 1000:.1f} ms CPU each" if cpu > 0 else "whose CPU is less than what rest varies by"
        self.say(f"steady, {where}: {count} jobs, {told}")
        self.report.add(self.subject, f"CPU per job, {where}", "s", cpu)
        self.report.add(
            self.subject, f"requests per job, {where}", "", (after.requests - before.requests) / count
        )
        self.report.add(self.subject, f"writes per job, {where}", "", (after.writes - before.writes) / count)
        self._latency(f"steady, {where}", keys(numbers))

    def _latency(self, where: str, names: Sequence[str]) -> None:
        delays = [self.seen.pytorch_jobs[name] - self.seen.jobs[name] for name in names]
        self.report.add(self.subject, f"to PyTorchJob, {where}, p50", "s", statistics.median(delays))
        self.report.add(self.subject, f"to PyTorchJob, {where}, p99", "s", percentile(delays, 99))

    # --------------------------------------------------------------- progress

    async def progress(self, there: Trainers, jobs: int) -> None:
        """Train at an even pace; how long it takes until a step that is done stands in the job's status."""
        done: list[float] = []
        following = asyncio.create_task(self.seen.follow_steps(self.server))
        try:
            for step in range(1, self.options.steps + 1):
                there.step_done(step)
                done.append(time.perf_counter())
                await asyncio.sleep(STEP_SECONDS)
            await until("the last step in every status", lambda: self._all_at(len(done), jobs), self.check)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        delays = [delay for told in self.seen.steps.values() for delay in told_after(done, told)]
        for name, value in (("p50", statistics.median(delays)), ("p99", percentile(delays, 99))):
            self.report.add(self.subject, f"progress to status, {jobs} jobs, {name}", "s", value)
        self.say(f"progress of {jobs} jobs in their status after {percentile(delays, 99):.2f} s (p99)")

    def _all_at(self, step: int, jobs: int) -> bool:
        return len(self.seen.steps) == jobs and all(told[-1][0] >= step for told in self.seen.steps.values())

    # ------------------------------------------------------------------- rest

    async def settled(self) -> Figures:
        """Until all pods run, and the controller writes of no job any more; what it has spent by then.

        Its metrics are read when the apiserver has heard nothing for a while, not to wait for that.
        """
        pods = (self.submitted + self.raw) * self.options.replicas
        await until("all pods to run", lambda: len(self.seen.running) >= pods, self.check, 0.5)
        while True:
            began = time.perf_counter()

            def rests(since: float = began) -> bool:
                return time.perf_counter() - max(since, self.seen.last_change) > QUIET_SECONDS

            await until("the controller to rest", rests, self.check, 0.2)
            figures = self.controller.figures()
            if not figures.waiting:
                return figures

    async def calm(self, seconds: float) -> None:
        """Until nothing is to come of the jobs there are: so long after the last of them has started."""
        await self.settled()

        def passed() -> bool:
            return time.perf_counter() - self.seen.last_running > seconds

        await until(f"{seconds:g} s since the last start", passed, self.check, 0.5)
        await self.settled()

    async def rest(self, where: str) -> float:
        """What it takes while nothing changes; returns the cores that are busy."""
        seconds: float = self.options.rest
        before = self.controller.figures()
        await asyncio.sleep(seconds)
        after = self.controller.figures()
        cores = cpu_between(before, after) / seconds
        self.report.add(self.subject, f"memory at rest, {where}", "MiB", after.memory_mib)
        self.report.add(self.subject, f"CPU at rest, {where}", "cores", cores)
        self.report.add(self.subject, f"CPU of a scrape, {where}", "s", after.reading_seconds)
        requests = (after.requests - before.requests) / seconds
        self.report.add(self.subject, f"requests at rest, {where}", "1/s", requests)
        self.say(f"at rest, {where}: {after.memory_mib:.0f} MiB, {cores:.3f} cores")
        return cores


def told_after(done: Sequence[float], told: Sequence[tuple[int, float]]) -> list[float]:
    """For each step, done at `done[step - 1]`, the seconds until a status said it or a later one."""
    delays: list[float] = []
    for step, when in told:
        delays += [when - at for at in done[len(delays) : step]]
    return delays


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile: a value that was measured."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
