"""One rank of one subject: trains until its gate is closed. bench/trainer.py starts it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from . import peers, subjects
from .gate import Gate
from .shapes import SHAPES
from .work import Work

SUBJECTS: dict[str, Callable[[Work, Gate], None]] = {
    "bare": subjects.bare,
    "bare-compiled": partial(subjects.bare, compiled=True),
    "nanogpt": subjects.nanogpt,
    "holdfast": subjects.holdfast,
    "limit": subjects.limit,
    "hf-trainer": partial(peers.hf_trainer, same=True),
    "hf-trainer-compiled": partial(peers.hf_trainer, same=True, compiled=True),
    "lightning": partial(peers.lightning, same=True),
    "fabric": partial(peers.fabric, same=True),
    "hf-trainer-as-it-comes": partial(peers.hf_trainer, same=False),
    "lightning-as-it-comes": partial(peers.lightning, same=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("data", type=Path)
    parser.add_argument("precision", help="auto, fp32, bf16 or fp16")
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    work = Work.of(
        options.shape,
        options.data,
        options.precision,
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
        *options.changes,
    )
    SUBJECTS[options.subject](work, Gate(work.device))


if __name__ == "__main__":
    main()
