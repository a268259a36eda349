"""Weights as Hugging Face stores them, into our models and out of them, by a path on this machine.

A family says under which names its tensors lie there and which are transposed (`gpt2_weights`,
`llama_weights`); reading, checking and writing are the same for all. Weights may lie in one
`model.safetensors` or in several that `model.safetensors.index.json` lists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import gpt2_weights, llama_weights
from .config import ConfigError, ModelConfig
from .contract import exists, is_directory
from .decoder import Decoder
from .hf_layout import Layout
from .weights_file import save_weights_file

FILE, INDEX, SHAPE = "model.safetensors", "model.safetensors.index.json", "config.json"


def layout(config: ModelConfig) -> Layout:
    """Of the configured family."""
    return llama_weights.layout(config) if config.family == "llama" else gpt2_weights.layout(config)


def load_weights(model: Decoder, path: Path) -> None:
    """Copy the weights at `path` into `model`; raises as `published_values`."""
    state = model.state_dict()
    with torch.no_grad():
        for name, value in published_values(model, path):
            state[name].copy_(value)


def published_values(model: Decoder, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of `model`'s parameters in the weights at `path` (a .safetensors file, or the directory
    that holds them), of which no more than one at a time is in memory, but for two that must be the same.
    `model` may have none itself.

    Raises ConfigError where there are none, where a tensor is missing or has another shape than the
    configured model, where they hold more than the model has, or where the `config.json` beside them
    describes what this model does not compute; before the first value, if they can be read.
    """
    config = model.config
    family = layout(config)
    state = model.state_dict()
    with ExitStack() as files:
        try:
            found = {name.removeprefix(family.prefix): one for name, one in _found(path, files).items()}
            shape = _shape_beside(path)
        except OSError as error:
            raise ConfigError(f"train.init_from: {path} cannot be read: {error.strerror}") from error
        faults = family.unlike(shape) if shape else []
        faults += [fault for pair in family.pairs if (fault := _fault(*pair, found, state, family))]
        faults += _more(found, family, config)
        if faults:
            raise ConfigError([f"train.init_from: {path}: {fault}" for fault in faults[:5]])
        for ours, theirs, transposed in family.pairs:
            if ours in state:
                value = found[theirs].read()
                yield ours, (value.t() if transposed else value)[: len(state[ours])]


@dataclass
class Digest:
    """XXH3 (hex) of values that pass by: at the speed of memory, so all of them count."""

    hexdigest: str = ""
    """Of all, once they have passed."""

    def of(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        digest = xxhash.xxh3_128()
        for name, value in values:
            digest.update(name.encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
            yield name, value
        self.hexdigest = digest.hexdigest()


@dataclass(frozen=True)
class _Published:
    """A tensor in a file that is open."""

    file: Any
    name: str

    def read(self) -> Tensor:
        value: Tensor = self.file.get_tensor(self.name)
        return value

    @property
    def is_quantized(self) -> bool:
        """Whether its numbers are whole ones, which weights are only together with their scales."""
        kind: str = self.file.get_slice(self.name).get_dtype()
        return not kind.startswith(("F", "BF"))

    def shape(self, *, transposed: bool) -> list[int]:
        shape: list[int] = self.file.get_slice(self.name).get_shape()
        return shape[::-1] if transposed else shape


def _found(path: Path, opened: ExitStack) -> dict[str, _Published]:
    files = [path]
    if is_directory(path):
        files = [path / FILE]
        if not exists(files[0]) and exists(path / INDEX):
            files = _listed(path)
    tensors: dict[str, _Published] = {}
    for file in files:
        try:
            one = opened.enter_context(safe_open(file, "pt"))
            names = set(one.keys())
        except FileNotFoundError:
            raise ConfigError(
                f"train.init_from: {file} is not there; name a local {FILE} or the directory that holds it"
            ) from None
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"train.init_from: {file} cannot be read as safetensors: {error}") from error
        if twice := sorted(names & tensors.keys()):
            raise ConfigError(
                f"train.init_from: {file} has {twice[0]}, and another file of {path} has it too: which "
                "of them counts nobody can tell; fetch the files anew"
            )
        tensors |= {name: _Published(one, name) for name in names}
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
    file = (path if is_directory(path) else path.parent) / SHAPE
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
    found: Mapping[str, _Published],
    state: Mapping[str, Tensor],
    family: Layout,
) -> str | None:
    if theirs not in found:
        return f"it has no {theirs}: {family.missing}"
    if found[theirs].is_quantized:
        return f"{theirs} holds whole numbers, as quantized weights do: give weights in floating point"
    if ours not in state:
        return None if not found[theirs].read().any() else f"{theirs} {family.unwanted}"
    have = found[theirs].shape(transposed=transposed)
    want = list(state[ours].shape)
    fits = have == want or (ours in family.longer and have[0] >= want[0] and have[1:] == want[1:])
    if fits:
        return None
    return f"{theirs} is {have}, the model's {want}: {family.remedy(ours, have, want)}"


def _more(found: Mapping[str, _Published], family: Layout, config: ModelConfig) -> list[str]:
    """What they have that the model has not, and so would not compute with."""
    odd = sorted(found.keys() - {theirs for _, theirs, _ in family.pairs})
    odd = [name for name in odd if not name.endswith(family.buffers)]
    if family.tied is not None and (output := family.tied[1]) in odd:
        odd.remove(output)
        embedding = found.get(family.tied[0])
        if embedding is not None and not torch.equal(embedding.read(), found[output].read()):
            remedy = "set model.tied=false" if config.family == "llama" else "this model has one for both"
            return [f"its {output} is not its token embedding: {remedy}"]
    if beyond := [name for name in odd if name.startswith(family.beyond)]:
        return [f"it has more than {config.layers} layers, such as {beyond[0]}: set model.layers"]
    return [f"it has {odd[0]}, which this model has not"] if odd else []


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


def save_weights(
    weights: Mapping[str, Tensor], config: ModelConfig, directory: Path, *, end_of_text: int | None = None
) -> None:
    """Write `model.safetensors` and `config.json` to `directory`, which `from_pretrained` reads.

    `end_of_text` is the token that ended each document, and so began the next; None: not known, and then
    what generates with the model ends at no token, where it would at one that its family has by itself.
    A model.safetensors that is there stays until the new one is whole. Raises OSError, ConfigError.
    """
    published = to_published(weights, config)
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{FILE}.{os.getpid()}.tmp"
    try:
        save_weights_file(published, temporary, {"format": "pt"})
        os.replace(temporary, directory / FILE)
    except (OSError, SafetensorError) as error:  # the library wraps what the file system said
        raise OSError(f"{directory / FILE} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    shape = {**layout(config).shape, "bos_token_id": end_of_text, "eos_token_id": end_of_text}
    (directory / SHAPE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")
