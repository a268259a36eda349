"""What a training step needs of a device's memory, worked out from the configuration.

State: AdamW in fp32 holds 16 bytes a parameter (weight, gradient, two moments); autocast adds a copy of the
matrices in the narrower type. FSDP cuts the 16 over the ranks, and gathers, in the narrower type, what a
block needs, with the weights of the next one, and what is in no block.

Activations of a GPT-2 block, per token, are about 34 bytes x width in 16 bits with fused attention
(Korthikanti et al. 2022, section 4.1, without the terms that fused attention does not keep, and without
dropout masks where there is no dropout), twice that in fp32. A Llama block keeps what both its norms take, in
fp32, and what they give, in 16 bits once for each of the five products that take it; queries, keys, values
and what attention gives; and four tensors as wide as its MLP (the gate, its SiLU, what that is multiplied
with, and the product). With recomputation each block keeps its input alone, and one block at a time is whole.
In the backward pass the gradients of one MLP live beside what is kept: two tensors as wide as it, three where
it is gated, and two of the residual stream.

The logits and their gradient are the largest tensors of a small model: they are counted in the type of the
products, in fp32 for the loss, and in fp32 for its gradient; with a fused loss (fused_loss.py) in the type of
the products alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import Config
from .model import MLP_RATIO, parameter_count
from .model_config import ModelConfig, divisors

ADAMW_BYTES = 16
BLOCK_BYTES = 34
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
    masks = model.width * (DROPOUT_BYTES if model.dropout else 0)
    block = tokens * (_block(model, width) + masks)
    kept = block * model.layers
    if train.activation_checkpointing:
        kept = tokens * model.width * 4 * model.layers + block
    return Need(
        state=ADAMW_BYTES * parameters // ranks,
        copies=2 * parameters if width == 2 and ranks == 1 else 0,
        activations=kept + tokens * _backward(model) * width,
        logits=tokens * model.vocab_size * (2 * width if fused_loss else width + 4 + 4),
        gathered=_gathered(config, width) if ranks > 1 else 0,
    )


def _block(model: ModelConfig, width: int) -> int:
    """Bytes that one keeps of a token, without dropout; `width` is that of a number in a product."""
    if model.family == "gpt2":
        return model.width * BLOCK_BYTES * width // 2
    keys = model.key_value_heads * (model.width // model.heads)
    normed = 5 if width == 2 else 2
    return 2 * 4 * model.width + width * ((normed + 2) * model.width + 2 * keys + 4 * model.mlp_size)


def _backward(model: ModelConfig) -> int:
    """Numbers of a token that the gradients of one MLP are."""
    wide = 2 * MLP_RATIO * model.width if model.family == "gpt2" else 3 * model.mlp_size
    return wide + 2 * model.width


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
