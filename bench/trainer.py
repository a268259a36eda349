"""Speed of training: Holdfast beside a bare loop, nanoGPT's recipe and the trainers that people use.

All train the same model code from the same weights on the same batches with the same threads. Every subject
is started once and waits at a gate; windows of a few steps alternate closely, so what slows the machine
slows all (bench/training/gate.py). The stages:

  same dtype        one process, the precision that suits the device, fused AdamW, clipping for all. Holdfast
                    takes tcmalloc by itself where the machine has it: it runs once more without, and a bare
                    loop with it. On a GPU its kernels are deterministic, and those of the loss its own: it
                    runs once more with others, and once more with PyTorch's loss
  as it comes       one process, each with its own defaults, the same batch
  compiled          one process, same dtype, all under torch.compile, beside Holdfast without it
  busy machine      same dtype, and beside it a process for each core that never waits for anything
  ddp               two processes (as many as there are GPUs, with some), same dtype
  telemetry         steps of a tiny model by the thousand, with and without what observes them

`first step` is from the start of the process, imports and all, to the end of its first step. Each program is
started once before, for whoever comes first reads from the disk what the others share. `telemetry_cost`
is what observing a step takes, in seconds of the tiny model, over the seconds of a step of the model above:
the difference of two whole steps of that one is smaller than its spread.

Where the machine cannot run a peer, or has none, that is said and it is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from scripts import peers
from tests.cluster import system
from tests.cluster.errors import MissingTool

from holdfast_trainer import allocator
from holdfast_trainer.contract import ENV_TELEMETRY
from holdfast_trainer.model import flops_per_token
from holdfast_trainer.spinning import spin_briefly

from .report import RESULTS, ROOT, Report, ReportError, refuse_unwritable, run, scratch, take_turns
from .training.shapes import SHAPES
from .training.turns import Training, busy, ending
from .training.work import Work, write_tokens

UNITS = {"speed": "tokens/s", "first step": "s", "step": "s", "peak": "FLOP/s"}
PEER_PACKAGES = {
    "hf-trainer": "transformers",
    "hf-trainer-as-it-comes": "transformers",
    "hf-trainer-compiled": "transformers",
    "lightning": "lightning",
    "lightning-as-it-comes": "lightning",
    "fabric": "lightning",
}
"""What a subject needs that Holdfast does not."""
OURS = "holdfast"
FREE = f"{OURS}, not deterministic"
LARGE = f"{OURS}, PyTorch's loss"
PLAIN = f"{OURS}, PyTorch's layers"
BARE_WITH, OURS_WITHOUT = "bare loop with tcmalloc", f"{OURS} without tcmalloc"


@dataclass(frozen=True)
class Subject:
    """`runs` is its name in bench.training; the rest is what it gets, `changes` as section.key=value."""

    name: str
    runs: str
    precision: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    title: str
    subjects: tuple[Subject, ...]
    shape: str
    ranks: int
    threads: int
    window: int
    """Steps."""
    rounds: int
    metric: str = "speed"
    first_decides: bool = False
    """Where the first subject cannot run, nor can the others as they should; of those started one by one."""
    neighbours: int = 0
    """Processes that keep a core busy each, all the while."""
    together: bool = False
    """Started at once, so that how long each takes for its first step says nothing."""


def renamed(subjects: Sequence[Subject], addition: str) -> tuple[Subject, ...]:
    return tuple(replace(subject, name=f"{subject.name}, {addition}") for subject in subjects)


def stages(shape: str, rounds: int, window: int, cores: int, gpus: int) -> list[Stage]:
    """What is measured, in order."""
    same = (
        Subject("bare loop", "bare"),
        Subject(OURS, "holdfast"),
        Subject("hf trainer", "hf-trainer"),
        Subject("lightning", "lightning"),
        Subject("fabric (litgpt's loop)", "fabric"),
        Subject("machine's limit", "limit"),
    )
    alone: tuple[Subject, ...] = same
    malloc: dict[str, str] = {}
    if allocator.preload(malloc, allocator.library()):
        without = {allocator.PRELOAD: "", allocator.HUGE_PAGES: "0"}
        alone += (
            Subject(BARE_WITH, "bare", environment=malloc),
            Subject(OURS_WITHOUT, "holdfast", environment=without),
        )
    if gpus:
        # Others are not deterministic: there are faster kernels, of attention's backward pass above all.
        alone += (Subject(FREE, "holdfast", changes=("train.deterministic=false",)),)
        # Nor have the others its kernels of the loss.
        alone += (Subject(LARGE, "holdfast", changes=("train.fused_loss=false",)),)
    else:
        alone += (Subject(PLAIN, "holdfast", changes=("train.fused_layers=false",)),)
    as_it_comes = (
        Subject(f"{OURS}, as it comes", "holdfast"),
        Subject("nanogpt's recipe, as it comes", "nanogpt", "fp32"),
        Subject("hf trainer, as it comes", "hf-trainer-as-it-comes", "fp32"),
        Subject("lightning, as it comes", "lightning-as-it-comes", "fp32"),
    )
    compiled = (
        Subject("bare loop, compiled", "bare-compiled"),
        Subject(f"{OURS}, compiled", "holdfast", changes=("train.compile=true",)),
        # On a CPU it computes in fp32 whatever the others do.
        *((Subject("nanogpt's recipe, compiled", "nanogpt"),) if gpus else ()),
        Subject("hf trainer, compiled", "hf-trainer-compiled"),
        Subject(f"{OURS}, not compiled", "holdfast"),
    )
    telemetry = (
        Subject(f"{OURS}, tiny model", "holdfast"),
        Subject(f"{OURS}, tiny model, telemetry off", "holdfast", environment={ENV_TELEMETRY: "off"}),
        Subject("bare loop, tiny model", "bare"),
    )
    beside = renamed(same[:4], "busy machine")
    ranks = gpus or min(2, cores)
    found = [
        Stage("same dtype", alone, shape, 1, cores, window, rounds),
        Stage("as it comes", as_it_comes, shape, 1, cores, max(1, window // 2), rounds, together=bool(gpus)),
        Stage("compiled", compiled, shape, 1, cores, window, rounds, first_decides=True, together=bool(gpus)),
        Stage("busy machine", beside, shape, 1, cores, window, rounds, neighbours=cores),
    ]
    if ranks > 1:
        ddp = renamed(same[:4], f"{ranks} processes")
        found.append(Stage("ddp", ddp, shape, ranks, max(1, cores // ranks), window, rounds))
    found.append(Stage("telemetry", telemetry, "tiny", 1, 1, 60 * window, 3 * rounds, "step"))
    return found


class Bench:
    """Runs the stages into a report."""

    def __init__(
        self, report: Report, folder: Path, path: Sequence[Path], heard: Callable[[str], None]
    ) -> None:
        self._report, self._folder, self._path, self._heard = report, folder, path, heard
        self.left_out: dict[str, str] = {}
        self._in_memory: set[str] = set()
        """Programs that have been started before."""
        self._missing = peers.missing(PEER_PACKAGES.values(), path)

    def run(self, stage: Stage) -> None:
        data = self._folder / stage.title.replace(" ", "-") / "data"
        write_tokens(data)
        trainings: dict[str, Training] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(busy(stage.neighbours))
            started: list[tuple[Subject, Training]] = []
            for subject in stage.subjects:
                if (package := PEER_PACKAGES.get(subject.runs)) in self._missing:
                    self.left_out[subject.name] = f"{package} is not installed"
                    continue
                if not stage.together:
                    self._warm_up(stage, subject, data)
                self._heard(f"{stage.title}: start {subject.name}")
                training = self._start(stage, subject, data)
                stack.enter_context(ending([training]))
                started.append((subject, training))
                if stage.together:
                    continue
                self._meet(stage, started, trainings)
                if stage.first_decides and not trainings:
                    self.left_out |= {one.name: f"as {subject.name} is" for one in stage.subjects[1:]}
                    return
            self._meet(stage, started, trainings)
            self._take_turns(stage, trainings)

    def _start(self, stage: Stage, subject: Subject, data: Path) -> Training:
        return Training.start(
            subject.name,
            [subject.runs, stage.shape, str(data), subject.precision, *subject.changes],
            ranks=stage.ranks,
            threads=stage.threads,
            path=self._path,
            environment={**_as_started(subject), **subject.environment},
        )

    def _warm_up(self, stage: Stage, subject: Subject, data: Path) -> None:
        """Start a program once, so that no first step waits for the disk; why it cannot is told later."""
        if subject.runs in self._in_memory:
            return
        self._in_memory.add(subject.runs)
        self._heard(f"{stage.title}: warm-up: {subject.name}")
        training = self._start(stage, subject, data)
        with ending([training]), contextlib.suppress(ReportError):
            training.first_step()

    def _meet(
        self, stage: Stage, started: list[tuple[Subject, Training]], trainings: dict[str, Training]
    ) -> None:
        """Move those that get past their first step from `started` to `trainings`."""
        while started:
            subject, training = started.pop(0)
            try:
                first = training.first_step()
            except ReportError as error:
                if subject.runs in ("bare", "holdfast", "limit"):
                    raise
                self.left_out[subject.name] = str(error)[-300:]
                self._heard(f"{subject.name} is left out: {str(error)[-300:]}")
                continue
            trainings[subject.name] = training
            if subject.runs != "limit" and not stage.together:
                self._report.add(subject.name, "first step", "s", first)

    def _take_turns(self, stage: Stage, trainings: Mapping[str, Training]) -> None:
        tokens = tokens_a_step(stage.shape)

        def measured(training: Training, limit: bool) -> Callable[[], Mapping[str, float]]:
            def measure() -> Mapping[str, float]:
                seconds = training.window(1 if limit else stage.window)
                if limit:
                    return {"peak": 1 / seconds}
                if stage.metric == "step":
                    return {"step": seconds / stage.window}
                return {"speed": tokens * stage.window / seconds}

            return measure

        limits = {subject.name for subject in stage.subjects if subject.runs == "limit"}
        subjects = {name: measured(training, name in limits) for name, training in trainings.items()}
        take_turns(self._report, subjects, UNITS, rounds=stage.rounds, warmup=1, heard=self._heard)


def _as_started(subject: Subject) -> dict[str, str]:
    """What our commands, and nobody else's, set before PyTorch is imported."""
    found: dict[str, str] = {}
    if subject.runs == "holdfast":
        spin_briefly(found)
        allocator.preload(found, allocator.library())
    return found


