"""Loops that need nothing but torch: bare, nanoGPT's recipe, Holdfast itself, and the machine's limit."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast_trainer.model import GPT
from holdfast_trainer.optim import build_optimizer
from holdfast_trainer.parallel import join_gang
from holdfast_trainer.precision import allow_tf32
from holdfast_trainer.spans import gemm_peak

from .gate import Gate
from .work import STEPS, Work


def bare(work: Work, gate: Gate, *, compiled: bool = False) -> None:
    """What a careful person writes by hand, with nothing in it that training does not need."""
    allow_tf32(work.device, True)
    raw = work.model()
    model: Any = torch.compile(raw) if compiled else raw
    if work.world_size > 1:
        join_gang()
        ids = [work.device.index] if work.device.type == "cuda" else None
        model = DistributedDataParallel(raw, device_ids=ids, gradient_as_bucket_view=True, static_graph=True)
    optimizer = build_optimizer(raw, work.config.optim, work.device)
    pool = work.pool()
    gate.install()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = work.rate(step)
        tokens, targets = (part.to(work.device, non_blocking=True) for part in pool[step % len(pool)])
        with work.compute.autocast():
            loss = model(tokens, targets)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(raw.parameters(), work.config.optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def nanogpt(work: Work, gate: Gate) -> None:
    """nanoGPT's recipe, written from its description: random windows of a memory map, a learning rate by
    hand, clipping, a loss read every ten steps; torch.compile, autocast and fused AdamW on CUDA, none of them
    on a CPU."""
    cuda = work.device.type == "cuda"
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    config, optim = work.config.model, work.config.optim
    model = work.model()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    extra = {"fused": True} if cuda else {}
    optimizer = torch.optim.AdamW(groups, optim.learning_rate, (optim.beta1, optim.beta2), **extra)
    scaler = torch.amp.GradScaler(work.device.type, enabled=False)
    run: Any = torch.compile(model) if cuda else model

    def batch() -> tuple[Tensor, Tensor]:
        data = np.memmap(work.config.data.prepared / "train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - config.context, (work.rows,)).tolist()
        cut = lambda start: torch.from_numpy(data[start : start + config.context].astype(np.int64))  # noqa: E731
        parts = torch.stack([cut(s) for s in starts]), torch.stack([cut(s + 1) for s in starts])  # type: ignore[no-untyped-call]
        if cuda:
            parts = parts[0].pin_memory(), parts[1].pin_memory()
        return parts[0].to(work.device, non_blocking=True), parts[1].to(work.device, non_blocking=True)

    gate.install()
    tokens, targets = batch()
    for step in range(STEPS):
        rate = 6e-5 + (6e-4 - 6e-5) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.amp.autocast("cuda", dtype=torch.bfloat16, enabled=cuda):
            loss = run(tokens, targets)[1]
        tokens, targets = batch()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()


def holdfast(work: Work, gate: Gate) -> None:
    """`train`, whole: what `python -m holdfast_trainer train` runs."""
    from holdfast_trainer.train import train

    gate.install()
    place = Path(tempfile.mkdtemp(prefix="run-", dir=work.config.data.prepared.parent))
    if work.world_size > 1:  # all ranks have one run directory
        place = work.config.data.prepared.parent / "run-of-all-ranks"
    train(work.config, work.dataset(), None, place)


def limit(work: Work, gate: Gate) -> None:
    """A word a measurement: the best rate of a square matrix product in the precision of the others."""
    gate.say(first_step_at=0.0)
    while gate.wait():
        gate.say(seconds=1.0 / gemm_peak(work.device, work.compute.dtype))


class Loss(nn.Module):
    """The model as peers want it: named inputs, a loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = self.model(input_ids, labels)[1]
        assert loss is not None
        return {"loss": loss}
