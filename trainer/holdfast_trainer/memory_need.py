"""What a training step needs of a device's memory, worked out from the configuration.

State: AdamW in fp32 holds 16 bytes a parameter (weight, gradient, two moments); autocast adds a copy of the
matrices in the narrower type. FSDP cuts the 16 over the ranks, and gathers, in the narrower type, what a
block needs, with the weights of the next one, and what is in no block. Activations of a block, per token, are
about 34 bytes x width in 16 bits with fused attention (Korthikanti et al. 2022, section 4.1, without the
terms that fused attention does not keep, and without dropout masks where there is no dropout), twice that in
fp32. With recomputation each block keeps its input alone, and one block at a time is whole. The logits and
their gradient are the largest tensors of a small model: they are counted in the type of the products, in fp32
for the loss, and in fp32 for its gradient; with a fused loss (fused_loss.py) in the type of the products
alone. In the backward pass the gradients of one MLP live beside what is kept: two tensors as wide as it, and
two of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import Config
from .model import parameter_count
from .model_config import divisors

ADAMW_BYTES = 16
BLOCK_BYTES = 34
BACKWARD_WIDTHS = 10
DROPOUT_BYTES = 3
"""Of masks, per element of the residual stream (a byte each)."""
FULL_SHARE = 0.92
"""Of a device's memory that a step may take: fragments and the allocator's rounding need the rest."""


@dataclass(frozen=True)
class Need:
    """Bytes, by what takes them."""

    state: int
    copies: int
    activations: int
    logits: int
    gathered: int = 0
    """Of what FSDP has cut."""

    @property
    def total(self) -> int:
        return self.state + self.copies + self.activations + self.logits + self.gathered


def memory_need(
    config: Config, precision: str, world_size: int, micro_batch: int, *, fused_loss: bool = False
) -> Need:
    """Of one rank; `precision` is fp32, bf16 or fp16."""
    model, train = config.model, config.train
    parameters = parameter_count(model)
    ranks = world_size if train.parallel == "fsdp" else 1
    width = 4 if precision == "fp32" else 2
    tokens = micro_batch * model.context
    block = tokens * model.width * (BLOCK_BYTES * width // 2 + (DROPOUT_BYTES if model.dropout else 0))
    kept = block * model.layers
    if train.activation_checkpointing:
        kept = tokens * model.width * 4 * model.layers + block
    return Need(
        state=ADAMW_BYTES * parameters // ranks,
        copies=2 * parameters if width == 2 and ranks == 1 else 0,
        activations=kept + tokens * model.width * BACKWARD_WIDTHS * width,
        logits=tokens * model.vocab_size * (2 * width if fused_loss else width + 4 + 4),
        gathered=_gathered(config, width) if ranks > 1 else 0,
    )


def _gathered(config: Config, width: int) -> int:
    """Weights and gradients, `width` bytes each, of what is in no block, and of a block, with the weights of
    the next; and the gradients that are being reduced, in fp32."""
    model = config.model
    whole, less = (parameter_count(replace(model, layers=layers)) for layers in (2, 1))
    block = whole - less
    return width * (2 * (less - block) + 3 * block) + 4 * block


def largest_micro_batch(
    config: Config,
    precision: str,
    world_size: int,
    room: int,
    correction: float = 1.0,
    *,
    fused_loss: bool = False,
) -> int | None:
    """The largest divisor of a rank's share whose need, times `correction`, fits into `room` bytes.

    None where not even one sequence fits.
    """
    share = config.train.global_batch // world_size
    fitting = [
        size
        for size in divisors(share)
        if memory_need(config, precision, world_size, size, fused_loss=fused_loss).total * correction <= room
    ]
    return max(fitting, default=None)
