"""How much the controller carries: many jobs on many nodes, beside what the apiserver itself allows.

On a control plane of its own, whose nodes kwok plays and whose operator bench/controlling/operator.py,
jobs are submitted by REST until all of them run. The bare client makes the same writes for as many jobs,
with nothing to decide and nothing to watch; both take turns, with the operator's part slowed down to the
pace of the real one meanwhile, and let go afterwards. A pod runs for ever and says nothing of its progress.
What the controller does meanwhile is taken from its own metrics, read before and after a turn and never
while it is awaited; what reading takes is told apart, and charged to no job.

  jobs                 from the first submission to the last PyTorchJob
  submit               a REST request, in the crowd: 16 clients, each request after the other
  to PyTorchJob        from when a TrainingJob was seen to when its PyTorchJob was; in the crowd, and steady:
                       so many jobs a second as the machine can take
  CPU per job          of the controller, from its submission until its pods run and nothing is left to be
                       written, above what it takes at rest
  requests per job     that the controller sends to the apiserver in the same time; writes among them, and in
                       the crowd those until the last PyTorchJob
  progress to status   of jobs whose trainers do a step every quarter of a second: from when a step is done
                       until the job's status says that step or a later one
  at rest              memory and CPU of the controller while jobs run and nothing changes; asking every
                       job how far it is goes on
  CPU of a scrape      to tell the metrics of all jobs once
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from rich.console import Console
from tests.cluster.errors import ClusterError

from holdfast_controller.jobs import SILENT_SECONDS

from .controlling.api import api
from .controlling.load import sightings
from .controlling.trainers import MOST, trainers
from .controlling.turns import BARE, OPERATOR_PACE, OURS, Bench
from .controlling.world import World, real_world, world
from .report import RESULTS, Report, refuse_unwritable, run

REAL = f"{OURS}, real operator"


async def measure(report: Report, there: World, options: argparse.Namespace, console: Console) -> None:
    controller, operator = there.controller(), there.operator()
    try:
        async with api(there.kubeconfig) as server, sightings(server) as seen:
            bench = Bench(report, server, controller, operator, seen, options, console)
            few = first_jobs(options.jobs)
            first, last, crowd = shares(options.jobs, options.rounds)
            bench.say(f"{there.nodes} nodes; the first {few} jobs warm it up")
            await bench.crowd(few, kept=False)
            await bench.settled()
            for _ in range(options.rounds):
                await bench.steady("few jobs", first)
            for turn in range(options.rounds):
                operator.pace(OPERATOR_PACE)
                turns = (partial(bench.bare, options.raw), partial(bench.crowd, crowd))
                for take in turns if turn % 2 == 0 else reversed(turns):
                    await take()
            bench.say("the operator's part is let go")
            operator.pace(0)
            await bench.calm(options.calm)
            for _ in range(options.rounds):
                await bench.steady("all jobs", last)
            report.add(OURS, "memory, all jobs", "MiB", controller.figures().memory_mib)
    finally:
        operator.close()


async def measure_progress(
    report: Report, there: World, options: argparse.Namespace, console: Console
) -> None:
    """Jobs that train: each has an endpoint of the trainer's own."""
    jobs: int = options.training
    controller, operator = there.controller(), there.operator(jobs)
    try:
        with trainers(jobs) as ranks:
            async with api(there.kubeconfig) as server, sightings(server) as seen:
                bench = Bench(report, server, controller, operator, seen, options, console)
                await bench.crowd(jobs, kept=False)
                await bench.settled()
                await bench.progress(ranks, jobs)
    finally:
        operator.close()


async def measure_real(report: Report, there: World, options: argparse.Namespace, console: Console) -> None:
    """A few jobs beside the real operator and the real scheduler."""
    controller = there.controller()
    async with api(there.kubeconfig) as server, sightings(server) as seen:
        bench = Bench(report, server, controller, None, seen, options, console, subject=REAL)
        await bench.crowd(options.real_operator)
        await bench.settled()
        first = min(seen.jobs.values())
        seconds = seen.last_pod - first
        report.add(
            REAL, "jobs until the operator has made their pods", "jobs/s", options.real_operator / seconds
        )


