"""An ordinary DDP loop that keeps a checkpoint of its own; there is nothing of Holdfast in it."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS = 400


def main(path):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    begin = 0
    if os.path.exists(path):
        saved = torch.load(path)
        begin = saved["step"]
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} begins at step {begin}", flush=True)
    for step in range(begin, STEPS):
        random = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
        x = torch.randn(32, 16, generator=random)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
            state = {
                "step": step + 1,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
