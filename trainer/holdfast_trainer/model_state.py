"""A model in a checkpoint: what is saved of it besides its parameters, by which names, and how it is loaded.

What is compiled, such as a layer, or under DDP has a part more in its names, and may be so at the save alone
or at the resume alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from .checkpoint.tree import EXTRA, Piece, in_kind
from .parallel import COMPILED, shard_like


def load_model(model: nn.Module, state: dict[str, Any], versions: dict[str, int] | None) -> str:
    """Empty where it is loaded, else what does not fit, in torch's words. `versions`: of its modules as they
    were saved, which a module may ask for; None where an earlier Holdfast did not save them."""
    _make_room(model, state)
    live = model.state_dict()
    named = named_like(state, live.keys())
    placed = {name: shard_like(value, live.get(name)) for name, value in named.items()}
    whole: Any = OrderedDict({**placed, **in_kind(extra_of(placed, model), live)})
    if versions is not None:
        paths = [path for path, _ in model.named_modules()]
        whole._metadata = {path: {"version": versions.get(without_wrapping(path), 1)} for path in paths}
    try:
        with writable(model):
            model.load_state_dict(whole)
    except RuntimeError as error:
        if str(error).startswith("Error(s) in loading state_dict"):
            return str(error)
        raise
    return ""


def _make_room(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give it buffers that torch can copy into, for those that are expanded, and for those that it will make
    in its first pass, and has as None until then."""
    saved = {without_wrapping(name): value for name, value in state.items()}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            value = saved.get(without_wrapping(f"{path}.{name}" if path else name))
            if not isinstance(value, torch.Tensor):
                continue
            if buffer is None:
                beside = chain(module.parameters(), module.buffers(), model.parameters())
                device = next((one.device for one in beside), value.device)
                module._buffers[name] = torch.empty_like(value, device=device)
            elif _is_expanded(buffer):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def writable(model: nn.Module) -> AbstractContextManager[None]:
    """In which values can be copied into it: those that were made under `torch.inference_mode`, such as a
    table or a copy of another model, take none outside of that."""
    made_so = any(one.is_inference() for one in chain(model.parameters(), model.buffers()))
    return torch.inference_mode() if made_so else nullcontext()


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one in memory."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return plain and any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def fixed_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Of the parameters and buffers that are saved, by name, and that torch alone loads, which takes no other
    shape."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return {}
    found: dict[str, torch.Size] = {}
    own = _loading_themselves(model)
    for path, module in model.named_modules():
        if _within(path, own):
            continue
        for name, value in chain(module._parameters.items(), module._buffers.items()):
            if value is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = value.shape
    return found


def built(model: nn.Module) -> set[str]:
    """The names of its parameters and buffers that are saved, whatever is compiled; also of a buffer that it
    has not made yet (see _make_room)."""
    found: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        names += [n for n, _ in module._buffers.items() if n not in module._non_persistent_buffers_set]
        found |= {without_wrapping(f"{path}.{name}" if path else name) for name in names}
    return found


def not_loaded(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Which of `names`, that it has too much or too little, torch refuses to load into it: not what a module
    loads by itself."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return []
    own = [without_wrapping(path) for path in _loading_themselves(model)]
    return sorted(name for name in names if not _within(name, own))


def _loading_themselves(model: nn.Module) -> list[str]:
    """The paths of modules that may load what is in them in a way of their own."""
    return [path for path, module in model.named_modules() if _loads_itself(module)]


def _within(path: str, modules: Iterable[str]) -> bool:
    return any(not of or path == of or path.startswith(f"{of}.") for of in modules)


def _loads_itself(module: nn.Module) -> bool:
    plain = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    return not plain or bool(module._load_state_dict_pre_hooks)


def versions_of(model: nn.Module) -> dict[str, int]:
    """Of its modules, by path; torch has 1 for those that say nothing."""
    found = {without_wrapping(path): getattr(module, "_version", 1) for path, module in model.named_modules()}
    return {path: version for path, version in found.items() if isinstance(version, int) and version != 1}


def of_other_types(models: Mapping[str, nn.Module], saved: Mapping[str, Any]) -> set[int]:
    """The parameters of which `saved` has another type, by id."""
    found: set[int] = set()
    for of, model in models.items():
        then = {without_wrapping(name): value for name, value in saved.get(of, {}).items()}
        for path, parameter in named_parameters(model):
            was = then.get(without_wrapping(path))
            was = was.tensor if isinstance(was, Piece) else was
            if isinstance(was, torch.Tensor) and was.dtype != parameter.dtype:
                found.add(id(parameter))
    return found


def extra_of(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """What modules give besides parameters and buffers, of a model's state: by `get_extra_state`, or by a
    `state_dict` of their own, as metrics give what they have counted."""
    tensors = [*named_parameters(model), *model.named_buffers(remove_duplicate=False)]
    names = {without_wrapping(name) for name, _ in tensors}
    others = {name: value for name, value in saved.items() if without_wrapping(name) not in names}
    memory = {local_memory(tensor).data_ptr() for _, tensor in tensors} if others else set()
    return {
        name: value
        for name, value in others.items()
        if name.endswith(EXTRA)
        or not (isinstance(value, torch.Tensor) and local_memory(value).data_ptr() in memory)
    }


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Under each of its names, as what is saved of a model has one that two modules share under both."""
    saved = module.state_dict().keys()
    named = module.named_buffers(remove_duplicate=False)
    return {without_compiled(name): buffer for name, buffer in named if name in saved}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Its parameters under all of their names, also where its class has a `named_parameters` of its own."""
    return nn.Module.named_parameters(model, remove_duplicate=False)


def named_like(saved: dict[str, Any], live: Collection[str]) -> dict[str, Any]:
    """`saved` under the names that it has in a model, which are `live`. What is compiled, such as a layer, or
    under DDP, such as what a model is averaged of, has a part more in them, and may be so now alone, or at
    the save alone."""
    names = {without_wrapping(name): name for name in live}
    named = {names.get(without_wrapping(name), name): value for name, value in saved.items()}
    return named if len(named) == len(saved) and len(names) == len(live) else saved


def without_compiled(name: str) -> str:
    return _without(name, COMPILED)


def without_wrapping(name: str) -> str:
    return _without(name, COMPILED, "module")


def _without(name: str, *wrappings: str) -> str:
    return ".".join(part for part in name.split(".") if part not in wrappings)


def local_memory(value: torch.Tensor) -> torch.Tensor:
    """This rank's memory of it."""
    local: Any = value.detach()
    return local.to_local() if hasattr(local, "placements") else local  # type: ignore[no-any-return]
