"""GPT-2 and Llama in Hugging Face's layout, in and out. What they compute is compared with the architectures
as they were published (Radford et al. 2019, Touvron et al. 2023; the layouts are those of Hugging Face's
GPT2LMHeadModel and LlamaForCausalLM), written out here; test_hf_transformers has the library itself."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import fill, small_disk
from gangs import Workshop
from gpt_runs import start, write_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast_trainer.config import ConfigError, ModelConfig, load
from holdfast_trainer.hf_command import main
from holdfast_trainer.hf_weights import load_weights, save_weights, to_published
from holdfast_trainer.llama import Llama
from holdfast_trainer.model import GPT, build_model

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


LLAMA = ModelConfig(
    vocab_size=64, layers=2, heads=4, width=32, context=16, family="llama", kv_heads=2, mlp_width=48,
    rope_theta=500.0, tied=False,
)  # fmt: skip


def published_llama(weights: dict[str, Tensor], tokens: Tensor, config: ModelConfig) -> Tensor:
    """Logits of Llama, from weights under their names; matrices are [out, in]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    size = config.width // config.heads
    time = tokens.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        """Pairs (i, i + half) as complex numbers, times a unit one."""
        half = size // 2
        rates = config.rope_theta ** (-2.0 * torch.arange(half, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(time, dtype=torch.float64), rates)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    mask = torch.full((time, time), -math.inf, dtype=torch.float64).triu(1)
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        normed = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            (normed @ w[f"{at}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2)
            for name in "qkv"
        )
        groups = config.heads // config.key_value_heads
        k, v = (part.repeat_interleave(groups, dim=1) for part in (turn(k), v))
        scores = turn(q) @ k.transpose(-1, -2) / math.sqrt(size) + mask
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + attended @ w[f"{at}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (normed @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if config.tied else "lm_head"
    return norm(x, "model.norm") @ w[f"{head}.weight"].T


def llama_weights(config: ModelConfig = LLAMA) -> dict[str, Tensor]:
    torch.manual_seed(8)
    published = to_published(Llama(config).state_dict(), config)
    return {name: torch.randn_like(tensor) * 0.3 for name, tensor in published.items()}


def some_weights(prefix: str = "transformer.") -> dict[str, Tensor]:
    """Weights as they are published, with biases and norms that are not at their initial values."""
    torch.manual_seed(5)
    weights = to_published(GPT(SHAPE).state_dict(), SHAPE)
    return {
        prefix + name.removeprefix("transformer."): torch.randn_like(t) * 0.2 for name, t in weights.items()
    }


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_loaded_weights_compute_what_was_published(tmp_path: Path, prefix: str) -> None:
    weights = some_weights(prefix)
    save_file(weights | {f"{prefix}h.0.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / "model.safetensors")
    model = GPT(SHAPE).eval()
    load_weights(model, tmp_path)
    tokens = torch.randint(64, (3, 16))
    logits = model(tokens)[0]
    torch.testing.assert_close(logits.double(), published(weights, tokens, 2, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_written_computes_the_same_and_comes_back(tmp_path: Path, bias: bool) -> None:
    config = ModelConfig(vocab_size=64, layers=2, heads=2, width=32, context=16, bias=bias)
    torch.manual_seed(6)
    model = GPT(config).eval()
    save_weights(model.state_dict(), config, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"], "whoever may read the one may read both"
    tokens = torch.randint(64, (3, 16))
    logits = model(tokens)[0]
    torch.testing.assert_close(published(written, tokens, 2, 2), logits.double(), rtol=1e-4, atol=1e-4)
    again = GPT(config)
    load_weights(again, tmp_path / "out" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"kv_heads": None}, {"kv_heads": 1, "norm_eps": 0.1}], ids=str
)
def test_llamas_weights_compute_what_was_published_and_come_back(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = dataclasses.replace(LLAMA, **changes)
    weights = llama_weights(config)
    model = build_model(config).eval()
    save_file(weights, tmp_path / "model.safetensors")
    load_weights(model, tmp_path)
    tokens = torch.randint(64, (3, 16))
    wanted = published_llama(weights, tokens, config)
    torch.testing.assert_close(model(tokens)[0].double(), wanted, rtol=1e-4, atol=1e-4)
    save_weights(model.state_dict(), config, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    shape = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (shape["num_key_value_heads"], shape["intermediate_size"]) == (config.key_value_heads, 48)
    load_weights(build_model(config), tmp_path / "out")


def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    weights = llama_weights()
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[:7], names[7:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    listing = tmp_path / "model.safetensors.index.json"
    listing.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model = Llama(LLAMA)
    load_weights(model, tmp_path)
    assert torch.equal(model.token_embedding.weight, weights["model.embed_tokens.weight"])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is not there"):
        load_weights(model, tmp_path)
    listing.write_text("[]")
    with pytest.raises(ConfigError, match="does not list files of weights"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize(
    ("changes", "beside", "message"),
    [
        (
            {"kv_heads": 4},
            {},
            "self_attn.k_proj.weight is [16, 32], the model's [32, 32]: set model.kv_heads",
        ),
        (
            {"mlp_width": 64},
            {},
            "mlp.gate_proj.weight is [48, 32], the model's [64, 32]: set model.mlp_width",
        ),
        (
            {"layers": 3},
            {},
            "it has no model.layers.2.input_layernorm.weight: not Llama, or tied (model.tied=",
        ),
        (
            {"layers": 1},
            {},
            "it has more than 1 layers, such as model.layers.1.input_layernorm.weight: set mo",
        ),
        (
            {},
            {"rope_theta": 1e4},
            "its config.json has rope_theta 10000.0, the model 500.0: set model.rope_th",
        ),
        ({}, {"num_attention_heads": 8}, "its config.json has heads 8, the model 4: set model.heads to fit"),
        ({}, {}, "its config.json says no heads, which is then 32, the model 4: set model.heads to fit"),
        ({}, {}, "its config.json says no norm_eps, which is then 1e-06, the model 1e-05: set model.norm_e"),
        (
            {},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
            "its config.json has rope_theta 50.0, the model 500.0: set model.rope_theta to fit",
        ),
        ({}, {"head_dim": 16}, "its heads are 16 wide, the model's 8"),
        (
            {},
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "its rotary positions are scaled ({'rope_type': 'llama3', 'factor': 8.0}), which this model does",
        ),
        (
            {},
            {"model_type": "gpt2"},
            "its config.json says model_type gpt2, the model's family is llama; set ",
        ),
        ({}, {"hidden_act": "gelu"}, "its config.json has hidden_act gelu, the model silu: this model comp"),
        (
            {"tied": True},
            {},
            "its lm_head.weight is not its token embedding: set model.tied=false",
        ),
        (
            {"family": "gpt2"},
            {"model_type": "llama"},
            "says model_type llama, the model's family is gpt2; set",
        ),
    ],
)
def test_llamas_of_another_shape_are_refused(
    tmp_path: Path, changes: dict[str, Any], beside: dict[str, Any], message: str
) -> None:
    save_file(llama_weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 500.0} | beside))
    config = dataclasses.replace(LLAMA, **changes) if "family" not in changes else SHAPE
    with pytest.raises(ConfigError) as caught:
        load_weights(build_model(config), tmp_path)
    assert message in str(caught.value)


def test_weights_hold_nothing_that_would_be_left_out(tmp_path: Path) -> None:
    """Biases of another architecture would; a matrix stored twice, and what is worked out, would not."""
    config = dataclasses.replace(LLAMA, tied=True)
    weights = llama_weights(config)
    same = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    derived = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    save_file(weights | same | derived, tmp_path / "model.safetensors")
    load_weights(build_model(config), tmp_path)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    save_file(weights | bias, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"it has model\.layers\.0\.self_attn\.q_proj\.bias, which this"):
        load_weights(build_model(config), tmp_path)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"n_head": 4}, "its config.json has n_head 4, the model 2: set model.heads to fit"),
        (
            {"vocab_size": 64},
            "its config.json says no n_head, which is then 12, the model 2: set model.heads",
        ),
        ({"n_inner": 64}, "its config.json has n_inner 64, the model 128: this model computes no other"),
        ({"activation_function": "relu"}, "has activation_function relu, the model gelu_new: this model com"),
        ({"layer_norm_epsilon": 1e-6}, "has layer_norm_epsilon 1e-06, the model 1e-05"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "has scale_attn_by_inverse_layer_idx True, the model Fal",
        ),
    ],
)
def test_weights_of_a_model_that_computes_something_else_are_refused(
    tmp_path: Path, beside: dict[str, Any], message: str
) -> None:
    """All shapes agree: the number of heads is in none of them."""
    save_file(some_weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(beside))
    with pytest.raises(ConfigError) as caught:
        load_weights(GPT(SHAPE), tmp_path)
    assert message in str(caught.value)
    buffers = {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
    save_file(some_weights() | buffers, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 2, "activation_function": "gelu_new"}))
    load_weights(GPT(SHAPE), tmp_path)


def test_a_shorter_context_takes_the_first_positions(tmp_path: Path) -> None:
    weights = some_weights()
    save_file(weights, tmp_path / "model.safetensors")
    model = GPT(ModelConfig(vocab_size=64, layers=2, heads=2, width=32, context=8, bias=True))
    load_weights(model, tmp_path)
    assert torch.equal(model.position_embedding.weight, weights["transformer.wpe.weight"][:8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "it has no h.2.ln_1.weight: not GPT-2, or fewer than 3 layers"),
        ({"layers": 1}, "has more than 1 layers, such as h.1.attn.c_attn.bias: set model.layers"),
        ({"vocab_size": 128}, "wte.weight is [64, 32], the model's [128, 32]: set model.vocab_size to fit"),
        ({"context": 32}, "wpe.weight is [16, 32], the model's [32, 32]: set model.context to fit"),
        ({"width": 64}, "ln_f.weight is [32], the model's [64]: set model.width to fit"),
        ({"width": 64}, "wte.weight is [64, 32], the model's [64, 64]: set model.width to fit"),
        ({"width": 64}, "wpe.weight is [16, 32], the model's [16, 64]: set model.width to fit"),
        (
            {"vocab_size": 128, "width": 64},
            "wte.weight is [64, 32], the model's [128, 64]: set model.vocab_size and model.width to fit",
        ),
        ({"bias": False}, "ln_f.bias is a bias: set model.bias=true"),
    ],
)
def test_weights_of_another_shape_are_refused(
    tmp_path: Path, changes: dict[str, int | bool], message: str
) -> None:
    save_file(some_weights(), tmp_path / "model.safetensors")
    shape = {"vocab_size": 64, "layers": 2, "heads": 2, "width": 32, "context": 16, "bias": True} | changes
    with pytest.raises(ConfigError) as caught:
        load_weights(GPT(ModelConfig(**shape)), tmp_path)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_another_width_is_no_architecture_that_is_not_computed(tmp_path: Path) -> None:
    """That they are four times as wide inside is said of their own width."""
    save_file(some_weights(), tmp_path / "model.safetensors")
    beside = {"n_embd": 32, "n_inner": 128, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(beside))
    shape = {"vocab_size": 64, "layers": 2, "heads": 2, "width": 64, "context": 16, "bias": True}
    with pytest.raises(ConfigError, match=r"set model\.width to fit") as caught:
        load_weights(GPT(ModelConfig(**shape)), tmp_path)  # type: ignore[arg-type]
    assert "n_inner" not in str(caught.value)


@pytest.mark.parametrize(("layers", "place"), [(3, "checkpoint"), (1, "configuration")])
def test_weights_of_another_depth_are_not_published(layers: int, place: str) -> None:
    missing = f"the {place} has no blocks.{min(2, layers)}.attention.out.bias: give the configuration"
    with pytest.raises(ConfigError, match=missing):
        to_published(GPT(SHAPE).state_dict(), dataclasses.replace(SHAPE, layers=layers))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there; name a local model"):
        load_weights(GPT(SHAPE), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no such format")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_weights(GPT(SHAPE), tmp_path)
    # As of some in a directory of another user, which were a traceback.
    with pytest.raises(ConfigError, match=r"train\.init_from: \S+long cannot be read: File name too long$"):
        load_weights(build_model(SHAPE), tmp_path / ("too-long" * 40))


def test_weights_that_lie_in_two_files_or_are_quantized_are_refused(tmp_path: Path) -> None:
    """The file that came last by its name won, and whole numbers were taken for weights, without a word."""
    weights = llama_weights()
    some = next(name for name in sorted(weights) if name.endswith("q_proj.weight"))
    for number, part in (1, weights), (2, {some: torch.zeros_like(weights[some])}):
        save_file(part, tmp_path / f"model-{number}.safetensors")
    index = dict.fromkeys(weights, "model-1.safetensors") | {"other": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ConfigError, match=rf"model-2\.safetensors has {some}, and another file of"):
        load_weights(Llama(LLAMA), tmp_path)
    whole = tmp_path / "whole.safetensors"
    save_file({**weights, some: (weights[some] * 100).to(torch.int8)}, whole)
    with pytest.raises(ConfigError, match=rf"{some} holds whole numbers, as quantized weights do"):
        load_weights(Llama(LLAMA), whole)


def test_an_export_that_finds_no_room_leaves_the_one_before_it(tmp_path: Path) -> None:
    """It ended in a traceback, over a file of which a part was there."""
    weights = build_model(SHAPE).state_dict()
    with small_disk(tmp_path / "disk") as disk:
        save_weights(weights, SHAPE, disk / "out")
        before = (disk / "out" / "model.safetensors").read_bytes()
        fill(disk / "filler")
        with pytest.raises(OSError, match=r"model\.safetensors cannot be written: .*No space left"):
            save_weights(weights, SHAPE, disk / "out")
        assert [path.name for path in disk.glob("out/*model*")] == ["model.safetensors"]
        assert (disk / "out" / "model.safetensors").read_bytes() == before


LLAMA_SETTINGS = ["model.family=llama", "model.kv_heads=1", "model.tied=false"]


@pytest.mark.parametrize("family", [[], LLAMA_SETTINGS], ids=["gpt2", "llama"])
def test_a_run_begins_with_the_weights_and_is_exported(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: list[str]
) -> None:
    file, weights, out = write_config(tmp_path), tmp_path / "published", tmp_path / "out"
    model = load(file, family).model
    torch.manual_seed(7)
    save_weights(build_model(model).state_dict(), model, weights)
    settings = [
        *family,
        "train.steps=2",
        "optim.warmup_steps=0",
        "optim.learning_rate=1e-9",
        f"train.init_from={weights}",
    ]
    gang = start(workshop, file, *settings)
    assert gang.wait() == [0], gang.texts()
    assert f"begins with the weights of {weights}\n" in gang.texts()

    run = str(gang.history.run.path)
    assert main([run, "--config", str(file), "--out", str(out), *settings]) == 0
    assert capsys.readouterr() == (f"step 2 is in {out}\n", "")
    shape = json.loads((out / "config.json").read_text())
    assert [shape["bos_token_id"], shape["eos_token_id"]] == [0, 0], "as the data has it, not as the family"
    before, after = (load_file(path / "model.safetensors") for path in (weights, out))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)

    assert main([run, "--config", str(file), "--out", str(out), *family, "--step", "9"]) == 1
    assert "has no checkpoint of step 9" in capsys.readouterr().err
    other = tmp_path / "other"
    for change in ("model.layers=3", "model.heads=4"):  # of the heads no tensor tells
        assert main([run, "--config", str(file), "--out", str(other), *settings, change]) == 78
        told = "was written under another configuration ({}: 2 -> {}): give".format(*change.split("="))
        assert told in capsys.readouterr().err
    assert not other.exists()
    assert main([run, "--config", str(tmp_path / "none.yaml"), "--out", str(out)]) == 78
    missing = start(workshop, file, *settings, "train.init_from=/nowhere", name="missing")
    assert missing.wait() == [78], missing.texts()
    assert "train.init_from: /nowhere is not there" in missing.termination().error
    shutil.rmtree(weights)
    again = start(workshop, file, *settings)
    assert again.wait() == [0], again.texts()
    assert f"the checkpoint of step 2 counts, not train.init_from ({weights})" in again.texts()
    assert "begins with the weights" not in again.texts()


def test_of_a_loop_of_ones_own_it_is_said_what_writes_its_weights(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was asked for the configuration that the run was given; there is none."""
    run, file = workshop.finish(steps=2).run.path, write_config(tmp_path)
    assert main([str(run), "--config", str(file), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "step-00000002 is of a loop of its own, and its model not the configured one, which has a " in said
    assert said.endswith(f"holdfast_trainer checkpoint export {run}@2 --out FILE\n")
    assert not (tmp_path / "out").exists()
