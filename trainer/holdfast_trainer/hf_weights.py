"""Weights as Hugging Face stores them, into our models and out of them, by a path on this machine.

A family says under which names its tensors lie there and which are transposed (`gpt2_weights`,
`llama_weights`); reading, checking and writing are the same for all. Weights may lie in one
`model.safetensors` or in several that `model.safetensors.index.json` lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import gpt2_weights, llama_weights
from .config import ConfigError, ModelConfig
from .decoder import Decoder
from .hf_layout import Layout

FILE, INDEX, SHAPE = "model.safetensors", "model.safetensors.index.json", "config.json"


def layout(config: ModelConfig) -> Layout:
    """Of the configured family."""
    return llama_weights.layout(config) if config.family == "llama" else gpt2_weights.layout(config)


def load_weights(model: Decoder, path: Path) -> None:
    """Copy the weights at `path` (a .safetensors file, or the directory that holds them) into `model`.

    Raises ConfigError where there are none, where a tensor is missing or has another shape than the
    configured model, where they hold more than the model has, or where the `config.json` beside them
    describes what this model does not compute.
    """
    config = model.config
    family = layout(config)
    found = {name.removeprefix(family.prefix): tensor for name, tensor in _read(path).items()}
    state = model.state_dict()
    faults = [*family.unlike(_shape_beside(path))]
    faults += [fault for pair in family.pairs if (fault := _fault(*pair, found, state, family))]
    beyond = sorted(name for name in found if name.startswith(family.beyond))
    if beyond:
        faults.append(f"it has more than {config.layers} layers, such as {beyond[0]}: set model.layers")
    if faults:
        raise ConfigError([f"train.init_from: {path}: {fault}" for fault in faults[:5]])
    with torch.no_grad():
        for ours, theirs, transposed in family.pairs:
            if ours in state:
                value = found[theirs].t() if transposed else found[theirs]
                state[ours].copy_(value[: len(state[ours])])


def digest_of(model: nn.Module) -> str:
    """XXH3 (hex) of all parameters, which are on the CPU: at the speed of memory, so all of them count."""
    digest = xxhash.xxh3_128()
    for name, value in model.named_parameters():
        digest.update(name.encode())
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Tensor]:
    files = [path]
    if path.is_dir():
        files = [path / FILE]
        if not files[0].exists() and (path / INDEX).exists():
            files = _listed(path)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except FileNotFoundError:
            raise ConfigError(
                f"train.init_from: {file} is not there; name a local {FILE} or the directory that holds it"
            ) from None
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"train.init_from: {file} cannot be read as safetensors: {error}") from error
    return tensors


def _listed(path: Path) -> list[Path]:
    index = path / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"train.init_from: {index} does not list files of weights: {error!r}") from error
    return [path / Path(name).name for name in names]


def _shape_beside(path: Path) -> dict[str, Any]:
    """What `config.json` beside the weights says; nothing where there is none."""
    file = (path if path.is_dir() else path.parent) / SHAPE
    try:
        shape = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.init_from: {file} cannot be read as JSON: {error}") from error
    if not isinstance(shape, dict):
        raise ConfigError(f"train.init_from: {file} is no mapping")
    return shape


def _fault(
    ours: str,
    theirs: str,
    transposed: bool,
    found: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    family: Layout,
) -> str | None:
    if theirs not in found:
        return f"it has no {theirs}: {family.missing}"
    if ours not in state:
        return None if not found[theirs].any() else f"{theirs} {family.unwanted}"
    have = list(found[theirs].t().shape if transposed else found[theirs].shape)
    want = list(state[ours].shape)
    fits = have == want or (ours in family.longer and have[0] >= want[0] and have[1:] == want[1:])
    if fits:
        return None
    return f"{theirs} is {have}, the model's {want}: set {family.setting(ours)} to fit"


def to_published(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state_dict under Hugging Face's names, with zeros for what their layout has besides.

    Raises ConfigError where `weights` are not those of a model of this shape.
    """
    family = layout(config)
    expected = {ours for ours, _, _ in family.pairs} - family.filled
    if odd := sorted(expected ^ weights.keys()):
        place = "the configuration" if odd[0] in weights else "the checkpoint"
        raise ConfigError(f"{place} has no {odd[0]}: give the configuration that the run was given")
    out = {}
    for ours, theirs, transposed in family.pairs:
        if ours in weights:
            value = weights[ours].t() if transposed else weights[ours]
        else:
            value = torch.zeros(weights[f"{ours.removesuffix('.bias')}.weight"].shape[0])
        out[f"{family.prefix}{theirs}"] = value.contiguous()
    return out


def save_weights(weights: Mapping[str, Tensor], config: ModelConfig, directory: Path) -> None:
    """Write `model.safetensors` and `config.json` to `directory`, which `from_pretrained` reads.

    Raises OSError, ConfigError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(to_published(weights, config), directory / FILE, {"format": "pt"})
    text = json.dumps(layout(config).shape, indent=2) + "\n"
    (directory / SHAPE).write_text(text, encoding="utf-8")
