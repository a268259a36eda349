"""Whether kernels of ours may stand in for torch's on this device: they are tried there, at each start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import Attend, attend_joined

Compute = Callable[[], tuple[Tensor, ...]]
CLOSE = 0.02
"""Relative difference between two kernels of attention, by norms: several times that of two which round to 16
bits."""


def why_not(trial: Callable[[], str], package: str) -> str:
    """What a trial found wrong, or what it raised; empty where nothing was. `package` has what it imports."""
    try:
        return trial()
    except ImportError as error:
        return f"pip install {package} ({error})"
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def compared(own: Compute, torchs: Compute, close: float) -> str:
    """Why not, though both compute the same: its bits do not repeat, or it is further away than `close`, a
    relative difference by norms. Empty where it may."""
    first = own()
    for _ in range(2):
        if not all(torch.equal(one, other) for one, other in zip(first, own(), strict=True)):
            return "its bits did not repeat"
    for one, other in zip(first, torchs(), strict=True):
        if not (one.float() - other.float()).norm() <= close * other.float().norm():
            return "what it computes is too far from what PyTorch does"
    return ""


def derivatives(out: Tensor, leaves: Sequence[Tensor], seen: Tensor) -> tuple[Tensor, ...]:
    """With respect to `leaves`, where that of `out` is `seen`, in whose type it is. To the bit what
    `torch.autograd.grad(out, leaves, seen)` gives, which imports sympy to check shapes: half a second."""
    return torch.autograd.grad((out * seen).sum(), leaves)


def attention_tried(
    attend: Attend,
    device: torch.device,
    dtype: torch.dtype,
    q: tuple[int, int, int, int],
    kv_heads: int,
    *,
    joined: bool,
) -> str:
    """What is wrong with it for queries of shape `q`, [B, heads, T, size], beside torch's own; empty where
    nothing is. `joined`: queries, keys and values are parts of one tensor."""
    batch, heads, time, size = q
    drawn = torch.Generator(device).manual_seed(1)

    def draw(*counts: int) -> Tensor:
        return torch.randn(batch, time, *counts, size, device=device, dtype=dtype, generator=drawn)

    leaves = [draw(3, heads)] if joined else [draw(count) for count in (heads, kv_heads, kv_heads)]
    for leaf in leaves:
        leaf.requires_grad_()
    seen = draw(heads).transpose(1, 2)

    def computed(attend: Attend) -> tuple[Tensor, ...]:
        if joined:
            out = attend(leaves[0])
        else:
            inputs = (leaf.transpose(1, 2) for leaf in leaves)
            out = attend(*inputs, is_causal=True, enable_gqa=kv_heads != heads)
        return (out.detach(), *derivatives(out, leaves, seen))

    torchs: Attend = attend_joined if joined else F.scaled_dot_product_attention
    return compared(lambda: computed(attend), lambda: computed(torchs), CLOSE)
