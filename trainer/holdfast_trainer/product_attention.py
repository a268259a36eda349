"""Causal attention in bf16 on a CPU, whose gradient is computed by matrix products.

torch's flash kernel multiplies small tiles; oneDNN's bf16 products of whole blocks take two thirds of the
time of its backward pass. They compute what FlashAttention-2 does (Dao 2023, section 3.1), one block of keys
after the other with all queries that see it, for as many heads at once as leave the scores in the cache. The
forward pass stays torch's.

What a product gives is rounded to bf16. So the logarithm of its row's sum is subtracted from a score, and
what the softmax takes back from the gradient of a probability, within the product, which adds up in fp32: as
two more columns. What is rounded is then near zero wherever the probability is large. What is no product is
computed by layers.cpp, in a pass over memory each, where that can be had. docs/figures.md has what all that
is worth.
"""

from __future__ import annotations

import math
import platform
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import cpuinfo
from .attention import Attend, parts, register
from .kernel_trial import attention_tried, why_not
from .native import library
from .precision import Bf16, bf16_of_cpu

LEAST = 128
"""Tokens of context: with fewer, torch's kernel is the faster one."""
KEYS = 256
"""In a block."""
SCORES = 1 << 21
"""At once, of two matrices of 16 bits."""


def choose(
    device: torch.device,
    dtype: torch.dtype,
    q: tuple[int, int, int, int],
    kv_heads: int,
    *,
    joined: bool,
    fused: bool,
) -> str:
    """Why `kernel` is not to be used there for queries of shape `q`, [B, heads, T, size]; empty where it is.

    It is tried, as kernel_trial.py has it. `joined`: queries, keys and values are parts of one tensor;
    `fused`: what can be is computed by layers.cpp.
    """
    if unfit := why_unfit(device, dtype, q, kv_heads):
        return unfit
    _, heads, time, size = q
    own, row = kernel(joined=joined, fused=fused), (1, heads, time, size)
    return why_not(lambda: attention_tried(own, device, dtype, row, heads, joined=joined), "torch")


def why_unfit(device: torch.device, dtype: torch.dtype, q: tuple[int, int, int, int], kv_heads: int) -> str:
    """Why `kernel` would be of no use there, if it could be tried; empty where it would."""
    _, heads, time, _ = q
    if device.type != "cpu" or dtype != torch.bfloat16 or not is_for(cpuinfo.read(), platform.machine()):
        return "it is for CPUs whose AVX512-BF16 or AMX makes bf16 fast, in bf16"
    if time < LEAST or kv_heads != heads:
        return f"it is for contexts from {LEAST} tokens on, and as many heads of keys as of queries"
    return ""


def is_for(text: str, machine: str) -> bool:
    """By the text of /proc/cpuinfo: whether bf16 is fast there, by what this was measured with. Pure."""
    flags = cpuinfo.first(text).get("flags", "").split()
    return bf16_of_cpu(text, machine) is Bf16.FAST and "avx512_bf16" in flags


def kernel(*, joined: bool, fused: bool = False) -> Attend:
    """For queries, keys and values that are parts of one tensor, or for each in its own. Causal; nothing is
    dropped, and it takes no heed of what else is said of that."""
    return partial(attend_joined if joined else attend, fused=fused)


def attend(q: Tensor, k: Tensor, v: Tensor, *, fused: bool, **_: object) -> Tensor:
    """[B, heads, T, size], in and out."""
    return attend_joined(torch.stack((q, k, v), dim=2).transpose(1, 3), fused=fused)


def attend_joined(qkv: Tensor, *, fused: bool, **_: object) -> Tensor:
    """[B, T, 3, heads, size] to [B, heads, T, size]."""
    out: Tensor = _Attention.apply(qkv, fused)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, fused: bool) -> Tensor:
        out, lse = torch.ops.holdfast.product_attention(qkv)
        ctx.save_for_backward(qkv, out, lse)
        ctx.fused = fused
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        backward = torch.ops.holdfast.product_attention_backward
        return backward(*grads, *ctx.saved_tensors, ctx.fused), None


