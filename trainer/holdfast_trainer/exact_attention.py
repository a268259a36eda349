"""Causal attention by cuDNN whose gradients repeat their bits, for Hopper GPUs.

Asked for exact bits, torch takes its flash kernel there, whose backward pass then leaves much of the GPU
idle, and not cuDNN's, which it takes otherwise: it does not ask cuDNN for the algorithm that repeats its bits
(aten/src/ATen/native/cudnn/MHA.cpp). That is asked for here, through cuDNN's own frontend. It writes the
gradient of the scores to memory, batch x heads x T x T in 16 bits, so what takes too much of it goes through
in parts: some sequences at a time, or some heads of one. docs/figures.md has what it is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .attention import Attend, parts, register
from .determinism import HOPPER
from .kernel_trial import attention_tried, why_not
from .model_config import divisors

PACKAGE = "nvidia-cudnn-frontend"
WORKSPACE = 512 << 20
"""Bytes that the gradient of the scores may take."""
TILE = 64
"""To which cuDNN rounds up the two sides of the scores."""


def is_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it would be worth having: elsewhere it has not been compared."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
    return hopper and dtype in (torch.bfloat16, torch.float16)


def choose(
    device: torch.device, dtype: torch.dtype, q: tuple[int, int, int, int], kv_heads: int, *, joined: bool
) -> str:
    """Why `kernel` is not to be used there for queries of shape `q`, [B, heads, T, size]; empty where it is.

    It is tried: what does not repeat its bits, or is far from what another kernel computes, is not taken.
    `joined`: queries, keys and values are parts of one tensor.
    """
    if unfit := _unfit(device, dtype, q, kv_heads):
        return unfit
    return why_not(
        lambda: attention_tried(kernel(joined=joined), device, dtype, q, kv_heads, joined=joined), PACKAGE
    )


def kernel(*, joined: bool) -> Attend:
    """For queries, keys and values that are parts of one tensor, or for each in its own."""
    return attend_joined if joined else attend


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    enable_gqa: bool = False,
) -> Tensor:
    """[B, heads, T, size], in and out; k and v may have fewer heads. Causal; nothing is dropped."""
    del dropout_p, is_causal, enable_gqa
    out: Tensor = _Attention.apply(q, k, v)
    return out


def attend_joined(qkv: Tensor, *, dropout_p: float = 0.0) -> Tensor:
    """[B, T, 3, heads, size] to [B, heads, T, size]. Causal; nothing is dropped.

    The gradient is written as one tensor, too: torch writes three, and then copies them into one.
    """
    del dropout_p
    out: Tensor = _JoinedAttention.apply(qkv)
    return out


@cache
def part_of(
    batch: int, heads: int, kv_heads: int, time: int, limit: int = WORKSPACE
) -> tuple[int, int] | None:
    """How many sequences, and how many heads of keys and values with their queries, are computed at once so
    that the gradient of the scores takes no more than `limit` bytes. None where nothing fits. Pure."""
    side = math.ceil(time / TILE) * TILE
    group = heads // kv_heads * side * side * 2
    for rows in reversed(divisors(batch)):
        if rows * kv_heads * group <= limit:
            return rows, kv_heads
    return next(((1, count) for count in reversed(divisors(kv_heads)) if count * group <= limit), None)


def in_parts(
    compute: Callable[[tuple[Tensor, ...]], None], tensors: tuple[Tensor, ...], rows: int, kv_heads: int
) -> None:
    """`compute` once for each part of what `_run` gets."""
    batch, all_kv_heads = tensors[1].shape[:2]
    if (rows, kv_heads) == (batch, all_kv_heads):
        compute(tensors)
        return
    for row in range(0, batch, rows):
        for part in range(all_kv_heads // kv_heads):
            compute(tuple(_cut(one, row, rows, part, all_kv_heads // kv_heads) for one in tensors))


def _cut(one: Tensor, row: int, rows: int, part: int, parts: int) -> Tensor:
    heads = one.shape[1] // parts
    return one[row : row + rows, part * heads : (part + 1) * heads]


def _unfit(device: torch.device, dtype: torch.dtype, q: tuple[int, int, int, int], kv_heads: int) -> str:
    batch, heads, time, size = q
    if not is_for(device, dtype):
        return "it is for Hopper GPUs, in bf16 or fp16"
    if size % 8 or size > 128:
        return f"heads of {size} are no multiple of 8 up to 128"
    if part_of(batch, heads, kv_heads, time) is None:
        return f"the scores of {time} x {time} tokens take more than {WORKSPACE >> 20} MiB"
    try:
        import cudnn  # noqa: F401  # of no use elsewhere
    except Exception as error:  # it looks for cuDNN's library as it is imported
        return f"pip install {PACKAGE} ({error})"
    return ""


def _computed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the logarithms of the sums of the softmax."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return found[0], found[1]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = _computed(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.holdfast.exact_attention_backward(*grads, *ctx.saved_tensors)
        return found


class _JoinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        out, lse = _computed(*parts(qkv))
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        found: Tensor = torch.ops.holdfast.exact_joined_attention_backward(*grads, *ctx.saved_tensors)
        return found


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found = _shapes(grad, q, k, v, out, lse)
    _fill(found, grad, (q, k, v), out, lse)
    return found


def _joined_gradients(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    found = _joined_shape(grad, qkv, out, lse)
    _fill(parts(found), grad, parts(qkv), out, lse)
    return found


def _fill(
    found: tuple[Tensor, ...], grad: Tensor, given: tuple[Tensor, ...], out: Tensor, lse: Tensor
) -> None:
    if grad.stride() != out.stride():
        grad = torch.empty_like(out).copy_(grad)
    batch, heads, time, _ = out.shape
    part = part_of(batch, heads, given[1].shape[1], time)
    assert part is not None, "see choose"
    in_parts(_run, (*given, out, grad, lse.reshape(batch, heads, time, 1), *found), *part)


def _shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _joined_shape(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    return torch.empty_like(qkv)


_handles: dict[int, Any] = {}
_plans: dict[tuple[object, ...], tuple[Callable[..., None], int]] = {}
"""What computes a shape, and the bytes of memory that it wants."""


def _run(tensors: tuple[Tensor, ...]) -> None:
    """Of q, k, v, the output, its gradient and lse; into the gradients of q, k and v."""
    import cudnn

    q, k = tensors[:2]
    device = q.get_device()
    if device not in _handles:
        with torch.cuda.device(device):
            _handles[device] = cudnn.create_handle()
    handle = _handles[device]
    key = (device, q.dtype, q.shape, k.shape, *(one.stride() for one in tensors))
    if key not in _plans:
        _plans[key] = _plan(handle, tensors)
    execute, wanted = _plans[key]
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    space = q.new_empty(wanted, dtype=torch.uint8)
    execute({uid: one.data_ptr() for uid, one in enumerate(tensors, 1)}, space.data_ptr(), handle=handle)


def _plan(handle: Any, tensors: tuple[Tensor, ...]) -> tuple[Callable[..., None], int]:
    import cudnn

    types = {
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float16: cudnn.data_type.HALF,
        torch.float32: cudnn.data_type.FLOAT,
    }
    graph = cudnn.pygraph(
        io_data_type=types[tensors[0].dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )

    def named(uid: int, like: Tensor) -> Any:
        shape, stride = list(like.shape), list(like.stride())
        return graph.tensor(dim=shape, stride=stride, data_type=types[like.dtype], uid=uid)

    q, k, v, out, grad, lse = (named(uid, one) for uid, one in enumerate(tensors[:6], 1))
    found = graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=out,
        dO=grad,
        stats=lse,
        attn_scale=tensors[0].shape[-1] ** -0.5,
        use_causal_mask=True,
        use_deterministic_algorithm=True,
    )
    for uid, (one, like) in enumerate(zip(found, tensors[6:], strict=True), 7):
        one.set_output(True).set_uid(uid).set_dim(list(like.shape)).set_stride(list(like.stride()))
        one.set_data_type(types[like.dtype])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph.execute, max(1, graph.get_workspace_size())


for _name, _takes, _gives, _kernel, _fake in (
    ("attention", "Tensor q, Tensor k, Tensor v", "(Tensor, Tensor, Tensor)", _gradients, _shapes),
    ("joined_attention", "Tensor qkv", "Tensor", _joined_gradients, _joined_shape),
):
    _signature = f"(Tensor grad, {_takes}, Tensor out, Tensor lse) -> {_gives}"
    register(f"exact_{_name}_backward", _signature, "cuda", _kernel, _fake)
