"""A loop over epochs around the loop over steps, each left by `break`, with a validation by hand after it;
with `whole` as its argument the same steps in one loop."""

from __future__ import annotations

import sys

import torch
from torch import nn

from holdfast_trainer.run import Run

EPOCHS, STEPS = 3, 4
run = Run(checkpoint_every=STEPS, keep=EPOCHS, tensorboard=True)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
wrapped = run.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, EPOCHS * STEPS)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
for _ in range(EPOCHS):
    for step in run.steps(EPOCHS * STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + run.rank)).to(run.device)
        loss = (wrapped(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss, samples=8)
        optimizer.step()
        scheduler.step()
        if sys.argv[1] != "whole" and (step + 1) % STEPS == 0:
            break
    if sys.argv[1] != "whole":
        assert run.step == step + 1, "the step that was left counts, before anything else is asked of the run"
        with run.span("data"):
            pass
        run.log(val_loss=torch.tensor(step + 1.0))
