"""GPT-2 in Hugging Face's layout, in and out. What it computes is compared with the architecture as it was
published (Radford et al. 2019; the layout is that of Hugging Face's GPT2LMHeadModel), written out here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gangs import Workshop
from gpt_runs import start, write_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast_trainer.config import ConfigError, ModelConfig, load
from holdfast_trainer.gpt2_command import main
from holdfast_trainer.gpt2_weights import load_gpt2, save_gpt2, to_gpt2
from holdfast_trainer.model import GPT

SHAPE = ModelConfig(vocab_size=64, layers=2, heads=2, width=32, context=16, bias=True)


def published(weights: dict[str, Tensor], tokens: Tensor, layers: int, heads: int) -> Tensor:
    """Logits of GPT-2, from weights under their names; matrices are [in, out]."""
    w = {name.removeprefix("transformer."): tensor.double() for name, tensor in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    time = tokens.shape[1]
    mask = torch.full((time, time), -math.inf, dtype=torch.float64).triu(1)
    x = w["wte.weight"][tokens] + w["wpe.weight"][:time]
    for layer in range(layers):
        h = f"h.{layer}"
        parts = product(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + product(attended, f"{h}.attn.c_proj")
        x = x + product(gelu(product(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")), f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def some_weights(prefix: str = "transformer.") -> dict[str, Tensor]:
    """Weights as they are published, with biases and norms that are not at their initial values."""
    torch.manual_seed(5)
    weights = to_gpt2(GPT(SHAPE).state_dict(), SHAPE)
    return {
        prefix + name.removeprefix("transformer."): torch.randn_like(t) * 0.2 for name, t in weights.items()
    }


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_loaded_weights_compute_what_was_published(tmp_path: Path, prefix: str) -> None:
    weights = some_weights(prefix)
    save_file(weights | {f"{prefix}h.0.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / "model.safetensors")
    model = GPT(SHAPE).eval()
    load_gpt2(model, tmp_path)
    tokens = torch.randint(64, (3, 16))
    logits = model(tokens)[0]
    torch.testing.assert_close(logits.double(), published(weights, tokens, 2, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_written_computes_the_same_and_comes_back(tmp_path: Path, bias: bool) -> None:
    config = ModelConfig(vocab_size=64, layers=2, heads=2, width=32, context=16, bias=bias)
    torch.manual_seed(6)
    model = GPT(config).eval()
    save_gpt2(model.state_dict(), config, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    tokens = torch.randint(64, (3, 16))
    logits = model(tokens)[0]
    torch.testing.assert_close(published(written, tokens, 2, 2), logits.double(), rtol=1e-4, atol=1e-4)
    again = GPT(config)
    load_gpt2(again, tmp_path / "out" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_shorter_context_takes_the_first_positions(tmp_path: Path) -> None:
    weights = some_weights()
    save_file(weights, tmp_path / "model.safetensors")
    model = GPT(ModelConfig(vocab_size=64, layers=2, heads=2, width=32, context=8, bias=True))
    load_gpt2(model, tmp_path)
    assert torch.equal(model.position_embedding.weight, weights["transformer.wpe.weight"][:8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "it has no h.2.ln_1.weight: not GPT-2, or fewer than 3 layers"),
        ({"layers": 1}, "has more than 1, such as h.1.attn.c_attn.bias"),
        ({"vocab_size": 128}, "wte.weight is [64, 32], the model's [128, 32]: set model.vocab_size to fit"),
        ({"context": 32}, "wpe.weight is [16, 32], the model's [32, 32]: set model.context to fit"),
        ({"width": 64}, "ln_f.weight is [32], the model's [64]: set model.width to fit"),
        ({"bias": False}, "ln_f.bias is a bias: set model.bias=true"),
    ],
)
def test_weights_of_another_shape_are_refused(
    tmp_path: Path, changes: dict[str, int | bool], message: str
) -> None:
    save_file(some_weights(), tmp_path / "model.safetensors")
    shape = {"vocab_size": 64, "layers": 2, "heads": 2, "width": 32, "context": 16, "bias": True} | changes
    with pytest.raises(ConfigError) as caught:
        load_gpt2(GPT(ModelConfig(**shape)), tmp_path)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there; name a local model"):
        load_gpt2(GPT(SHAPE), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no such format")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_gpt2(GPT(SHAPE), tmp_path)


def test_a_run_begins_with_the_weights_and_is_exported(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, weights, out = write_config(tmp_path), tmp_path / "gpt2", tmp_path / "out"
    model = load(file).model
    torch.manual_seed(7)
    save_gpt2(GPT(model).state_dict(), model, weights)
    settings = [
        "train.steps=2",
        "optim.warmup_steps=0",
        "optim.learning_rate=1e-9",
        f"train.init_from={weights}",
    ]
    gang = start(workshop, file, *settings)
    assert gang.wait() == [0], gang.texts()

    run = str(gang.history.run.path)
    assert main([run, "--config", str(file), "--out", str(out), *settings]) == 0
    assert "step 2 is in " in capsys.readouterr().out
    before, after = (load_file(path / "model.safetensors") for path in (weights, out))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)

    assert main([run, "--config", str(file), "--out", str(out), "--step", "9"]) == 1
    assert "has no checkpoint of step 9" in capsys.readouterr().err
    assert main([run, "--config", str(file), "--out", str(out), "model.layers=3"]) == 78
    assert "the checkpoint has no blocks.2.attention.out.weight: give the conf" in capsys.readouterr().err
    assert main([run, "--config", str(file), "--out", str(out), "model.layers=1"]) == 78
    assert "the configuration has no blocks.1.attention.out.weight: give" in capsys.readouterr().err
    assert main([run, "--config", str(tmp_path / "none.yaml"), "--out", str(out)]) == 78
    missing = start(workshop, file, *settings, "train.init_from=/nowhere", name="missing")
    assert missing.wait() == [78], missing.texts()
    assert "train.init_from: /nowhere is not there" in missing.termination().error
