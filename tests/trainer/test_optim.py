"""The optimizer's policies, one table each: what decays, the rate of a step, clipping."""

from __future__ import annotations

import pytest
import torch

from holdfast_trainer.config import ModelConfig, OptimConfig
from holdfast_trainer.model import GPT
from holdfast_trainer.optim import (
    build_optimizer,
    clip_gradients,
    learning_rate,
)

CPU = torch.device("cpu")


def test_matrices_decay_and_vectors_do_not() -> None:
    model = GPT(ModelConfig(vocab_size=97, layers=2, heads=2, width=32, context=16, bias=True))
    model.position_embedding.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.2), CPU)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(decayed["params"]) + len(plain["params"]) == len(trained)
    assert decayed["fused"]


SCHEDULE = OptimConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=4)


@pytest.mark.parametrize(
    ("config", "step", "total", "expected"),
    [
        (SCHEDULE, 0, 15, 0.25),
        (SCHEDULE, 3, 15, 1.0),
        (SCHEDULE, 4, 15, 1.0),
        (SCHEDULE, 9, 15, 0.6),
        (SCHEDULE, 14, 15, 0.2),
        (SCHEDULE, 400, 15, 0.2),
        (OptimConfig(learning_rate=2.0), 0, 11, 2.0),
        (OptimConfig(learning_rate=2.0), 5, 11, 1.1),
        (OptimConfig(learning_rate=2.0), 10, 11, 0.2),
        (OptimConfig(learning_rate=2.0), 0, 1, 2.0),
    ],
)
def test_warm_up_then_cosine(config: OptimConfig, step: int, total: int, expected: float) -> None:
    assert learning_rate(config, step, total) == pytest.approx(expected)


@pytest.mark.parametrize(("limit", "after"), [(0.0, 5.0), (10.0, 5.0), (5.0, 5.0), (1.0, 1.0)])
def test_the_norm_is_reported_always_and_clipped_when_asked(limit: float, after: float) -> None:
    first, second, unused = (torch.zeros(2, requires_grad=True) for _ in range(3))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    norm = clip_gradients([first, second, unused], limit)
    assert norm.item() == pytest.approx(5.0)
    clipped = torch.cat([first.grad, second.grad])
    assert clipped.norm().item() == pytest.approx(after, rel=1e-5)
    if after == 5.0 and limit != 5.0:
        assert torch.equal(clipped, torch.tensor([3.0, 0.0, 0.0, 4.0]))  # bits untouched


def test_a_norm_that_is_not_finite_is_reported_as_it_is() -> None:
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([float("inf"), 1.0])
    assert clip_gradients([weight], 1.0).isinf()
