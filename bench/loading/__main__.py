"""One subject of one stage: measures when it is told to, as often as it is told. bench/data.py starts it.

`serve` answers tokens/s without a model (the amount is a number of batches) and the share of training steps
that is spent waiting for data; `resume` the seconds to the first batch at a step (the amount); `encode` MB/s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..training.shapes import SHAPES
from ..training.words import Words
from .encoders import ENCODERS

Answer = Callable[[int], dict[str, Any]]


def serve(name: str, folder: Path, shape: str, workers: int, steps: int) -> Answer:
    """The model trains as in bench/trainer.py's bare loop; data is waited for where a loop asks for it."""
    import torch

    from ..training.work import Work
    from .loaders import LOADERS

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    work = Work.of(shape, folder, "auto", 0, 1)
    batches = LOADERS[name](work, workers)
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = work.rows * work.config.model.context

    def wait_and_step() -> tuple[float, float]:
        """Seconds of waiting and of the whole step."""
        began = time.perf_counter()
        inputs, targets = (part.to(work.device, non_blocking=True) for part in next(batches))
        waited = time.perf_counter() - began
        with work.compute.autocast():
            loss = model(inputs, targets)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if work.device.type == "cuda":
            torch.cuda.synchronize(work.device)
        return waited, time.perf_counter() - began

    def answer(amount: int) -> dict[str, Any]:
        began = time.perf_counter()
        for inputs, _targets in itertools.islice(batches, amount):
            inputs.to(work.device, non_blocking=True)
        served = tokens * amount / (time.perf_counter() - began)
        wait_and_step()  # what was read ahead while nobody trained is used up
        measured = [wait_and_step() for _ in range(steps)]
        waited, whole = (sum(part) for part in zip(*measured, strict=True))
        return {"speed": served, "wait": waited / whole}

    return answer


def resume(name: str, folder: Path, times: int) -> Answer:
    """The median of several, for one alone may be far less than a millisecond."""
    from .resumes import RESUMES

    return lambda step: {"seconds": statistics.median(RESUMES[name](folder, step) for _ in range(times))}


def encode(name: str, folder: Path) -> Answer:
    return lambda workers: {"seconds": ENCODERS[name](folder, workers)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.loading", description=__doc__)
    parser.add_argument("stage", choices=("serve", "resume", "encode"))
    parser.add_argument("subject")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="10M")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5, help="of training, in an answer of `serve`")
    parser.add_argument("--times", type=int, default=1, help="resumes in an answer of `resume`")
    options = parser.parse_args()
    name, folder = options.subject, options.folder
    if options.stage == "serve":
        answer = serve(name, folder, options.shape, options.workers, options.steps)
    elif options.stage == "resume":
        answer = resume(name, folder, options.times)
    else:
        answer = encode(name, folder)
    parent = Words()
    while True:
        parent.say(**answer(parent.wait()))


if __name__ == "__main__":
    main()
