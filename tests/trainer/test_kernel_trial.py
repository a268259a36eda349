"""How kernels of ours are tried beside torch's; what is found of each is in the tests of that one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from holdfast_trainer.kernel_trial import derivatives


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_derivatives_are_to_the_bit_those_of_a_gradient_that_is_given(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(1)
    q, k, v, seen = (torch.randn(2, 8, 3, 16, generator=drawn).to(dtype).transpose(1, 2) for _ in range(4))
    leaves = [one.requires_grad_() for one in (q, k, v)]

    def out() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ours, theirs = derivatives(out(), leaves, seen), torch.autograd.grad(out(), leaves, seen)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert [one.stride() for one in ours] == [one.stride() for one in theirs]
