"""The reference GPT: its size and cost are what the formulas say, and it sees no future token."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from holdfast_trainer.config import ModelConfig
from holdfast_trainer.decoder import Decoder
from holdfast_trainer.model import build_model, flops_per_token, parameter_count

SMALL = ModelConfig(vocab_size=97, layers=2, heads=2, width=32, context=16)
LLAMA = ModelConfig(
    vocab_size=97, layers=2, heads=4, width=32, context=16, family="llama", kv_heads=2, tied=False
)
families = pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["gpt2", "llama"])


def small(seed: int = 0, config: ModelConfig = SMALL) -> Decoder:
    torch.manual_seed(seed)
    return build_model(config)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        dataclasses.replace(SMALL, bias=True),
        LLAMA,
        dataclasses.replace(LLAMA, tied=True),
        dataclasses.replace(LLAMA, kv_heads=None, mlp_width=80),
    ],
    ids=str,
)
def test_the_parameter_formula_counts_the_real_model(config: ModelConfig) -> None:
    assert parameter_count(config) == sum(p.numel() for p in build_model(config).parameters())


def test_the_cost_of_a_token_is_palms_formula() -> None:
    gpt2 = ModelConfig(vocab_size=50257, layers=12, heads=12, width=768, context=1024, bias=True)
    assert parameter_count(gpt2) == 124_439_808  # GPT-2 small, as published
    multiplying = 124_439_808 - 1024 * 768
    assert flops_per_token(gpt2) == 6 * multiplying + 12 * 12 * 12 * 64 * 1024
    llama = ModelConfig(
        vocab_size=32000, layers=32, heads=32, width=4096, context=4096, family="llama", mlp_width=11008,
        tied=False,
    )  # fmt: skip
    assert parameter_count(llama) == 6_738_415_616  # Llama 2 7B, as published
    multiplying = 6_738_415_616 - 32000 * 4096
    assert flops_per_token(llama) == 6 * multiplying + 12 * 32 * 4096 * 4096


def test_an_untrained_model_is_as_good_as_guessing() -> None:
    torch.manual_seed(7)
    tokens = torch.randint(97, (8, 16))
    logits, loss = small()(tokens, tokens.roll(1, dims=1))
    assert logits is None
    assert loss.item() == pytest.approx(math.log(97), rel=0.02)


@families
def test_no_token_sees_a_later_one(shape: ModelConfig) -> None:
    model = small(config=shape).eval()
    tokens = torch.randint(97, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    before, no_loss = model(tokens)
    after, _ = model(changed)
    assert no_loss is None
    assert before.shape == (1, 16, 97)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_the_loss_is_that_of_the_logits() -> None:
    model = small().eval()
    tokens, targets = torch.randint(97, (2, 3, 16))
    logits, _ = model(tokens)
    expected = torch.nn.functional.cross_entropy(logits.view(-1, 97), targets.view(-1))
    assert torch.equal(model(tokens, targets)[1], expected)


def test_one_seed_gives_one_model_and_the_embedding_is_shared() -> None:
    first, second, other = small(), small(), small(1)
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.token_embedding.weight, other.token_embedding.weight)
    tokens = torch.randint(97, (2, 16))
    first(tokens, tokens)[1].backward()
    assert all(p.grad is not None for p in first.parameters())


@pytest.mark.parametrize(
    "config",
    [SMALL, dataclasses.replace(SMALL, bias=True), LLAMA, dataclasses.replace(LLAMA, tied=True)],
    ids=str,
)
def test_a_model_without_memory_says_the_values_that_it_would_have(config: ModelConfig) -> None:
    """To the bit: cut over ranks it begins as it does in one piece."""
    whole = small(seed=3, config=config)
    with torch.device("meta"):
        model = build_model(config)
    torch.manual_seed(3)
    values = dict(model.initial_values())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers()), "tables are no values that come later"
    wanted = dict(whole.named_parameters())
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert value.equal(wanted[name]), name


def test_dropout_is_of_training_only() -> None:
    model = small(config=ModelConfig(vocab_size=97, layers=1, heads=2, width=32, context=16, dropout=0.5))
    tokens = torch.randint(97, (1, 16))
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 tokens do not fit into model\.context 16"):
        small()(torch.zeros(1, 17, dtype=torch.int64))


@families
def test_it_learns_a_short_text_by_heart(shape: ModelConfig) -> None:
    model = small(config=shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(97, (4, 17))
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
