"""Steps of the reference loop, without what resumes and reports: for measuring before a run.

Nothing is learned: the rate is 0, so weights stay finite whatever the configuration says.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from .assembly import Batches, check_sharding
from .checkpoint.tree import pack
from .config import Config
from .model import build_model
from .optim import Precision, build_optimizer, clip_gradients
from .parallel import Gang, accumulate, shard, wrap


@dataclass
class StepTimes:
    """Seconds of one step, by part; `data` is what it waited for its batch."""

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        return self.data + self.forward + self.backward + self.optimizer


class Clock:
    """Adds the time since it was last asked to a part of the step; on a GPU once that has done its work."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.times = device, StepTimes()
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        setattr(self.times, part, getattr(self.times, part) + now - self._last)
        self._last = now


class Rehearsal:
    """A model made ready to train as configured."""

    def __init__(
        self, config: Config, gang: Gang, compute: Precision, batches: Batches, *, alone: bool = False
    ) -> None:
        """`alone` leaves out what needs the other ranks."""
        self._config, self._gang, self._compute, self._batches = config, gang, compute, batches
        torch.manual_seed(config.train.seed)
        self._raw = build_model(config.model, recompute=config.train.activation_checkpointing)
        sharded = config.train.parallel == "fsdp" and not alone
        if sharded:
            check_sharding(compute.name)
        else:
            self._raw.to(gang.device)
        if config.train.compile:
            mode = None if config.train.compile is True else config.train.compile
            for part in [self._raw] if gang.world_size == 1 else list(self._raw.blocks):
                part.forward = torch.compile(part.forward, mode=mode)
        if sharded:
            self._model = shard(self._raw, gang, list(self._raw.blocks))
        elif alone:
            self._model = self._raw
        else:
            self._model = wrap(self._raw, gang, static_graph=batches.chunks == 1)
        fused = config.train.fused_optimizer
        self._optimizer = build_optimizer(self._raw, config.optim, gang.device, fused=fused)

    def step(self, number: int) -> StepTimes:
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        clock = Clock(self._gang.device)
        chunks = self._batches.batch(number)
        clock.lap("data")
        for index, (tokens, targets) in enumerate(chunks):
            with accumulate(self._model, last=index == len(chunks) - 1):
                with self._compute.autocast():
                    loss = self._model(tokens, targets)[1] / len(chunks)
                clock.lap("forward")
                self._compute.scaler.scale(loss).backward()
                clock.lap("backward")
        self._compute.scaler.unscale_(self._optimizer)
        clip_gradients(self._raw.parameters(), self._config.optim.clip)
        self._compute.scaler.step(self._optimizer)
        self._compute.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        return clock.times

    @torch.no_grad()
    def validate(self, batches: Batches) -> float:
        """Seconds of a whole validation, from one of its batches."""
        self._raw.eval()
        clock = Clock(self._gang.device)
        for tokens, targets in batches.batch(0, seed=0):
            with self._compute.autocast():
                self._raw(tokens, targets)
        clock.lap("forward")
        self._raw.train()
        return clock.times.seconds * self._config.validation.batches

    def state_bytes(self) -> int:
        """Of a checkpoint: what all ranks write together."""
        _, tensors = pack({"model": self._raw.state_dict(), "optimizer": self._optimizer.state_dict()})
        mine = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        sharded = self._config.train.parallel == "fsdp"
        return sum(self._gang.gather(mine)) if sharded else mine
