"""The reference GPT as a subject of measurement: settings to configuration and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ..assembly import Batches
from ..config import Config
from ..data import TokenDataset
from ..parallel import Gang
from ..precision import has_tf32, precision
from ..rehearsal import Clock, Rehearsal
from .settings import Settings


def settings_of(config: Config, compute: str, gang: Gang) -> Settings:
    """How the configuration trains today; `compute` is its precision, resolved."""
    train = config.train
    share = train.global_batch // gang.world_size
    micro = train.micro_batch or share
    return Settings(
        batch=micro,
        accumulate=share // micro,
        precision=cast(Any, compute),
        tf32=train.tf32 if has_tf32(gang.device) else None,
        compile=bool(train.compile),
        fused=train.fused_optimizer,
        threads=train.threads,
        recompute=train.activation_checkpointing,
        deterministic=train.kernels,
        learning_rate=config.optim.learning_rate,
    )


def with_settings(config: Config, settings: Settings, world_size: int) -> Config:
    """The configuration that trains so. Steps become fewer as the global batch grows: the same tokens."""
    train, optim = config.train, config.optim
    batch = settings.samples * world_size
    steps = max(1, round(train.steps * train.global_batch / batch))
    warmup = min(round(optim.warmup_steps * steps / train.steps), steps - 1)
    compiled = train.compile if train.compile and settings.compile else settings.compile
    rate = settings.learning_rate or optim.learning_rate
    floor = optim.min_learning_rate
    return replace(
        config,
        train=replace(
            train,
            steps=steps,
            global_batch=batch,
            micro_batch=settings.batch,
            precision=settings.precision,
            tf32=train.tf32 if settings.tf32 is None else settings.tf32,
            compile=compiled,
            fused_optimizer=settings.fused,
            threads=settings.threads,
            activation_checkpointing=settings.recompute,
            deterministic=bool(settings.deterministic),
        ),
        optim=replace(
            optim,
            warmup_steps=warmup,
            learning_rate=rate,
            min_learning_rate=None if floor is None else floor * rate / optim.learning_rate,
        ),
    )


class GptTrial:
    """Steps of the reference loop."""

    def __init__(
        self, config: Config, data: TokenDataset, settings: Settings, gang: Gang, *, alone: bool
    ) -> None:
        changed = with_settings(config, settings, gang.world_size)
        batches = Batches(data, changed, gang.rank, gang.world_size, gang.device)
        compute = precision(settings.precision, gang.device)
        begun_anew = replace(changed, train=replace(changed.train, init_from=None))  # as fast, and not read
        self._rehearsal = Rehearsal(begun_anew, gang, compute, batches, alone=alone)
        if self._rehearsal.not_compiled:
            raise RuntimeError(f"torch.compile: {self._rehearsal.not_compiled}")
        self.work: float = settings.samples * config.model.context

    def step(self, number: int) -> Clock:
        return self._rehearsal.step(number)

    @property
    def losses(self) -> float:
        return self._rehearsal.losses

    def close(self) -> None:
        """Nothing was started."""
