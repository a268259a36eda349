"""The way of data into training: Holdfast's loader and `prepare` beside what people use.

  serve    tokens/s that a loader hands out with nobody training, and the share of a training step that is
           spent waiting for its batch (the model and the optimizer are those of bench/trainer.py)
  resume   from the start of a resume to its first batch, at 10^3 and at 10^9 tokens of a data set of twice
           that; imports are done before. `datasets` is left out: it would need its rows on disk
  encode   MB/s of text to tokens with one tokenizer and all cores. Holdfast's figure is that of the whole
           command, from its start to durable shards; `datasets.map` starts from rows that are loaded already
           and ends in an Arrow file; the bare libraries get texts in memory and keep nothing

Subjects are started once and take turns. Where the machine has none of a peer, that is said and it is left
out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from scripts import peers

from .loading.encoders import TOKENIZER, prepare, same_tokens, write_corpus
from .loading.resumes import TOKENS_A_STEP, write_sparse
from .report import RESULTS, ROOT, Report, ReportError, refuse_unwritable, run, scratch, take_turns
from .training.shapes import SHAPES
from .training.turns import Training, ending
from .training.work import write_tokens

OURS = "holdfast"
UNITS = {"speed": "tokens/s", "data wait share": "of a step", "encoding": "MB/s"}
NEAR = 1_000
"""Tokens."""


@dataclass(frozen=True)
class Subject:
    """`runs` is its name in bench.loading; `needs` a package that Holdfast does not."""

    name: str
    runs: str
    needs: str = ""
    workers: int = 0


def loaders(cores: int) -> list[Subject]:
    return [
        Subject(OURS, "holdfast"),
        Subject("memmap, nanogpt's way", "nanogpt"),
        Subject("torch DataLoader over memmap", "memmap"),
        Subject(f"torch DataLoader over memmap, {cores} workers", "memmap", workers=cores),
        Subject(f"datasets (arrow) in a DataLoader, {cores} workers", "arrow", "datasets", cores),
        Subject(f"torchdata StatefulDataLoader, {cores} workers", "stateful", "torchdata", cores),
    ]


RESUMES = [
    Subject(OURS, "holdfast"),
    Subject("torch DataLoader, batches skipped (accelerate)", "skipped", "accelerate"),
    Subject("torchdata StatefulDataLoader", "stateful", "torchdata"),
]
ENCODERS = [
    Subject(f"{OURS} prepare", "holdfast"),
    Subject(f"{OURS} prepare --encoder tokenizers", "holdfast-tokenizers"),
    Subject("datasets.map(num_proc)", "datasets", "datasets"),
    Subject("tokenizers, in memory", "tokenizers"),
    Subject("tiktoken, in memory", "tiktoken", "tiktoken"),
    Subject("gigatoken, in memory", "gigatoken"),
]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    shape: str
    rounds: int
    batches: int
    """Served in a sample without training."""
    steps: int
    """Of training in a sample."""
    far: int
    """Tokens, of the late resume."""
    megabytes: float


class Bench:
    """Runs the stages into a report."""

    def __init__(self, report: Report, folder: Path, sizes: Sizes, path: Sequence[Path]) -> None:
        self._report, self._folder, self._sizes, self._path = report, folder, sizes, path
        self._cores = len(os.sched_getaffinity(0))
        self._began = time.monotonic()
        self.left_out: dict[str, str] = {}

    def heard(self, text: str) -> None:
        Console().print(f"{time.monotonic() - self._began:5.0f} s  {text}", highlight=False)

    def serve(self) -> None:
        data = self._folder / "serve"
        write_tokens(data, 32_000_000)
        sizes = self._sizes

        def measured(training: Training) -> Mapping[str, float]:
            answer = training.answer(sizes.batches)
            return {"speed": answer["speed"], "data wait share": answer["wait"]}

        def words(subject: Subject) -> list[str]:
            return ["--shape", sizes.shape, "--steps", str(sizes.steps), "--workers", str(subject.workers)]

        self._stage("serve", loaders(self._cores), data, words, measured, UNITS)

    def resume(self) -> None:
        data = self._folder / "resume"
        write_sparse(data, 2 * self._sizes.far)
        places = {near_and_far(tokens): tokens for tokens in (NEAR, self._sizes.far)}

        def measured(training: Training) -> Mapping[str, float]:
            steps = {name: -(-tokens // TOKENS_A_STEP) for name, tokens in places.items()}
            return {name: training.answer(step)["seconds"] for name, step in steps.items()}

        def words(subject: Subject) -> list[str]:
            return ["--times", "1" if subject.needs else "20"]

        self._stage("resume", RESUMES, data, words, measured, dict.fromkeys(places, "s"))

    def encode(self) -> None:
        data = self._folder / "encode"
        data.mkdir()
        amount = write_corpus(data, self._sizes.megabytes) / 1e6
        self.heard(f"encode: train the tokenizer that all use, {amount:.1f} MB of text")
        prepare(data, data / "first", self._cores)
        shutil.move(data / "first" / TOKENIZER, data / TOKENIZER)

        def measured(training: Training) -> Mapping[str, float]:
            return {"encoding": amount / training.answer(self._cores)["seconds"]}

        self._stage("encode", ENCODERS, data, lambda _subject: [], measured, UNITS)
        self._report.facts["text_mb"] = round(amount, 1)
        if "tiktoken, in memory" not in self.left_out:
            sys.path += [str(place) for place in self._path]
            self._report.facts["tiktoken_same_tokens"] = same_tokens(data)

    def _stage(
        self,
        title: str,
        subjects: Sequence[Subject],
        data: Path,
        words: Callable[[Subject], list[str]],
        measured: Callable[[Training], Mapping[str, float]],
        units: Mapping[str, str],
    ) -> None:
        """Start all subjects that can run here, let them take turns, end them."""
        missing = peers.missing(filter(None, (subject.needs for subject in subjects)), self._path)
        with contextlib.ExitStack() as stack:
            turns = {}
            for subject in subjects:
                if subject.needs in missing:
                    self.left_out[subject.name] = f"{subject.needs} is not installed"
                    continue
                training = Training.start(
                    subject.name,
                    [title, subject.runs, str(data), *words(subject)],
                    ranks=1,
                    threads=self._cores,
                    path=self._path,
                    environment={"HF_HOME": str(data / "hf")},
                    module="bench.loading",
                )
                stack.enter_context(ending([training]))
                turns[subject.name] = partial(measured, training)
            take_turns(
                self._report,
                turns,
                units,
                rounds=self._sizes.rounds,
                heard=lambda text: self.heard(f"{title}: {text}"),
            )


def near_and_far(tokens: int) -> str:
    return f"first batch at {tokens:.0e} tokens".replace("e+0", "e")


def ratios(report: Report, far: int) -> None:
    """The issue's figures, from the rows beside them; what was left out has none."""
    with contextlib.suppress(ReportError):
        report.ratios["data_wait_share"] = report.median(OURS, "data wait share")
    for name, peer in (
        ("tokenize_vs_datasets_map", "datasets.map(num_proc)"),
        ("tokenize_vs_tiktoken", "tiktoken, in memory"),
    ):
        with contextlib.suppress(ReportError):
            report.ratio(name, "encoding", f"{OURS} prepare", peer)
    with contextlib.suppress(ReportError):
        report.ratio(
            "tokenize_by_tokenizers_vs_datasets_map",
            "encoding",
            f"{OURS} prepare --encoder tokenizers",
            "datasets.map(num_proc)",
        )
    with contextlib.suppress(ReportError):
        late, early = (report.median(OURS, near_and_far(tokens)) for tokens in (far, NEAR))
        report.ratios[f"resume_{far:.0e}_vs_1e3".replace("e+0", "e")] = late / early


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--shape", default="124M" if gpu else "10M", choices=SHAPES, help="of the model (%(default)s)")
    add("--rounds", type=int, default=5, help="samples of each subject (%(default)s)")
    add("--batches", type=int, default=1000, help="served in a sample (%(default)s)")
    add("--steps", type=int, default=20 if gpu else 3, help="of training in a sample (%(default)s)")
    add("--far", type=int, default=10**9, help="tokens before the late resume (%(default)s)")
    add("--megabytes", type=float, default=40, help="of text to encode (%(default)s)")
    add("--stages", nargs="*", choices=("serve", "resume", "encode"), help="those to run; all by default")
    add("--no-peers", action="store_true", help="install none; those that are here are used")
    add("--out", type=Path, default=RESULTS, help="where the JSON goes")
    add("--place", type=Path, default=ROOT / "build", help="for the data")
    options = parser.parse_args()
    sizes = Sizes(
        options.shape, options.rounds, options.batches, options.steps, options.far, options.megabytes
    )
    if min(sizes.rounds, sizes.batches, sizes.steps, sizes.far, sizes.megabytes) <= 0:
        parser.error("--rounds, --batches, --steps, --far and --megabytes must be above 0")
    refuse_unwritable(parser, options.out)
    report = Report("data")
    subjects = [*loaders(1), *RESUMES, *ENCODERS]
    with scratch(options.place, "data") as folder:
        found = [] if options.no_peers else peers.find({s.needs for s in subjects if s.needs}, print)
        bench = Bench(report, folder, sizes, found)
        for stage in ("serve", "resume", "encode"):
            if not options.stages or stage in options.stages:
                getattr(bench, stage)()
    report.facts["model"] = sizes.shape
    if bench.left_out:
        report.facts["left_out"] = bench.left_out
    for name, reason in bench.left_out.items():
        bench.heard(f"{name} was left out: {reason}")
    ratios(report, sizes.far)
    report.finish(folder=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run("data", main))