def ratios(report: Report, jobs: int, training: int) -> None:
    """The issue's figures, of the rows beside them; named after how many jobs there really were."""
    report.ratios["jobs_per_second"] = report.median(OURS, "jobs")
    report.ratio("share_of_raw_rate", "jobs", OURS, BARE)
    report.ratios[f"memory_mib_at_{jobs}"] = report.median(OURS, "memory, all jobs")
    few, everything = (report.median(OURS, f"CPU per job, {where}") for where in ("few jobs", "all jobs"))
    if min(few, everything) > 0:  # of a handful of jobs what rest takes can be more than what they cost
        report.ratios[f"cost_growth_{first_jobs(jobs)}_to_{jobs}"] = everything / few
    if training:
        told = f"progress to status, {training} jobs, p99"
        report.ratios["progress_to_status_p99_seconds"] = report.median(OURS, told)
    report.ratios["rest_p99_seconds"] = report.median(OURS, "submit, p99")


def first_jobs(jobs: int) -> int:
    """How many are there when it is measured what one costs among few."""
    return max(1, jobs // 100)


def shares(jobs: int, rounds: int) -> tuple[int, int, int]:
    """Jobs of a turn at the steady pace among few and among all, and of one in a crowd.

    Among all there are more: what rest takes varies by as much as a hundred of them cost.
    """
    first, last = max(1, min(100, jobs // 40)), max(1, min(400, jobs // 20))
    return first, last, (jobs - first_jobs(jobs)) // rounds - first - last


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options. Ends with a line that names the value where one cannot be."""
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
    parser.add_argument(
        "--real-operator", type=int, default=100, metavar="JOBS", help="beside the real one (%(default)s)"
    )
    parser.add_argument(
        "--training", type=int, default=100, metavar="JOBS", help="whose progress is followed (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=80, help="that each of them trains (%(default)s)")
    parser.add_argument(
        "--calm",
        type=float,
        default=SILENT_SECONDS + 5,
        metavar="SECONDS",
        help="between the last pod's start and the last rest (%(default)g): the status of a job that says "
        f"nothing changes {SILENT_SECONDS:g} s after its start, which is no cost of the next ones",
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=40,
        help="seconds that rest is watched (%(default)s), as long as what it is taken off from lasts",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    for name, least in (("jobs", 20), ("nodes", 1), ("replicas", 1), ("rounds", 1), ("raw", 1), ("steps", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: at least {least} is needed")
    for name in ("steady", "rest"):
        if getattr(options, name) <= 0:
            unit = "jobs/s" if name == "steady" else "s"
            parser.error(f"--{name} {getattr(options, name):g}: more than 0 {unit}")
    if shares(options.jobs, options.rounds)[-1] < 1:
        parser.error(f"--rounds {options.rounds}: {options.jobs} jobs are too few for so many turns")
    if options.real_operator < 0:
        parser.error(f"--real-operator {options.real_operator}: 0 or more jobs")
    if not 0 <= options.training <= MOST:
        parser.error(f"--training {options.training}: 0 to {MOST} jobs")
    refuse_unwritable(parser, options.out)
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    console, report = Console(), Report("controller")
    with world(options.nodes) as there:
        asyncio.run(measure(report, there, options, console))
    if options.training:
        with world(min(options.nodes, options.training)) as there:
            asyncio.run(measure_progress(report, there, options, console))
    if options.real_operator:
        with real_world(min(options.nodes, options.real_operator)) as there:
            asyncio.run(measure_real(report, there, options, console))
    ratios(report, options.jobs, options.training)
    report.finish(console, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run("controller", partial(main, sys.argv[1:]), ClusterError))
