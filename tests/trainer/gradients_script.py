"""Two ranks accumulate a step's gradients; each tells how often they were exchanged, in how many pieces of
memory they lie, and how far they and the loss are from those of one process with the whole batch, as a JSON
object."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from holdfast_trainer.parallel import accumulate, join_gang, shard, wrap

CHUNKS = 3
exchanges = 0


def counted(function: Any) -> Any:
    """`function`, counting its calls."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        global exchanges
        exchanges += 1
        return function(*arguments, **options)

    return call


gang = join_gang()
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
x, y = torch.randn(2, 12, 8), torch.randint(4, (2, 12))
whole, x, y = whole.to(gang.device), x.to(gang.device), y.to(gang.device)
replicated, sharded = (copy.deepcopy(whole) for _ in range(2))
truth = F.cross_entropy(whole(x.flatten(0, 1)), y.flatten())
truth.backward()

ddp = wrap(replicated, gang)
ddp.register_comm_hook(None, counted(allreduce_hook))  # type: ignore[operator]
# What FSDP2 calls, under its name of now or of torch 2.11.
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
setattr(dist, SCATTER, counted(getattr(dist, SCATTER)))
fsdp = shard(sharded, gang, [sharded[0], sharded[2]])
found = {}
for name, model in (("ddp", ddp), ("fsdp", fsdp)):
    exchanges, total = 0, torch.zeros((), device=gang.device)
    pieces = list(zip(x[gang.rank].chunk(CHUNKS), y[gang.rank].chunk(CHUNKS), strict=True))
    for index, (inputs, labels) in enumerate(pieces):
        with accumulate(model, last=index == CHUNKS - 1):
            loss = F.cross_entropy(model(inputs), labels) / CHUNKS
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    furthest, memory = 0.0, set()
    for mine, right in zip(model.parameters(), whole.parameters(), strict=True):
        gradient: Any = mine.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        memory.add(local.untyped_storage().data_ptr())
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        furthest = max(furthest, float((gradient - right.grad).abs().max()))
    of_loss = abs(float(total) / 2 - float(truth.detach()))
    found[name] = {
        "exchanges": exchanges,
        "pieces": len(memory),
        "gradients": furthest,
        "loss": of_loss,
    }
print(json.dumps(found), flush=True)
gang.leave()
