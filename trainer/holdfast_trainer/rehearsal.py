"""Steps of the reference loop, without what resumes and reports: for measuring before a run.

Nothing is learned: the rate is 0, so weights stay finite whatever the configuration says.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from .assembly import Batches, assemble
from .checkpoint.tree import packed_bytes
from .config import Config
from .optim import clip_gradients
from .parallel import Gang, accumulate
from .precision import Precision


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
    """Adds the time since it was last asked to a part of the step.

    On a GPU the CPU only queues work, and laps are CUDA events there, as a run's spans are: to wait for each
    part would leave the GPU without work between two of them, which no run does.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []
        self._last = self._now()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def lap(self, part: str) -> None:
        now = self._now()
        self._laps.append((part, self._last, now))
        self._last = now

    def read(self) -> StepTimes:
        """What the laps took; waits until a GPU is past the last one."""
        times = StepTimes()
        if self._on_gpu:
            self._last.synchronize()
        for part, begin, end in self._laps:
            seconds = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            setattr(times, part, getattr(times, part) + seconds)
        return times


class Rehearsal:
    """A model made ready to train as configured."""

    def __init__(
        self,
        config: Config,
        gang: Gang,
        compute: Precision,
        batches: Batches,
        *,
        alone: bool = False,
        validates: bool = False,
    ) -> None:
        """`alone` leaves out what needs the other ranks; `validates`: `validate` will be called."""
        self._config, self._gang, self._compute, self._batches = config, gang, compute, batches
        together = Gang(0, 1, gang.local_rank, gang.device) if alone else gang
        parts = assemble(
            together,
            config,
            compute,
            batches,
            weights=config.train.init_from,
            validates=validates,
            cache=None,
        )
        self._raw, self._model, self._optimizer = parts.raw_model, parts.model, parts.optimizer
        self.not_compiled = parts.not_compiled
        """Why not, where it was to be; else empty."""
        self.attention, self.slow_attention = parts.attention, parts.slow_attention
        self.fused_loss, self.large_loss = parts.fused_loss, parts.large_loss
        self.fused_layers, self.slow_layers = parts.layers != "torch", parts.slow_layers
        self._losses = torch.zeros((), device=gang.device)

    def step(self, number: int) -> Clock:
        """Does one, or queues it, and waits for nothing: its times are there once they are read."""
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
            self._losses += loss.detach()
        self._compute.scaler.unscale_(self._optimizer)
        clip_gradients(self._raw.parameters(), self._config.optim.clip)
        self._compute.scaler.step(self._optimizer)
        self._compute.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        return clock

    @property
    def losses(self) -> float:
        """Of the steps so far, added up: no finite number where one is none. Waits for a GPU."""
        return float(self._losses)

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
        return clock.read().seconds * self._config.validation.batches

    def state_bytes(self) -> int:
        """Of a checkpoint: what all ranks write together."""
        mine = packed_bytes({"model": self._raw.state_dict(), "optimizer": self._optimizer.state_dict()})
        sharded = self._config.train.parallel == "fsdp"
        return sum(self._gang.gather(mine)) if sharded else mine
