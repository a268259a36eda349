"""Which kernel scaled-dot-product attention takes, seen where it is dispatched.

torch picks anew for each call, by device, type, shape, mask, dropout and what needs a gradient: a fused
kernel where one can, else `math`, plain operators that write the matrix of all scores to memory. No setting
says which, and a rule of our own would be a guess; so a forward pass is watched. torch.compile traces the
same choice, but of compiled code nothing is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

Attend = Callable[..., Tensor]
"""What is called as torch's scaled_dot_product_attention is, or as `attend_joined`."""

MATH = "math"
KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "product_attention": "flash and products",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "the device's own",
    "_safe_softmax": MATH,
}
"""By an operator that this kernel has and nothing else (aten/src/ATen/native/transformers/attention.cpp, and
product_attention.py)."""


def attend_joined(qkv: Tensor, *, dropout_p: float = 0.0) -> Tensor:
    """torch's causal attention of queries, keys and values that are parts of one tensor, [B, T, 3, heads,
    size]; [B, heads, T, size]."""
    q, k, v = parts(qkv)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


def parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [B, heads, T, size] each, of [B, T, 3, heads, size]; nothing is copied."""
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
    return q, k, v


def register(name: str, signature: str, device: str, kernel: Callable[..., Any], shapes: Any) -> None:
    """Make `torch.ops.holdfast.<name>`, which `kernel` computes on such a device. torch's compiler knows it
    by its `shapes`, and looks not into it."""
    name = f"holdfast::{name}"
    torch.library.define(name, signature)
    torch.library.impl(name, device, kernel)
    torch.library.register_fake(name, shapes)


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds, to keep it away from here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kernel := KERNELS.get(func.overloadpacket.__name__):
            self.kernels[kernel] += 1
        return func(*args, **(kwargs or {}))


def attention_kernels(forward: Callable[[], object]) -> str:
    """What the calls of one forward pass took: flash, efficient, cudnn, math; several where they differ,
    the most frequent first; empty where scaled_dot_product_attention was not called."""
    with _Dispatched() as seen:
        forward()
    return ", ".join(kernel for kernel, _ in seen.kernels.most_common())
