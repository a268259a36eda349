"""The loop that the tests interrupt: small, but with everything that can make a resume inexact.

Dropout draws from the random state, batch norm has buffers that differ by rank, the scheduler has a
state of its own, gradients may be accumulated. `sys.argv[1]` has the options, a JSON object.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from holdfast_trainer import saves
from holdfast_trainer.parallel import accumulate
from holdfast_trainer.run import Run
from holdfast_trainer.token_index import DataError

DEFAULTS: dict[str, Any] = {
    "steps": 40,
    "save_every": 5,
    "keep": 3,
    "keep_every": 0,
    "keep_best": 0,
    "dropout": 0.1,
    "norm": False,
    "chunks": 1,
    "step_every": 1,  # in how many steps the optimizer takes one, and gradients add up meanwhile
    "complex": False,  # the first layer's weights are complex numbers
    "zeroed": False,  # gradients keep their memory from step to step
    "bf16": False,
    "fp16": False,  # with a scaler whose scale grows until gradients overflow, again and again
    "settle": False,
    "pause": 0.0,  # seconds a step takes longer, so that a signal can meet it
    "pause_at": -1,  # the step to sleep in for pause_seconds
    "pause_seconds": 0.0,
    "validate_every": 0,
    "validation_pause": 0.0,
    "fail_at": -1,
    "fail_rank": 0,
    "hang_at": -1,
    "hang_rank": 0,
    "hang_in": "Python",  # or "C": no thread of the interpreter can run
    "freeze_before_save": -1,  # the rank that is stopped when its first save is to begin
    "bad_at": -1,  # the step in which bad_rank's loss, or all gradients, are no number
    "bad_rank": 0,
    "bad": "loss",
    "fail_as": "ZeroDivisionError",
    "seed": 1337,
    "of_rank_1": {},  # what it has of these options and the others do not
    "break_at": -1,
    "exit_at": -1,
    "exit_status": 3,
    "run_dir": None,
    "apart": False,  # each rank on a machine of its own: without the other's disk
    "config": "",
    "size": 32,  # from 4200 on, some of the state is copied while the next step computes
    "snapshot": "overlapped",
    "clamp_from": -1,  # the step from which on something else than the optimizer writes to the weights too
    "stray_at": -1,  # the step after which rank 1 alone changes its weights, by stray_by of their size
    "stray_by": 0.0,
    "validate_late": False,
    "last_loss": None,  # of a validation after the last step
    "disk_at": -1,  # the step from which on the run directory "fails" or "hangs"
    "disk_rank": None,  # of this one alone
    "disk": "fails",  # or only "pwrite" or "rmdir" hang, whatever they are to write or to remove
    "overflow": "",  # "fused" or "looped": fp16's scaler at work, with gradients that overflow at every scale
}
options = DEFAULTS | json.loads(sys.argv[1])
if os.environ.get("RANK") == "1":
    options |= options["of_rank_1"]
assert options.keys() == DEFAULTS.keys(), options.keys() - DEFAULTS.keys()
if options["apart"] and os.environ["RANK"] != "0":
    os.environ["HOLDFAST_LOCAL_DIR"] += f"-of-rank-{os.environ['RANK']}"

run = Run(
    run_dir=options["run_dir"],
    config_hash=options["config"],
    seed=options["seed"],
    checkpoint_every=options["save_every"],
    keep=options["keep"],
    keep_every=options["keep_every"],
    keep_best=options["keep_best"],
    validate_every=options["validate_every"],
    snapshot=options["snapshot"],
    compute_dtype=torch.bfloat16 if options["bf16"] else torch.float32,
)
if os.environ.get("NO_ROOM_FOR_MODEL"):
    torch.empty(2**46)  # more than any machine has
torch.manual_seed(1)
size = options["size"]


class Magnitudes(nn.Module):
    """Of 16 numbers turned and scaled by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, size, dtype=torch.complex64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


layers: list[nn.Module] = [Magnitudes() if options["complex"] else nn.Linear(16, size)]
if options["norm"]:
    layers.append(nn.BatchNorm1d(size))
layers += [nn.ReLU(), nn.Dropout(options["dropout"]), nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, 4)]
raw = nn.Sequential(*layers)


def batch(step: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + chunk * 100 + run.rank)
    x = torch.randn(12, 16, generator=generator)
    return x.to(run.device), x[:, :4].argmax(1).to(run.device)


def loss_of(net: nn.Module, step: int, chunk: int) -> torch.Tensor:
    x, y = batch(step, chunk)
    low = torch.float16 if options["fp16"] else torch.bfloat16
    with torch.autocast(run.device.type, low, enabled=options["bf16"] or options["fp16"]):
        return F.cross_entropy(net(x), y) / options["chunks"]


