"""What the fault suite trains: small, exact, and at a pace that the suite sets while it runs.

The seconds to rest in each step are in a file beside this one, read at every step; further files, while they
are there, name the rank that takes more memory than it is allowed, and the one that raises an exception.
"""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from holdfast_trainer.run import Run

STEPS = int(os.environ["STEPS"])
PACE = Path(__file__).with_name(os.environ["PACE"])
GREEDY, BROKEN = PACE.with_suffix(".greedy"), PACE.with_suffix(".broken")


def batch(step, rank):
    """Inputs [32, 64] and targets [32], a function of step and rank."""
    random = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(32, 64, generator=random)
    return inputs, (inputs[:, :8].sum(1) > 0).long()


def meant(which, rank):
    """Whether the file names this rank."""
    return which.exists() and which.read_text() == str(rank)


def main():
    print("clock", time.time(), flush=True)
    run = Run(keep=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 2))
    model = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(STEPS):
        inputs, targets = batch(step, run.rank)
        if rest := float(PACE.read_text()):
            time.sleep(rest)
        if meant(GREEDY, run.rank):
            print(len(b"x" * 2**32))
        if meant(BROKEN, run.rank):
            raise ValueError(f"label 7 of 2 classes, on rank {run.rank}")
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss, samples=len(inputs))
        optimizer.step()


if __name__ == "__main__":
    main()
