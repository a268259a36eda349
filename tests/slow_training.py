"""A training that leaves the machine to others: for tests that only want one to go on meanwhile."""

TRAINS_SLOWLY = """
import time
import torch
from holdfast_trainer.run import Run

run = Run()
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(1_000_000):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.2)
"""
COMMAND = ["python", "-c", TRAINS_SLOWLY]
"""Of a job; it does five steps a second, a million in all."""