model = run.wrap(raw, settle=(lambda net: loss_of(net, 0, 0)) if options["settle"] else None)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=options["overflow"] == "fused")
scales = bool(options["fp16"] or options["overflow"])
scaler = torch.amp.GradScaler(run.device.type, growth_interval=3 if options["fp16"] else 2000, enabled=scales)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
scaled = {"scaler": scaler} if scales else {}
run.track(model=model, optimizer=optimizer, scheduler=scheduler, **scaled)
print("tracked", flush=True)
if run.rank == options["freeze_before_save"]:
    run._saves.begin_in_turn = lambda step: os.kill(os.getpid(), signal.SIGSTOP)


def validate() -> float:
    raw.eval()
    total = 0.0
    with torch.no_grad():
        for index in run.interruptible(range(4)):
            print("validating", flush=True)
            time.sleep(options["validation_pause"])
            torch.rand(1)  # as a loader that shuffles would
            total += float(loss_of(raw, 10_000 + index, 0))
    raw.train()
    return run.mean(total)


def wait_for_ever() -> None:
    threading.Event().wait()


def lose_the_disk() -> None:
    """From here on no call that names something in the run directory succeeds, or returns."""

    def without(call: Any) -> Any:
        def instead(path: Any, *arguments: Any, **named: Any) -> Any:
            if f"{path}/".startswith(f"{run.run_dir.path}/"):
                if options["disk"] == "hangs":
                    wait_for_ever()
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *arguments, **named)

        return instead

    saves.STILL_SECONDS = saves.STUCK_SECONDS = 2.0
    if options["disk"] in ("pwrite", "rmdir"):
        setattr(os, options["disk"], lambda *arguments, **named: wait_for_ever())
        return
    for name in ("listdir", "scandir", "open", "stat"):
        setattr(os, name, without(getattr(os, name)))


for step in run.steps(options["steps"]):
    if options["validate_every"] and step and step % options["validate_every"] == 0:
        run.log(val_loss=validate())
    print("step", step, flush=True)
    if -1 < options["clamp_from"] <= step:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    while os.path.exists(os.environ.get("HOLD", "")) and step >= int(os.environ["HOLD_AT"]):
        time.sleep(0.005)  # the test says when it goes on
    if step == options["disk_at"] and options["disk_rank"] in (None, run.rank):
        lose_the_disk()
    if step == options["pause_at"]:
        time.sleep(options["pause_seconds"])
    if step == options["fail_at"] and run.rank == options["fail_rank"]:
        if options["fail_as"] == "memory":
            torch.empty(2**46)  # more than any machine has
        if options["fail_as"] == "data":
            raise DataError("tokens.bin ends in the middle of a token")
        if options["fail_as"] == "disk":
            raise DataError("tokens.bin cannot be read") from OSError(errno.EIO, os.strerror(errno.EIO))
        raise ZeroDivisionError("the loss of this step is no number")
    if step == options["hang_at"] and run.rank == options["hang_rank"]:
        if options["hang_in"] == "C":
            ctypes.PyDLL(None).sleep(10**6)  # a PyDLL's function keeps the interpreter to itself
        wait_for_ever()
    if step == options["exit_at"]:
        sys.exit(options["exit_status"])
    with run.span("data"):
        time.sleep(options["pause"])
    total = torch.zeros((), device=run.device)
    steps_now = (step + 1) % options["step_every"] == 0
    for chunk in range(options["chunks"]):
        with accumulate(model, last=steps_now and chunk == options["chunks"] - 1):
            loss = loss_of(model, step, chunk)
            loss = loss * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))
            with run.span("backward"):
                scaler.scale(loss).backward()
        total += loss.detach()
    if step == options["bad_at"] and options["bad"] == "gradient":
        next(model.parameters()).grad[0] = float("inf")
    elif step == options["bad_at"] and run.rank == options["bad_rank"]:
        total = total * float("nan")
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    run.log(loss=total, tokens=5 * (run.rank + 1), samples=12, grad_norm=norm)
    if options["overflow"]:
        next(model.parameters()).grad[0] = float("inf")
    if steps_now:
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=not options["zeroed"])
    if step == options["stray_at"] and run.rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + options["stray_by"])
    if options["validate_late"]:
        validate()
    if step == options["break_at"]:
        break
if options["last_loss"] is not None:
    run.log(val_loss=options["last_loss"])
drawing_from = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
print("done, and would draw from", hashlib.sha256(json.dumps(drawing_from).encode()).hexdigest(), flush=True)
