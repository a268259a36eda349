"""Exact attention of GPUs, as far as a CPU can tell: test_on_gpu.py has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast_trainer.attention import Attend, attend_joined, attention_kernels
from holdfast_trainer.exact_attention import attend, choose, in_parts, kernel, part_of
from holdfast_trainer.kernel_trial import attention_tried

MIB = 1 << 20


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "time", "limit", "part"),
    [
        (16, 12, 12, 1024, 512 * MIB, (16, 12)),
        (32, 12, 12, 1024, 512 * MIB, (16, 12)),
        (6, 12, 12, 1024, 100 * MIB, (3, 12)),
        (7, 12, 12, 1024, 100 * MIB, (1, 12)),
        (2, 32, 8, 4096, 512 * MIB, (1, 4)),
        (2, 32, 8, 4096, 128 * MIB, (1, 1)),
        (2, 32, 8, 4096, 127 * MIB, None),
        (1, 1, 1, 1000, 2 * MIB, (1, 1)),
        (1, 1, 1, 1025, 2 * MIB, None),
    ],
)
def test_what_takes_too_much_memory_goes_in_parts(
    batch: int, heads: int, kv_heads: int, time: int, limit: int, part: tuple[int, int] | None
) -> None:
    assert part_of(batch, heads, kv_heads, time, limit) == part


@pytest.mark.parametrize(
    ("rows", "groups", "kv_heads"), [(4, 1, 6), (2, 1, 1), (1, 1, 3), (1, 3, 6), (1, 3, 3), (1, 2, 6)]
)
def test_the_gradients_of_the_parts_are_those_of_the_whole(rows: int, groups: int, kv_heads: int) -> None:
    """`groups` parts of the heads; computed here by a kernel of the CPU."""
    torch.manual_seed(1)
    shapes = [(4, 6, 8, 16), (4, kv_heads, 8, 16), (4, kv_heads, 8, 16)]
    given = [torch.randn(shape) for shape in shapes]
    seen, out, lse = torch.randn(shapes[0]), torch.empty(shapes[0]), torch.empty(4, 6, 8, 1)
    calls = []

    def compute(tensors: tuple[Tensor, ...]) -> None:
        inputs = [one.clone().requires_grad_() for one in tensors[:3]]
        calls.append(tensors[0].shape[:2])
        there = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        for place, found in zip(tensors[6:], torch.autograd.grad(there, inputs, tensors[4]), strict=True):
            place.copy_(found)

    def gradients(rows: int, kv_heads: int) -> list[Tensor]:
        places = [torch.full_like(one, torch.nan) for one in given]
        in_parts(compute, (*given, out, seen, lse, *places), rows, kv_heads)
        return places

    whole = gradients(4, kv_heads)
    assert calls.pop() == (4, 6)
    for one, other in zip(gradients(rows, kv_heads // groups), whole, strict=True):
        torch.testing.assert_close(one, other)
    assert calls == [(rows, 6 // groups)] * (4 // rows * groups)


def test_only_a_hopper_gpu_has_it() -> None:
    lacking = choose(torch.device("cpu"), torch.bfloat16, (2, 4, 64, 64), 4, joined=True)
    assert lacking == "it is for Hopper GPUs, in bf16 or fp16"


class Trembling(torch.autograd.Function):
    """Gradients that are never twice the same, as those of kernels that add up in any order."""

    noise = torch.Generator()

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (1 + 0.02 * torch.randn((), generator=Trembling.noise).to(grads[0].dtype))


@pytest.mark.parametrize(("kv_heads", "joined"), [(4, True), (4, False), (2, False)])
def test_a_kernel_is_tried_before_it_is_taken(kv_heads: int, joined: bool) -> None:
    own: Attend = attend_joined if joined else F.scaled_dot_product_attention

    def trembling(*inputs: Tensor, **options: bool) -> Tensor:
        out: Tensor = Trembling.apply(own(*inputs, **options))
        return out

    def wrong(*inputs: Tensor, **options: bool) -> Tensor:
        return own(*(one.flip(1 if joined else 2) for one in inputs), **options)

    def broken(*inputs: Tensor, **options: bool) -> Tensor:
        return own(*inputs, **options) * torch.nan

    def found(attend: Attend) -> str:
        state = torch.get_rng_state()
        told = attention_tried(
            attend, torch.device("cpu"), torch.bfloat16, (2, 4, 64, 16), kv_heads, joined=joined
        )
        assert torch.equal(torch.get_rng_state(), state), "the training draws what it would have drawn"
        return told

    assert found(own) == ""
    assert found(trembling) == "its bits did not repeat"
    assert found(wrong) == "what it computes is too far from what PyTorch does"
    assert found(broken) in ("its bits did not repeat", "what it computes is too far from what PyTorch does")


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of those that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_compiler_knows_it_by_its_shapes_alone(kv_heads: int) -> None:
    parts = torch.empty(2, 32, 4 + 2 * kv_heads, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in parts.split([4, kv_heads, kv_heads], dim=2))
    out = attend(q, k, v, is_causal=True)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert out.transpose(1, 2).is_contiguous(), "what follows need not copy it"
    out.float().sum().backward()
    assert parts.grad is not None
    assert parts.grad.shape == parts.shape
    assert attention_kernels(lambda: attend(q, k, v)) == "cudnn"


def test_the_gradient_of_one_tensor_is_one_that_nothing_copies() -> None:
    joined = kernel(joined=True)
    qkv = torch.empty(2, 32, 3, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = joined(qkv, dropout_p=0.0)
    assert out.shape == (2, 4, 32, 16)
    assert out.transpose(1, 2).is_contiguous(), "what follows need not copy it"
    grad = torch.empty_like(out)
    with Operators() as seen:
        out.backward(grad)
    assert [name for name in seen.names if name != "detach"] == ["exact_joined_attention_backward"]
    assert qkv.grad is not None
    assert qkv.grad.is_contiguous()
    assert attention_kernels(lambda: joined(qkv)) == "cudnn"