def have_malloc(heard: Callable[[str], None]) -> None:
    """What the trainer's image has is to be here too; where it cannot be, that is said."""
    try:
        system.install({str(allocator.MULTIARCH / allocator.LIBRARY): allocator.PACKAGE})
    except MissingTool as error:
        heard(f"without tcmalloc: {error}")


def tokens_a_step(shape: str) -> int:
    config = Work.of(shape, Path("none"), "fp32", 0, 1).config
    return config.train.global_batch * config.model.context


def ratios(report: Report, shape: str, ranks: int) -> None:
    """The issue's figures, from the rows beside them; what was left out has none."""

    def keep(name: str, of: str, to: str, metric: str = "speed") -> None:
        with contextlib.suppress(ReportError):
            report.ratio(name, metric, of, to)

    keep("vs_bare_loop", OURS, "bare loop")
    keep("vs_bare_loop_with_tcmalloc", OURS, BARE_WITH)
    keep("malloc_gain", OURS, OURS_WITHOUT)
    keep("vs_not_deterministic", OURS, FREE)
    keep("fused_loss_gain", OURS, LARGE)
    keep("fused_layers_gain", OURS, PLAIN)
    keep("vs_hf_trainer", OURS, "hf trainer")
    keep("vs_lightning", OURS, "lightning")
    keep("vs_fabric", OURS, "fabric (litgpt's loop)")
    for peer in ("bare loop", "hf trainer", "lightning"):
        name = f"ddp_vs_{peer.replace(' ', '_')}"
        keep(name, f"{OURS}, {ranks} processes", f"{peer}, {ranks} processes")
    for peer in ("bare loop", "hf trainer", "lightning"):
        keep(f"busy_vs_{peer.replace(' ', '_')}", f"{OURS}, busy machine", f"{peer}, busy machine")
    keep("out_of_box_vs_nanogpt", f"{OURS}, as it comes", "nanogpt's recipe, as it comes")
    keep("out_of_box_vs_hf_trainer", f"{OURS}, as it comes", "hf trainer, as it comes")
    keep("out_of_box_vs_lightning", f"{OURS}, as it comes", "lightning, as it comes")
    for peer in ("bare loop", "nanogpt's recipe", "hf trainer"):
        name = peer.replace(" ", "_").replace("'s_recipe", "")
        keep(f"compiled_vs_{name}", f"{OURS}, compiled", f"{peer}, compiled")
    keep("compile_gain", f"{OURS}, compiled", f"{OURS}, not compiled")
    for peer in ("bare loop", "hf trainer", "lightning"):
        keep(f"first_step_vs_{peer.replace(' ', '_')}", OURS, peer, "first step")
    with contextlib.suppress(ReportError):
        config = Work.of(shape, Path("none"), "fp32", 0, 1).config
        flops = flops_per_token(config.model) * report.median(OURS, "speed")
        report.ratios["share_of_gemm_peak"] = flops / report.median("machine's limit", "peak")
    with contextlib.suppress(ReportError):
        tiny = f"{OURS}, tiny model"
        watched, blind = (report.median(name, "step") for name in (tiny, f"{tiny}, telemetry off"))
        seconds = tokens_a_step(shape) / report.median(OURS, "speed")
        report.ratios["telemetry_cost"] = (watched - blind) / seconds
        bare = report.median("bare loop, tiny model", "step")
        report.ratios["around_a_step_cost"] = (watched - bare) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument(
        "--shape", default="124M" if gpus else "10M", choices=SHAPES, help="of the model (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="samples of each subject (%(default)s)")
    parser.add_argument("--window", type=int, default=20 if gpus else 3, help="steps a sample (%(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="install none; those that are here are used")
    parser.add_argument("--stages", nargs="*", help="titles of those to run; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--place", type=Path, default=ROOT / "build", help="for run directories")
    options = parser.parse_args()
    if options.rounds < 1 or options.window < 1:
        parser.error(f"--rounds {options.rounds} --window {options.window}: at least 1 is needed")
    refuse_unwritable(parser, options.out)
    console, report, began = Console(), Report("trainer"), time.monotonic()

    def heard(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False)

    if not gpus and not options.no_peers:
        have_malloc(heard)
    cores = len(os.sched_getaffinity(0))
    plan = stages(options.shape, options.rounds, options.window, cores, gpus)
    unknown = set(options.stages or ()) - {stage.title for stage in plan}
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are: {', '.join(s.title for s in plan)}")
    with scratch(options.place, "trainer") as folder:
        path = [] if options.no_peers else peers.find(PEER_PACKAGES.values(), heard)
        bench = Bench(report, folder, path, heard)
        for stage in plan:
            if not options.stages or stage.title in options.stages:
                bench.run(stage)
    if bench.left_out:
        report.facts["left_out"] = bench.left_out
    report.facts["model"] = options.shape
    report.facts["malloc"] = str(allocator.library() or "the C library's")
    for name, reason in bench.left_out.items():
        heard(f"{name} was left out: {reason}")
    ratios(report, options.shape, gpus or min(2, cores))
    report.finish(console, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run("trainer", main))
