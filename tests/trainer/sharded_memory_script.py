"""A rank of a model that is cut over the ranks: makes it ready to train, and says what that took of memory.

Arguments: those of a configuration; with train.steps=2 it resumes, does a step and saves, too. Prints
`built peak BYTES of BYTES`, `resumed ...` and `accumulated ...`, the second being the model, the state, or
the gradients, in one piece. What is counted is the process's own memory: pages of a mapped file are the
kernel's, which takes them back.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any, cast

import torch

from holdfast_trainer.assembly import Batches, assemble
from holdfast_trainer.config import load
from holdfast_trainer.model import parameter_count
from holdfast_trainer.parallel import accumulate, shard
from holdfast_trainer.precision import precision
from holdfast_trainer.run import Run

SHAPE = ("model.vocab_size=64", "model.layers=16", "model.heads=4", "model.width=320", "model.context=16")
REST = (
    "data.path=nowhere",
    "train.steps=1",
    "train.global_batch=2",
    "train.precision=fp32",
    "model.bias=true",
)
PASSES = 2
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


class Highest(threading.Thread):
    """Looks again and again at what is resident and no file's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.bytes = self._now()
        self._ends = threading.Event()
        self.start()

    def _now(self) -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))

    def run(self) -> None:
        while not self._ends.wait(0.002):
            self.bytes = max(self.bytes, self._now())

    def end(self) -> int:
        self._ends.set()
        self.join()
        return max(self.bytes, self._now()) - self.before


if __name__ == "__main__":
    config = load(None, [*SHAPE, *REST, *sys.argv[1:]], environ={})
    # What is freed goes back to the kernel: else the heap keeps several times what is in use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
    run = Run()
    shard(torch.nn.Linear(8, 8), run.gang, [])(torch.ones(8)).sum().backward()  # imports what cuts
    compute = precision(config.train.precision, run.device)
    batches = Batches(cast(Any, None), config, run.rank, run.world_size, run.device)
    highest = Highest()
    parts = assemble(
        run.gang,
        config,
        compute,
        batches,
        weights=config.train.init_from,
        validates=False,
        cache=None,
    )
    whole = 4 * parameter_count(config.model)
    print(f"built peak {highest.end()} of {whole}", flush=True)
    if config.train.steps > 1:
        highest = Highest()
        run.track(model=parts.raw_model, optimizer=parts.optimizer)
        print(f"resumed peak {highest.end()} of {3 * whole}", flush=True)
        for _ in run.steps(config.train.steps):
            tokens = torch.zeros((1, config.model.context), dtype=torch.int64)
            highest = Highest()
            for index in range(PASSES):
                with accumulate(parts.model, last=index == PASSES - 1):
                    with compute.autocast():
                        loss = parts.model(tokens, tokens)[1]
                    loss.backward()
            print(f"accumulated peak {highest.end()} of {whole}", flush=True)
            parts.optimizer.step()
            break
