"""Sorts sequences of different length into classes: a dataset with workers, in a loop that is safe.

The data is made up: walks of 5 to 200 steps, to be told apart by where they drift.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from holdfast_trainer.run import Run
from holdfast_trainer.samples import Samples, pad_ragged

STEPS = 300
CLASSES = 3


class Walks(Dataset):
    """Sample i is (a walk of floats, its class); a part of it is cut out anew each time."""

    def __len__(self):
        return 5000

    def __getitem__(self, index):
        own = np.random.default_rng(index)
        label = index % CLASSES
        walk = own.normal((label - 1) * 0.3, 1.0, size=own.integers(5, 200)).astype(np.float32)
        return walk[: np.random.randint(len(walk) // 2, len(walk)) + 1], label


def collate(samples):
    walks, lengths = pad_ragged([walk for walk, _ in samples])
    return walks, lengths, torch.tensor([label for _, label in samples])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Dropout(0.1))
        self.last = nn.Linear(32, CLASSES)

    def forward(self, walks, lengths):
        there = torch.arange(walks.shape[1], device=walks.device) < lengths[:, None]
        seen = self.each(walks[:, :, None]) * there[:, :, None]
        return self.last(seen.sum(1) / lengths[:, None])


def main():
    run = Run()
    model = run.wrap(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    samples = Samples(
        Walks(), batch=64, collate=collate, rank=run.rank, world_size=run.world_size, device=run.device
    )
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(STEPS):
        with run.span("data"):
            walks, lengths, labels = samples.batch(step)
        loss = F.cross_entropy(model(walks, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss, samples=len(labels))
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
