"""What a checkpoint costs: Holdfast, PyTorch's own ways, and what the machine allows, side by side.

Every measurement is a process of its own that trains a real GPT with AdamW (fp32), saves and loads it;
subjects take turns. A step is of one sequence of 32 tokens: a full batch of the 124 M model would take
minutes on a few cores, and with a short one the memory traffic of the weights, which is what a save
competes for, weighs more than it does in earnest. On a GPU a step is of 8 whole sequences in bf16, the copy
that is the limit is one from its memory into page-locked memory, and what its stream waits for counts as
stall too.

  stall                   what the training thread waits for: in the call that saves, and then before the
                          optimizer's next step, for what is still being copied
  throughput after save   steps a second in the 20 steps after that call / in the 20 before it
  durable                 from the call until file and name are synced; the training thread waits meanwhile
  durable while training  the same, with the training going on beside it
  peak memory             of process and children, above that of training alone
  load                    from disk (page cache dropped) into model and optimizer
  plain write, read       of as many bytes, just before and just after the save and the load beside them

Three rounds of the 124 M model and two of a small one take about eight minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .report import RESULTS, ROOT, Measure, Report, ReportError, refuse_unwritable, run, take_turns

OURS, LIMITS = "holdfast", "limits"
VARIANTS = ("holdfast, synchronous", "holdfast, process")
"""The whole copy before the next step begins; and written by a process where Holdfast has threads."""
PEERS = ("torch.save", "dcp save", "dcp async, thread", "dcp async, process")
UNITS = {
    "state": "GB",
    "copy": "s",
    "durable write": "s",
    "cold read": "s",
    "stall": "s",
    "step before": "s",
    "step after": "s",
    "throughput after save": "ratio",
    "durable": "s",
    "durable while training": "s",
    "peak memory": "GB",
    "load": "s",
    "plain write beside": "s",
    "plain read beside": "s",
}
WINDOW = 20
"""Steps before and after a save."""
LONGEST_SECONDS = 180


@dataclass(frozen=True)
class Part:
    """One model's measurements; `prefix` is that of its ratios."""

    model: str
    prefix: str
    rounds: int
    window: int
    windows: int
    """Saves beside training in one measurement: more where they are short."""


def measured(subject: str, model: str, window: int, windows: int, place: Path) -> Measure:
    """Runs one measurement in a process of its own. Raises ReportError with its last words."""

    def measure() -> Mapping[str, float]:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=place))
        words = [sys.executable, "-m", "bench.checkpointing", subject, model, str(folder)]
        words += ["--window", str(window), "--windows", str(windows)]
        if subject == OURS:
            words.append("--limits")
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                cwd=ROOT,
                timeout=LONGEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ReportError(f"{subject} ({model}) took longer than {LONGEST_SECONDS} s") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if done.returncode:
            raise ReportError(f"{subject} ({model}) ended with {done.returncode}: {done.stderr[-800:]}")
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        figures: dict[str, float] = json.loads(answers[-1])
        return figures

    return measure


def ratios(report: Report, model: str, prefix: str, peer: str) -> None:
    """The issue's figures for one model; `peer` is DCP's async save."""
    ours, limits = f"{OURS} {model}", f"{LIMITS} {model}"

    def keep(name: str, subject: tuple[str, str], of: tuple[str, str]) -> None:
        report.ratios[prefix + name] = report.median(*subject) / report.median(*of)

    keep("stall_vs_dcp_async", (ours, "stall"), (f"{peer} {model}", "stall"))
    keep("stall_vs_torch_save", (ours, "stall"), (f"torch.save {model}", "stall"))
    keep("stall_vs_copy_limit", (ours, "stall"), (limits, "copy"))
    report.ratios[prefix + "throughput_after_save"] = report.median(ours, "throughput after save")
    keep("durable_vs_disk_limit", (ours, "durable"), (ours, "plain write beside"))
    keep(
        "durable_while_training_vs_disk_limit",
        (ours, "durable while training"),
        (ours, "plain write beside"),
    )
    keep("load_vs_read_limit", (ours, "load"), (ours, "plain read beside"))
    keep("peak_memory_vs_state", (ours, "peak memory"), (limits, "state"))


def variant_ratios(report: Report, model: str, prefix: str) -> None:
    """Holdfast's other ways beside the one it takes."""
    ours, (synchronous, process) = f"{OURS} {model}", VARIANTS

    def keep(name: str, variant: str, metric: str) -> None:
        other = report.median(f"{variant} {model}", metric)
        report.ratios[prefix + name] = other / report.median(ours, metric)

    keep("synchronous_vs_overlapped_stall", synchronous, "stall")
    keep("synchronous_vs_overlapped_step_after", synchronous, "step after")
    for metric in ("stall", "durable", "durable while training", "step after"):
        keep(f"process_vs_threads_{metric.replace(' ', '_')}", process, metric)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="samples of each subject (%(default)s), at most two of the small model",
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, one round: does it run at all?")
    parser.add_argument(
        "--variants",
        action="store_true",
        help="measure also: the whole copy before the next step, and a process that writes (a third longer)",
    )
    parser.add_argument("--place", type=Path, default=ROOT / "build", help="file system to measure (build/)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1 is needed")
    refuse_unwritable(parser, options.out)
    options.place.mkdir(parents=True, exist_ok=True)

    console, report = Console(), Report("checkpoint")
    if options.small:
        plan = [Part("tiny", "", rounds=1, window=3, windows=1)]
    else:
        plan = [
            Part("124M", "", rounds=options.rounds, window=WINDOW, windows=1),
            Part("10M", "small_", rounds=min(2, options.rounds), window=WINDOW, windows=3),
        ]
    began = time.monotonic()

    def heard(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False)

    variants = VARIANTS if options.variants else ()
    for part in plan:
        subjects = {
            f"{name} {part.model}": measured(name, part.model, part.window, part.windows, options.place)
            for name in (LIMITS, OURS, *variants, *PEERS)
        }
        take_turns(report, subjects, UNITS, rounds=part.rounds, warmup=0, heard=heard)
        ratios(report, part.model, part.prefix, PEERS[2])
        if variants:
            variant_ratios(report, part.model, part.prefix)
    report.finish(console, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run("checkpoint", main))
