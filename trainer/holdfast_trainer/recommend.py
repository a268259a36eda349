"""Settings for a GPU of some size, worked out from what the training needs of memory. Pure.

What costs least is tried first: DDP; FSDP, which exchanges half as much again; activations recomputed, about
a third more work; both. Of the first that fits at all the largest micro-batch that leaves room is taken.

Of a GPU that is not here its name alone is known. Its memory is less than that: GDDR with ECC keeps a
sixteenth of it, and the driver's context and libraries' workspaces are nobody's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .config import Config
from .fused_loss import OLDEST as FUSES_LOSS_FROM
from .gpu_words import TENSOR_CORES_FOR_BF16
from .memory_need import FULL_SHARE, Need, largest_micro_batch, memory_need
from .precision import Bf16, choose_precision

ECC_SHARE = 15 / 16
CONTEXT_BYTES = 1 << 29
"""An estimate: 0.3 to 0.6 GB, by architecture and by what is loaded."""


@dataclass(frozen=True)
class Recommended:
    """What fits, as the configuration would say it. `room` and `need` are bytes of one rank."""

    config: Config
    room: int
    """What tensors may take, fragments included."""
    need: Need
    correction: float
    """Measured to reckoned; 1.0 where nothing was measured."""
    fused_loss: bool = False

    @property
    def bytes(self) -> int:
        return int(self.need.total * self.correction)

    @property
    def settings(self) -> list[str]:
        """`section.key=value`, for a command line."""
        train = self.config.train
        return [
            f"train.precision={train.precision}",
            f"train.parallel={train.parallel}",
            f"train.activation_checkpointing={str(train.activation_checkpointing).lower()}",
            f"train.micro_batch={train.micro_batch}",
        ]


def room_of(gigabytes: float) -> int:
    """Bytes for the tensors of one rank on a GPU that is sold with so many GB (2^30 bytes, as they count)."""
    return int(gigabytes * (1 << 30) * ECC_SHARE) - CONTEXT_BYTES


def recommend(
    config: Config,
    precision: str,
    world_size: int,
    room: int,
    correction: float = 1.0,
    *,
    fused_loss: bool = False,
) -> Recommended | None:
    """Settings that fit into `room` bytes a rank; None where nothing that can be set would."""
    limit = int(FULL_SHARE * room)
    for parallel, recomputing in _ways(precision, world_size):
        train = replace(
            config.train,
            precision=precision,  # type: ignore[arg-type]
            parallel=parallel,  # type: ignore[arg-type]
            activation_checkpointing=recomputing,
        )
        tried = replace(config, train=train)
        size = largest_micro_batch(tried, precision, world_size, limit, correction, fused_loss=fused_loss)
        if size is not None:
            need = memory_need(tried, precision, world_size, size, fused_loss=fused_loss)
            there = replace(tried, train=replace(train, micro_batch=size))
            return Recommended(there, room, need, correction, fused_loss)
    return None


def recommend_for(
    config: Config, world_size: int, gigabytes: float, capability: float
) -> Recommended | int | None:
    """For a GPU that is not here: settings, or else how many such ranks would do, or None where none would.

    fp16 cannot be cut over ranks (its scaler would have to see them all), so fp32 is tried after it.
    """
    bf16 = Bf16.FAST if capability >= TENSOR_CORES_FOR_BF16 else Bf16.NONE
    precision = choose_precision("auto", "cuda", bf16)
    room = room_of(gigabytes)
    precisions = dict.fromkeys((precision, "fp32")) if precision == "fp16" else (precision,)

    def fitting(name: str, ranks: int) -> Recommended | None:
        fused = name != "fp32" and capability >= FUSES_LOSS_FROM and config.train.fuses_loss
        return recommend(config, name, ranks, room, fused_loss=fused)

    for name in precisions:
        if (found := fitting(name, world_size)) is not None:
            return found
    more = (n for n in range(world_size + 1, config.train.global_batch + 1))
    dividing = (n for n in more if config.train.global_batch % n == 0)
    return next((n for n in dividing if any(fitting(name, n) for name in precisions)), None)


def _ways(precision: str, world_size: int) -> Sequence[tuple[str, bool]]:
    kinds = ["ddp"] if world_size == 1 or precision == "fp16" else ["ddp", "fsdp"]
    return [(kind, recomputing) for recomputing in (False, True) for kind in kinds]


def larger_step(found: Recommended, world_size: int) -> int | None:
    """How many sequences a pass there is room for, where a step has less than half of them a rank."""
    share = found.config.train.global_batch // world_size
    if found.config.train.micro_batch != share:
        return None
    precision = found.config.train.precision
    one, two = (
        memory_need(found.config, precision, world_size, size, fused_loss=found.fused_loss).total
        for size in (1, 2)
    )
    fits = 1 + math.floor((FULL_SHARE * found.room / found.correction - one) / (two - one))
    return fits if fits >= 2 * share else None
