"""What turns gradients into steps: AdamW, its schedule and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .config import OptimConfig

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Where AdamW has one kernel for all parameters."""


def build_optimizer(
    model: nn.Module, config: OptimConfig, device: torch.device, *, fused: bool = True
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: group 0 decays (matrices), group 1 does not (vectors).

    Decoupled decay as in Loshchilov and Hutter 2019. The groups' `lr` starts at the peak; set it from
    `learning_rate` before every step. `fused`: with one kernel for all, where the device has it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=fused and device.type in FUSED_DEVICES,
    )


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of step `step` (0-based) of `total_steps`.

    Linear warm-up which ends at the peak with step `warmup_steps - 1`, a cosine from there to
    `final_learning_rate` at the last step (Loshchilov and Hutter 2017), and that rate ever after.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    low, high = config.final_learning_rate, config.learning_rate
    return low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down to the 2-norm `max_norm` (0: leave them) and return the norm before.

    A float32 scalar on the parameters' device, not synchronised with the host. A norm which is not
    finite is returned as it is; with a gradient scaler, unscale first. Sharded parameters (DTensor)
    give the norm over all ranks.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # PyTorch multiplies by 1 what stays as it is; on a CPU one may look first.
    stays = type(norm) is Tensor and norm.device.type == "cpu" and bool(norm + 1e-6 <= max_norm)
    if max_norm > 0 and not stays:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    full_tensor = getattr(norm, "full_tensor", None)
    return norm if full_tensor is None else full_tensor()
