"""A rank of a compiled model, whole or cut over the ranks: makes it ready, and does with it what steps and
validation do. Whatever torch.compile would have to compile anew ends it.

Arguments: those of a configuration.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from holdfast_trainer.assembly import Batches, assemble
from holdfast_trainer.config import load
from holdfast_trainer.parallel import accumulate
from holdfast_trainer.precision import precision
from holdfast_trainer.run import Run

SHAPE = ("model.vocab_size=64", "model.layers=3", "model.heads=2", "model.width=32", "model.context=16")
REST = ("data.path=nowhere", "train.steps=1", "train.global_batch=4", "train.micro_batch=1")

if __name__ == "__main__":
    config = load(None, [*SHAPE, *REST, *sys.argv[1:]], environ={})
    run = Run()
    compute = precision(config.train.precision, run.device)
    batches = Batches(cast(Any, None), config, run.rank, run.world_size, run.device)
    parts = assemble(run.gang, config, compute, batches, weights=None, validates=True, cache=None)
    assert not parts.not_compiled, parts.not_compiled
    torch.compiler.set_stance("fail_on_recompile")
    tokens, targets = batches.shaped(), batches.shaped()
    for index in range(batches.chunks):
        with accumulate(parts.model, last=index == batches.chunks - 1):
            with compute.autocast():
                loss = parts.model(tokens, targets)[1]
            loss.backward()
    parts.raw_model.eval()
    with torch.no_grad(), compute.autocast():
        parts.raw_model(tokens, targets)
    print("nothing was compiled anew", flush=True)
    run.gang.leave()
