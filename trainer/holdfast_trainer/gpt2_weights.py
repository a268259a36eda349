"""GPT-2's weights as Hugging Face stores them, into our GPT and out of it, by a path on this machine.

The two are one architecture under two sets of names. Hugging Face keeps the matrices of a block as
[in, out] (its Conv1D), ours are [out, in] (nn.Linear), so these four are transposed; q, k and v lie one
after the other in both. The output layer is tied to the token embedding, so `lm_head` is not stored apart.
A model of ours without biases is written with biases of zero, which computes the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import ConfigError, ModelConfig
from .model import GPT, MLP_RATIO

_OUTER = {
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "norm": "ln_f",
}
_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_MATRICES = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_PREFIX = "transformer."
FILE, SHAPE = "model.safetensors", "config.json"


def names(layers: int) -> Iterator[tuple[str, str, bool]]:
    """(our name without `.weight`/`.bias` where both exist, theirs, transposed) of every part."""
    yield from ((ours, theirs, False) for ours, theirs in _OUTER.items())
    for layer in range(layers):
        for table, transposed in ((_NORMS, False), (_MATRICES, True)):
            for ours, theirs in table.items():
                yield f"blocks.{layer}.{ours}", f"h.{layer}.{theirs}", transposed


def pairs(layers: int) -> Iterator[tuple[str, str, bool]]:
    """(our tensor's name, theirs, transposed), biases included."""
    for ours, theirs, transposed in names(layers):
        if ours.endswith(".weight"):
            yield ours, theirs, False
            continue
        yield f"{ours}.weight", f"{theirs}.weight", transposed
        yield f"{ours}.bias", f"{theirs}.bias", False


def load_gpt2(model: GPT, path: Path) -> None:
    """Copy the weights at `path` (a .safetensors file, or the directory that holds one) into `model`.

    Raises ConfigError where there are none, where a tensor is missing or has another shape than the
    configured model, or where they have biases and the model has not.
    """
    found = _read(path)
    state = model.state_dict()
    faults = [
        fault for pair in pairs(model.config.layers) if (fault := _fault(*pair, found, state, model.config))
    ]
    extra = sorted(name for name in found if name.startswith(f"h.{model.config.layers}."))
    if extra:
        faults.append(f"model.layers: {path} has more than {model.config.layers}, such as {extra[0]}")
    if faults:
        raise ConfigError([f"train.init_from: {path}: {fault}" for fault in faults[:5]])
    with torch.no_grad():
        for ours, theirs, transposed in pairs(model.config.layers):
            if ours in state:
                value = found[theirs].t() if transposed else found[theirs]
                state[ours].copy_(value[: len(state[ours])])


def _read(path: Path) -> dict[str, Tensor]:
    file = path / FILE if path.is_dir() else path
    try:
        tensors = load_file(file)
    except FileNotFoundError:
        raise ConfigError(
            f"train.init_from: {file} is not there; name a local {FILE} or the directory that holds it"
        ) from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"train.init_from: {file} cannot be read as safetensors: {error}") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _fault(
    ours: str,
    theirs: str,
    transposed: bool,
    found: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    config: ModelConfig,
) -> str | None:
    if theirs not in found:
        return f"it has no {theirs}: not GPT-2, or fewer than {config.layers} layers"
    if ours not in state:
        return None if not found[theirs].any() else f"{theirs} is a bias: set model.bias=true"
    have = list(found[theirs].t().shape if transposed else found[theirs].shape)
    want = list(state[ours].shape)
    fits = have == want or (
        ours == "position_embedding.weight" and have[0] >= want[0] and have[1:] == want[1:]
    )
    if fits:
        return None
    setting = {"token_embedding.weight": "model.vocab_size", "position_embedding.weight": "model.context"}
    return f"{theirs} is {have}, the model's {want}: set {setting.get(ours, 'model.width')} to fit"


def to_gpt2(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state_dict under Hugging Face's names, with zeros for the biases that it does not have.

    Raises ConfigError where `weights` are not those of a GPT of this shape.
    """
    expected = {ours for ours, _, _ in pairs(config.layers) if config.bias or not ours.endswith(".bias")}
    if odd := sorted(expected ^ weights.keys()):
        place = "the configuration" if odd[0] in weights else "the checkpoint"
        raise ConfigError(f"{place} has no {odd[0]}: give the configuration that the run was given")
    out = {}
    for ours, theirs, transposed in pairs(config.layers):
        if ours in weights:
            value = weights[ours].t() if transposed else weights[ours]
        else:
            value = torch.zeros(weights[f"{ours.removesuffix('.bias')}.weight"].shape[0])
        out[f"{_PREFIX}{theirs}"] = value.contiguous()
    return out


def save_gpt2(weights: Mapping[str, Tensor], config: ModelConfig, directory: Path) -> None:
    """Write `model.safetensors` and `config.json` to `directory`, which `from_pretrained` reads.

    Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(to_gpt2(weights, config), directory / FILE, {"format": "pt"})
    shape = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": MLP_RATIO * config.width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": True,
    }
    (directory / SHAPE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")