def _computed(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the logarithms of the sums of the softmax, fp32 [B, heads, T]."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts(qkv), 0.0, True)
    return found[0], found[1]


def _gradients(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, fused: bool) -> Tensor:
    batch, heads, time, size = out.shape
    scale = 1 / math.sqrt(size)
    flat = batch * heads
    given = (_parts_at_once if fused else _parts)(grad, qkv, out, lse, scale)
    sums = torch.zeros((flat, time, size), dtype=torch.float32) if time > KEYS else None
    dq, dk, dv = (torch.empty((flat, time, size), dtype=qkv.dtype) for _ in range(3))
    count = max(1, SCORES // (time * min(time, KEYS)))
    for first in range(0, flat, count):
        some = slice(first, first + count)
        into = dq[some] if sums is None else sums[some]
        _fill(tuple(one[some] for one in given), into, dk[some], dv[some], scale, fused)
    if sums is not None:
        dq.copy_(sums)
    found = _shape(grad, qkv, out, lse, fused)
    if fused:
        library().call("attention_joined", dq, dk, dv, found, batch, time, heads, size)
        return found
    for place, one in zip(parts(found), (dq, dk, dv), strict=True):
        place.copy_(one.view(batch, heads, time, size))
    return found


def _fill(given: tuple[Tensor, ...], dq: Tensor, dk: Tensor, dv: Tensor, scale: float, fused: bool) -> None:
    """The gradients of some heads, [heads, T, size], from queries, the output's gradient, keys and values,
    which have two columns more."""
    heads, time, size = dq.shape
    nothing = dk.new_zeros(())
    for first in range(0, time, KEYS):
        keys, seen = slice(first, first + KEYS), slice(first, time)
        q, grad, k, v = given[0][:, seen], given[1][:, seen], given[2][:, keys], given[3][:, keys]
        # A row for each key, as of the products below two want them so.
        p = torch.baddbmm(nothing, k, q.transpose(1, 2), beta=0, alpha=scale)
        ds = torch.bmm(v, grad.transpose(1, 2))
        if fused:
            library().call("softmax_back", p, ds, heads, k.shape[1], q.shape[1])
        else:
            p.exp_()[..., : k.shape[1]].triu_()  # and be it infinite there: what a query may not see
            ds.mul_(p)
        q, grad, k = q[..., :size], grad[..., :size], k[..., :size]
        torch.bmm(p, grad, out=dv[:, keys])
        torch.baddbmm(nothing, ds, q, beta=0, alpha=scale, out=dk[:, keys])
        if time <= KEYS:
            torch.baddbmm(nothing, ds.transpose(1, 2), k, beta=0, alpha=scale, out=dq)
        else:
            dq[:, seen] += torch.baddbmm(nothing, ds.transpose(1, 2), k, beta=0, alpha=scale)


def _parts(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Queries, the output's gradient, keys and values as `_fill` takes them."""
    q, k, v = parts(qkv)
    delta = (grad.float() * out.float()).sum(-1)
    return _less(q, lse / scale), _less(grad, delta), _with_ones(k), _with_ones(v)


def _parts_at_once(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, ...]:
    batch, heads, time, size = out.shape
    shape = batch * heads, time, size + 2
    q, g, k, v = found = tuple(torch.empty(shape, dtype=qkv.dtype) for _ in range(4))
    grad, out, lse = (one.transpose(1, 2).contiguous() for one in (grad, out, lse))
    sizes = batch, time, heads, size
    library().call("attention_parts", grad, qkv.contiguous(), out, lse, q, g, k, v, *sizes, scale)
    return found


def _less(x: Tensor, taken: Tensor) -> Tensor:
    """[B, heads, T, size] and fp32 [B, heads, T] to [B * heads, T, size + 2]: a product with `_with_ones` is
    that of x less `taken`."""
    first = taken.to(x.dtype)
    return _wider(x, -first, (first.float() - taken).to(x.dtype))


def _with_ones(x: Tensor) -> Tensor:
    one = x.new_ones(())
    return _wider(x, one, one)


def _wider(x: Tensor, *columns: Tensor) -> Tensor:
    wider = torch.cat((x, *(column.expand(x.shape[:-1])[..., None] for column in columns)), dim=-1)
    return wider.flatten(0, 1)


def _shapes(qkv: Tensor) -> tuple[Tensor, Tensor]:
    batch, time, _, heads, size = qkv.shape
    out = qkv.new_empty((batch, time, heads, size)).transpose(1, 2)
    return out, qkv.new_empty((batch, time, heads), dtype=torch.float32).transpose(1, 2)


def _shape(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, fused: bool) -> Tensor:
    return qkv.new_empty(qkv.shape) if fused else torch.empty_like(qkv)


register("product_attention", "(Tensor qkv) -> (Tensor, Tensor)", "cpu", _computed, _shapes)
_BACKWARD = "(Tensor grad, Tensor qkv, Tensor out, Tensor lse, bool fused) -> Tensor"
register("product_attention_backward", _BACKWARD, "cpu", _gradients, _shape)
