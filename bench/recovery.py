"""What interruptions cost: Holdfast beside a PyTorchJob and a JobSet, under one trace, on a real cluster.

One and the same training of a small GPT on two pods of one node (bench/recovering/train.py): as a
TrainingJob; as a PyTorchJob whose pods restart on failure and whose script saves every so many steps and goes
on from there; and, with the same script, as a JobSet with a failure policy that knows disruptions. All three
save at the same steps. A step rests most of its time, as a rank does whose GPU works.

A replica is taken again and again, at the instants of a Poisson process with a seed, the same for all; half
of them with a notice (an eviction), half without (all processes of the pod are killed, and it is deleted by
force). The process goes on over the rounds: each begins where the steps of the one before end, and a seed
that leaves a round without any hit is refused; the usual one is the first that gives as many as the mean lets
expect, six in three rounds, half of them with a notice. Its clock is the time that steps rest,
each counted once: so all sides are hit at the same steps, as far from their last save, and it stands while a
gang starts. Interruptions in earnest are hours apart and hardly ever meet a start, and here they would, for
starts take as long as there. For the same reason goodput is far better in
earnest; what compares is the ratio. The peers' script knows no signal, as most do: evicted, it trains on
until its grace is over, and a further hit in that time is no recovery more.

The JobSet is one Indexed Job of both pods, as JobSet's documentation has it for training that is preempted:
backoffLimit 0, so that the first pod to fail ends the gang; a podFailurePolicy with FailJob for pods that
have the condition DisruptionTarget; and a failurePolicy that restarts for the reason PodFailurePolicy without
counting (RestartJobSetAndIgnoreMaxRestarts) and for any other, up to maxRestarts (RestartJobSet), of which it
has enough not to run out. Its strategy is Recreate: the quicker InPlaceRestart is alpha, off unless a feature
gate is set, and asks for an agent in each pod.

  goodput          seconds that the steps take, each once and at the PyTorchJob's pace, of all seconds from
                   submission to the last step
  bound            the goodput without any lost step, where every start takes what a process alone does
  start alone      from a process' birth to the end of its first step: imports, model, first step; two at once
  recovery         from the last step before a loss to the end of the next step; to the birth of rank 0's
                   process, which the platform takes, and from there to the step
  lost steps       done again
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from tests.cluster import jobset
from tests.cluster.buildkit import build_image, image_name
from tests.cluster.errors import ClusterError
from tests.cluster.faults.world import World, world
from tests.cluster.machine import Machine, why_no_node
from tests.cluster.site import DEFAULT_NAME, site
from tests.cluster.users import used

from .recovering.account import account, bound, first_useful
from .recovering.jobs import SCRIPT, Work
from .recovering.runs import Bench, Planned, Told, shares, trace
from .report import RESULTS, Report, ReportError, refuse_unwritable, run

OURS, PEER, JOBSET, ALONE = (
    "holdfast",
    "PyTorchJob, OnFailure",
    "JobSet, failurePolicy",
    "a process alone",
)
PEERS = {"pytorchjob": PEER, "jobset": JOBSET}
"""As the ratios name them."""
LONG = 3600.0
"""Seconds that a trace goes on, however long runs take."""


def prepare(data: Path) -> None:
    """A part of the standard library's sources, as tokens. Raises ReportError."""
    source = Path(os.__file__).parent / "asyncio"
    command = [sys.executable, "-m", "holdfast_trainer", "prepare", "--source", str(source)]
    command += ["--pattern", "*.py", "--vocab-size", "512", "--out", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReportError(f"the text could not be prepared: {done.stderr[-800:]}")


def one_round(
    report: Report, bench: Bench, number: int, planned: tuple[Planned, ...], say: Console
) -> dict[str, Told]:
    """All sides, in turns, and the floor of a start."""
    said = f"round {number + 1}: "
    say.print(f"{said}{ALONE}")
    report.add(ALONE, "start", "s", median([first_useful(lines) for lines in bench.alone(f"alone-{number}")]))
    ways = {
        OURS: ("ours", bench.holdfast),
        PEER: ("usual", bench.usual),
        JOBSET: ("set", bench.job_set),
    }
    told: dict[str, Told] = {}
    for subject in ways if number % 2 == 0 else reversed(ways):
        say.print(f"{said}{subject}")
        name, way = ways[subject]
        told[subject] = way(f"{name}-{number}", planned)
    return told


def add(report: Report, steps: int, floor: float, told: Mapping[str, Told]) -> None:
    """The samples of a round. A run that was given up has no goodput."""
    accounts = {subject: account(each.lines, each.hits, each.submitted) for subject, each in told.items()}
    for subject, found in accounts.items():
        run = told[subject]
        report.add(subject, "unfinished", "runs", float(not run.finished))
        report.add(subject, "hits", "hits", len(run.hits))
        report.add(subject, "step", "s", found.step)
        report.add(subject, "lost steps, with notice", "steps", found.lost_with_notice)
        report.add(subject, "lost steps, without", "steps", found.lost_without)
        for one in found.recoveries:
            report.add(subject, "recovery", "s", one.seconds)
            report.add(subject, "recovery, to the process", "s", one.until_process)
            report.add(subject, "recovery, process to step", "s", one.seconds - one.until_process)
        for stages in run.stages:
            for stage, seconds in stages.items():
                report.add(subject, f"its ledger: {stage}", "s", seconds)
        if run.finished:
            step = accounts[PEER].step
            report.add(subject, "goodput", "", steps * step / found.wall)
            report.add(subject, "goodput/bound", "", bound(steps, step, floor, len(run.hits)) / found.wall)


def ratios(report: Report) -> None:
    """The issue's figures, as far as runs have finished; median and worst where both sides say something."""
    rows = {(row.subject, row.metric): row for row in report.rows()}
    report.ratios["unfinished"] = rows[OURS, "unfinished"].max
    report.ratios["lost_steps_with_notice"] = rows[OURS, "lost steps, with notice"].max
    if (OURS, "goodput") in rows:
        report.ratios["goodput_vs_bound"] = report.median(OURS, "goodput/bound")
    for name, peer in PEERS.items():
        if {(OURS, "goodput"), (peer, "goodput")} <= rows.keys():
            report.ratio(f"goodput_vs_{name}", "goodput", OURS, peer)
        if {(OURS, "recovery"), (peer, "recovery")} <= rows.keys():
            report.ratio(f"recovery_vs_{name}", "recovery", OURS, peer)
            worst = rows[OURS, "recovery"].max / rows[peer, "recovery"].max
            report.ratios[f"worst_recovery_vs_{name}"] = worst


def traces(options: argparse.Namespace) -> list[tuple[Planned, ...]]:
    """Of each round, as far as runs may go that do steps again."""
    rests = options.steps * options.pace
    return shares(trace(options.seed, options.mean, LONG + options.rounds * rests), options.rounds, rests)


def measure(report: Report, there: World, options: argparse.Namespace, say: Console) -> None:
    prepare(there.data / "text")
    (there.data / SCRIPT.name).write_text(SCRIPT.read_text())
    # The operator gives a PyTorchJob with a Master an init container that `restricted` does not let in.
    level = "pod-security.kubernetes.io/enforce=baseline"
    there.api.run("label", "namespace", there.namespace, level, "--overwrite")
    bench = Bench(there, Work(options.steps, options.every, options.pace), there.image)
    rounds = [
        one_round(report, bench, number, planned, say) for number, planned in enumerate(traces(options))
    ]
    floor = report.median(ALONE, "start")  # of all rounds: one that met cold caches makes no bound easier
    for told in rounds:
        add(report, options.steps, floor, told)
    report.facts |= {"seed": options.seed, "mean_seconds": options.mean, "steps": options.steps}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (%(default)s)")
    parser.add_argument("--steps", type=int, default=1600, help="of a run (%(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that a step rests (%(default)s)")
    parser.add_argument("--mean", type=float, default=80, help="seconds of rest between hits (%(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="of the trace (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps", "every", "pace", "mean"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} {getattr(options, name)}: more than 0 is needed")
    if options.steps % options.every:
        parser.error(f"--steps {options.steps}: a multiple of --every {options.every}, for the last save")
    for number, planned in enumerate(traces(options)):
        if planned[0].after >= options.steps * options.pace:
            parser.error(
                f"--seed {options.seed}: its trace leaves round {number + 1} without a hit; take another, "
                f"or more --steps, or a --mean below {options.mean:g} s"
            )
    refuse_unwritable(parser, options.out)
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    console, report = Console(), Report("recovery")
    if reason := why_no_node():
        raise ReportError(reason)
    where = site(DEFAULT_NAME)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as scratch,
        used(where, console.print) as cluster,
    ):
        jobset.install(cluster, where)
        image = build_image(Machine.running(where), "trainer.Dockerfile", image_name("trainer")).name
        with world(cluster, where, image, Path(scratch)) as there:
            measure(report, there, options, console)
    ratios(report)
    report.finish(console, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run("recovery", partial(main, sys.argv[1:]), ClusterError))
