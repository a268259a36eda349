"""What a block computes between its matrix products, on a CPU, in one pass over memory each (layers.cpp).

PyTorch computes each operator by itself: a sum of fp32 and bf16 makes a copy in fp32 first, a norm writes
fp32 that another pass rounds to bf16, and GELU's tanh takes several times as long as to read and write what
it is computed of. Where products are fast, as with AMX, that is a third of a step. Here a residual is added,
normalised and rounded at once, and what the backward pass adds up is added as it is made. Sums are fp32, in
an order that the number of threads alone decides, so bits repeat. torch.compile makes the like by itself.
docs/figures.md has what it is worth.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import cpuinfo
from .kernel_trial import compared, derivatives, why_not
from .native import Unavailable, level, library
from .pointwise import Pointwise

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Of the types for which there are functions."""
CLOSE = 0.005
"""Relative difference from what PyTorch computes, by norms: in bf16 it rounds more often."""


def choose(device: torch.device, dtype: torch.dtype) -> str:
    """Why `Fused` is not to be used there; empty where it is.

    It is tried: what does not repeat its bits, or is far from what torch computes, is not taken.
    """
    if not is_for(device, dtype):
        return "it is for CPUs of x86 with AVX2 or AVX-512, in bf16 or fp32"
    try:
        library()
    except Unavailable as error:
        return str(error)
    return why_not(lambda: tried(Fused, dtype), "torch")


def is_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it would be worth having."""
    return device.type == "cpu" and dtype in NAMES and bool(level(cpuinfo.read(), platform.machine()))


class Fused(Pointwise):
    """By layers.cpp. What it has no function for, such as a sum in another type than fp32, or what was moved
    to another device, is PyTorch's."""

    @staticmethod
    def gelu(x: Tensor) -> Tensor:
        return _Gelu.apply(x) if _known(x) else Pointwise.gelu(x)

    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        known = _known(gate) and gate.dtype == up.dtype
        return _Gated.apply(gate, up) if known else Pointwise.gated(gate, up)

    @staticmethod
    def norm(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> tuple[Tensor, Tensor]:
        dtype = _products_in(x)
        return _normed(x, None, norm, dtype) if _fits(x, norm, dtype) else Pointwise.norm(x, norm)

    @staticmethod
    def add_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> tuple[Tensor, Tensor]:
        fits = _fits(x, norm, branch.dtype) and branch.dtype == _products_in(x)
        return _normed(x, branch, norm, branch.dtype) if fits else Pointwise.add_norm(x, branch, norm)

    @staticmethod
    def add(x: Tensor, branch: Tensor) -> Tensor:
        known = x.dtype == torch.float32 and _known(branch)
        return _Add.apply(x, branch) if known else Pointwise.add(x, branch)


def tried(layers: type[Pointwise], dtype: torch.dtype) -> str:
    """What is wrong with it, beside torch's; empty where nothing is."""
    drawn = torch.Generator().manual_seed(1)
    rows, width = 64, 96

    def draw(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(rows, width, generator=drawn).to(dtype).requires_grad_()

    x, branch, gate, up = draw(), draw(dtype), draw(dtype), draw(dtype)
    norms = nn.LayerNorm(width), nn.RMSNorm(width)
    for one in norms:
        nn.init.normal_(one.weight, generator=drawn)
    seen = draw()
    leaves = [x, branch, gate, up, *(value for one in norms for value in one.parameters())]

    def computed(layers: type[Pointwise]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            first, normed = layers.norm(x, norms[0])
            second, again = layers.add_norm(first, branch * normed.to(dtype), norms[1])
            out = layers.add(second, layers.gelu(gate) + layers.gated(gate, up) * again.to(dtype))
        return (out.detach(), *derivatives(out, leaves, seen))

    return compared(lambda: computed(layers), lambda: computed(Pointwise), CLOSE)


def _known(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in NAMES


def _products_in(x: Tensor) -> torch.dtype:
    """The type in which a product of x is computed here."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def _fits(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm, dtype: torch.dtype) -> bool:
    """Not where weights are sharded: gathered, they have the products' type."""
    return _known(x) and x.dtype == norm.weight.dtype == torch.float32 and dtype in NAMES


def _normed(
    x: Tensor, branch: Tensor | None, norm: nn.LayerNorm | nn.RMSNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    centre = isinstance(norm, nn.LayerNorm)
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    found: tuple[Tensor, Tensor] = _Norm.apply(x, branch, norm.weight, bias, eps, centre, dtype)
    return found


def _call(name: str, dtype: torch.dtype, *given: Tensor | float | None) -> None:
    library().call(f"{name}_{NAMES[dtype]}", *given)


def _contiguous(one: Tensor | None) -> Tensor | None:
    return None if one is None else one.contiguous()


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        _call("gelu", x.dtype, x, y, x.numel())
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = torch.empty_like(x)
        _call("gelu_back", x.dtype, grads[0].contiguous(), x, found, x.numel())
        return found


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        _call("gated", gate.dtype, gate, up, y, gate.numel())
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        found = torch.empty_like(gate), torch.empty_like(up)
        _call("gated_back", gate.dtype, grads[0].contiguous(), gate, up, *found, gate.numel())
        return found


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor) -> Tensor:
        x, branch = x.contiguous(), branch.contiguous()
        total = torch.empty_like(x)
        _call("add", branch.dtype, x, branch, total, x.numel())
        ctx.dtype = branch.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].to(ctx.dtype)


class _Norm(torch.autograd.Function):
    """Of x, or of x and a branch: their sum, and the norm of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centre: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x, weight = x.contiguous(), weight.contiguous()
        branch, bias = _contiguous(branch), _contiguous(bias)
        width = x.shape[-1]
        rows = x.numel() // width
        total = None if branch is None else torch.empty_like(x)
        normed = torch.empty(x.shape, dtype=dtype)
        means, scales = torch.empty(rows), torch.empty(rows)
        shape = rows, width, float(eps), int(centre)
        _call("norm", dtype, x, branch, weight, bias, total, normed, means, scales, *shape)
        total = x.view_as(x) if total is None else total
        ctx.save_for_backward(total, weight, means, scales)
        ctx.given = branch is not None, bias is not None, centre, dtype
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, means, scales = ctx.saved_tensors
        has_branch, has_bias, centre, dtype = ctx.given
        width = x.shape[-1]
        rows = x.numel() // width
        seen, grad = map(_contiguous, grads)
        if grad is None:
            grad = torch.zeros(x.shape, dtype=dtype)
        found = torch.empty_like(x)
        rounded = torch.empty(x.shape, dtype=dtype) if has_branch and dtype != x.dtype else None
        weights, biases = (torch.empty(torch.get_num_threads(), width) for _ in range(2))
        shape = rows, width, int(centre)
        _call(
            "norm_back", dtype, grad, seen, x, weight, means, scales, found, rounded, weights, biases, *shape
        )
        to_branch = found if rounded is None else rounded
        return (
            found,
            to_branch if has_branch else None,
            weights.sum(0),
            biases.sum(0) if has_bias else None,
            None,
            None,
            None,
        )
