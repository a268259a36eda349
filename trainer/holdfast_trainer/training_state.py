"""What a training run is made of: its named parts, and what each rank has of its own.

Under DDP parameters and optimizer are the same on every rank, so they are written once, by all ranks
together. Under FSDP2 each rank writes its shards, which load as whole tensors: so either loads what the
other wrote. Each rank adds its random state and, where it is not rank 0, what may differ: buffers of models
(running statistics of its own batches), what modules give besides (model_state.py), and parts that are
neither model nor optimizer (the position of a data loader); rank 0's go with what is shared. So it is with
gradients that are still being added up.

DDP gives all ranks rank 0's buffers as a forward pass begins, but not after a pass that exchanged nothing
(under `no_sync`, or without gradients). A new DDP does it in its first pass, whatever came before: so the
state says of which models the next pass begins with each rank's own.
"""

from __future__ import annotations

import gc
import hashlib
import re
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from .checkpoint import CheckpointError, Loaded, WrongConfiguration, rng
from .checkpoint.errors import UnsupportedState
from .checkpoint.tensorfile import Header
from .checkpoint.tree import in_kind, join, pack
from .given import given
from .late import Late
from .model_state import (
    buffers_of,
    built,
    extra_of,
    fixed_shapes,
    load_model,
    local_memory,
    named_like,
    named_parameters,
    not_loaded,
    of_other_types,
    versions_of,
    without_compiled,
    without_wrapping,
    writable,
)
from .noted_models import NotedModels
from .optimizer_state import lay_out, load_optimizer
from .parallel import compiled_from, place_like, unwrap
from .parameter_order import Order, moved, order_of, told
from .shuffle_buffer import SHUFFLE_BUFFER, has_shuffle_buffer
from .unspent import Unspent


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Captured(NamedTuple):
    """A state to save."""

    shared: dict[str, Any]
    """What there is once for all ranks."""
    own: dict[str, Any]
    rank_0_only: frozenset[str]
    """Paths of tensors in `shared` that may differ by rank: rank 0's value stands there."""


class TrainingState:
    """The parts that one rank tracks."""

    def __init__(self, parts: dict[str, Any], rank: int) -> None:
        """Raises TypeError naming a part that has no state, UnsupportedState a value that cannot be saved."""
        if not parts:
            raise TypeError("track() was given nothing: name what to save, such as model=model")
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(f"track({name}=...): a {type(part).__name__} has no state_dict to save")
            if hasattr(part, "consolidate_state_dict"):
                raise UnsupportedState(
                    f"track({name}=...): a {type(part).__name__} has its state in parts that no one rank can "
                    "give; use the optimizer that it is made of, or cut model and optimizer with `run.shard`"
                )
            if isinstance(part, nn.Module) and any(map(_is_cut_by_fsdp1, part.modules())):
                raise UnsupportedState(
                    f"track({name}=...): FullyShardedDataParallel (FSDP1) has cut it over the ranks, each of "
                    "which would save its piece as the whole; cut it with `run.shard`, which is FSDP2"
                )
            if any(map(has_shuffle_buffer, (part, getattr(part, "dataset", None)))):
                raise UnsupportedState(f"track({name}=...): {SHUFFLE_BUFFER}")
        self._parts: dict[str, Stateful] = {name: _innermost(name, part) for name, part in parts.items()}
        self.replicated = _replicated(parts)
        """What is DDP's among the models and in them, by name, whether compiled or not."""
        self.compiled = _compiled(parts)
        """Which models and parts of them torch.compile has had, by name; of a mere function nobody knows."""
        self._rank = rank
        optimizers = {n: p for n, p in self._parts.items() if isinstance(p, torch.optim.Optimizer)}
        self._inner = _inner(self._parts)
        self._unspent = {name: Unspent(one) for name, one in (optimizers | self._inner).items()}
        self._models = _models(self._parts)
        self._of_models = _names(self._models)
        self._shapes = {name: fixed_shapes(model) for name, model in self._models.items()}
        self._built = {name: built(model) for name, model in self._models.items()}
        self._told_rebuilt: dict[str, list[str]] = {}
        self.noted = NotedModels(self._models.values())
        self.given = given(self._parts)
        """What optimizers and schedulers were made with, by what a checkpoint keeps it as."""
        self._untracked_schedulers: list[weakref.ref[LRScheduler]] = []
        self._looked_at = WeakSet(optimizers.values())
        """Optimizers of which it is known whether they are tracked."""
        self._counts = {id(one): (name, _count(one), _count(one)) for name, one in optimizers.items()}
        """By optimizer: name, how many parameters it had when it was tracked, and when it was last asked."""
        skeleton, tensors = pack(self._shared(0))
        Header.of(skeleton, tensors)  # what cannot be saved is told now, not when the first save is due
        self.unsaved = [
            name for name, optimizer in optimizers.items() if self._steps_others(optimizer, tensors)
        ]
        """The optimizers some of whose parameters no part has as they are; it may give copies of them."""

    def _steps_others(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        others = [p for p in parameters if id(p) not in self._of_models]
        given = {tensor.data_ptr() for tensor in tensors.values()} if others else set()
        return any(local_memory(p).data_ptr() not in given for p in others)

    @property
    def has_no_model(self) -> bool:
        """Whether no part can have what the optimizers step."""
        others = torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler
        return all(isinstance(part, others) for part in self._parts.values()) and bool(self.unsaved)

    def found_untracked(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer of a model's parameters is no part, and in none; true once for each."""
        if optimizer in self._looked_at:
            return False
        steps_for_another = any(any(one is optimizer for one in _held(other)) for other in self.optimizers)
        if steps_for_another and not optimizer.state:
            return False  # it may never keep anything
        self._looked_at.add(optimizer)
        mine = any(id(p) in self._of_models for group in optimizer.param_groups for p in group["params"])
        return mine and not any(_has(part, optimizer) for part in self._parts.values())

    def resized_optimizer(self, optimizer: torch.optim.Optimizer) -> tuple[str, int]:
        """Its name and how many parameters it has more than when it was tracked, below 0 where it has fewer;
        once for each number of them. No name where it is not tracked."""
        name, tracked, last = self._counts.get(id(optimizer), ("", 0, 0))
        if not name or (now := _count(optimizer)) == last:
            return name, 0
        self._counts[id(optimizer)] = name, tracked, now
        return name, now - tracked

    def resized(self) -> list[str]:
        """The parameters and buffers that have another shape than when their model was tracked, in words;
        once for each."""
        found: list[str] = []
        for of, model in self._models.items():
            then, now = self._shapes[of], fixed_shapes(model)
            others = [name for name, shape in now.items() if then.get(name, shape) != shape]
            parameters = {name for name, _ in named_parameters(model)} if others else set()
            for name in others:
                kind = "parameter" if name in parameters else "buffer"
                found.append(f"{kind} {name} of {of}, {list(now[name])} where it was {list(then.pop(name))}")
        return found

    def rebuilt(self) -> dict[str, list[str]]:
        """By the name of each model, the parameters and buffers that it has gained or lost since it was
        tracked, so that it cannot be loaded; once for each."""
        found: dict[str, list[str]] = {}
        for of, model in self._models.items():
            others = not_loaded(model, self._built[of] ^ built(model))
            if others and others != self._told_rebuilt.get(of):
                found[of] = self._told_rebuilt[of] = others
        return found

    def find_untracked_schedulers(self) -> None:
        """Look for those of tracked optimizers that no part is or has. All objects are gone through, where an
        optimizer has had a scheduler and no part is one."""
        have = {id(s.optimizer) for s in self._parts.values() if isinstance(s, LRScheduler)}
        of = [o for o in self.optimizers if "initial_lr" in o.param_groups[0] and id(o) not in have]
        found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)] if of else []
        self._untracked_schedulers = [
            weakref.ref(one)
            for one in found
            if any(one.optimizer is o for o in of) and not any(_has(p, one) for p in self._parts.values())
        ]

    def untracked_counts(self) -> dict[str, int]:
        """At which step schedulers are that no part is or has, by what a checkpoint keeps it as."""
        there = [one for ref in self._untracked_schedulers if (one := ref()) is not None]
        return {f"step of an untracked {type(one).__name__}": int(one.last_epoch) for one in there}

    def scaled_by_untracked(self) -> bool:
        """Whether an optimizer's step, which calls this, was called by a scaler that no part is or has."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler):
                tracked = any(part is caller or _has(part, caller) for part in self._parts.values())
                return caller.is_enabled() and not tracked
            frame = frame.f_back
        return False

    @property
    def parts(self) -> Collection[Stateful]:
        return self._parts.values()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]

    @property
    def inner_optimizers(self) -> Collection[torch.optim.Optimizer]:
        """Those that parts of the script's own are made of, and save."""
        return self._inner.values()

    def lasting(self) -> dict[int, torch.Tensor]:
        """The tensors that only a tracked optimizer's step should write to, by address of this rank's memory:
        its parameters and what it keeps for them."""
        found: dict[int, torch.Tensor] = {}
        for optimizer in self.optimizers:
            kept = [value for values in optimizer.state.values() for value in _values(values)]
            for value in (*(p for group in optimizer.param_groups for p in group["params"]), *kept):
                if isinstance(value, torch.Tensor):
                    found[local_memory(value).data_ptr()] = value
        return found

    @property
    def scales_gradients(self) -> bool:
        """Whether a gradient scaler is at work, which passes a step with infinite gradients over."""
        return bool(self._scalers)

    def gradient_scale(self, device: torch.device) -> Late | None:
        """The least of the scalers at work, as it is in the device's turn; None where there is none."""
        if not self._scalers:
            return None
        one = torch.ones((), device=device)  # get_scale() would wait for the device
        return Late.of(torch.stack([scaler.scale(one) for scaler in self._scalers.values()]).min())

    @property
    def _scalers(self) -> dict[str, torch.amp.GradScaler]:
        """Those that are at work: one that is switched off keeps nothing."""
        scalers = {n: p for n, p in self._parts.items() if isinstance(p, torch.amp.GradScaler)}
        return {name: scaler for name, scaler in scalers.items() if scaler.is_enabled()}

    @property
    def in_shards(self) -> bool:
        """Whether models are cut over the ranks (FSDP2)."""
        return self._mesh is not None

    @property
    def _mesh(self) -> Any:
        """The ranks over which models are cut; None where they are not."""
        parameters: Iterator[Any] = (p for model in self._models.values() for p in model.parameters())
        return next((p.device_mesh for p in parameters if hasattr(p, "placements")), None)

    def describe(self) -> str:
        """Names, types and shapes of the models' tensors, as a short hash that ranks can compare."""
        values = [(f"{n}.{k}", v) for n, m in self._models.items() for k, v in m.state_dict().items()]
        # What a module's get_extra_state gives need be no tensor.
        tensors = [f"{k} {v.dtype} {list(v.shape)}" for k, v in values if isinstance(v, torch.Tensor)]
        text = "\n".join([", ".join(self._parts), *tensors])
        return f"{', '.join(self._parts)} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"

    def types(self) -> dict[str, str]:
        """Of which types the parameters of each model are, by what a checkpoint keeps it as: torch rounds
        what was saved in others."""
        return {
            f"numbers of {name}": ", ".join(sorted({_type_of(p) for p in model.parameters()}))
            for name, model in self._models.items()
        }

    def orders(self) -> dict[str, str]:
        """By the name of each optimizer, what ranks compare of the order in which it has its parameters."""
        return {name: told(order) for name, order in self._orders().items() if name not in self._inner}

    def _orders(self) -> dict[str, Order]:
        optimizers = {n: p for n, p in self._parts.items() if isinstance(p, torch.optim.Optimizer)}
        return {name: order_of(one, self._of_models) for name, one in (optimizers | self._inner).items()}

    def samples(self, step: int) -> dict[str, np.ndarray]:
        """By the name of each model, an element of each parameter that is to be the same on all ranks.

        Of each step another one. float64; [elements], of which a complex one counts as two.
        """
        return {name: _sample(model, step) for name, model in self._models.items()}

    def whole_gradients(self) -> list[str]:
        """The models, cut over the ranks, whose gradients add up whole on each: no save takes these."""
        return [name for name, model in self._models.items() if any(map(_adds_up_whole, model.modules()))]

    def amid_scaling(self) -> list[str]:
        """The scalers that have unscaled gradients, or stepped, and were not updated since."""
        return [
            name
            for name, scaler in self._scalers.items()
            if any(of["stage"] is not OptState.READY for of in scaler._per_optimizer_states.values())
        ]

    def end_step(self) -> None:
        """A step has ended: gradients that no optimizer has stepped with are part of the state after it."""
        for unspent in self._unspent.values():
            unspent.end_step()

    def trained(self) -> dict[str, int]:
        """How many parameters of each model are trained, and not frozen, by what a checkpoint keeps it as."""
        return {
            f"trained parameters of {name}": sum(p.requires_grad for p in model.parameters())
            for name, model in self._models.items()
        }

    def counted(self) -> dict[str, Any]:
        """What schedulers and averages have counted, by name of the part."""
        found: dict[str, Any] = {}
        for name, part in self._parts.items():
            if isinstance(part, LRScheduler):
                found[name] = pack(part.state_dict())[0]
            elif isinstance(part, torch.optim.swa_utils.AveragedModel):
                found[name] = int(part.n_averaged)
        return found

    def take_back(self) -> list[str]:
        """A step was left before any optimizer's turn, and is done anew: its gradients are cleared. Returns
        the optimizers that cannot be rid of them."""
        return [name for name, unspent in self._unspent.items() if not unspent.take_back()]

    def capture(self, step: int, random: dict[str, Any] | None = None) -> Captured:
        """The state after `step` steps; its tensors are the live ones.

        `random` stands for the generators' state where they have moved on since the state was true.
        """
        own: dict[str, Any] = {"rng": rng.capture() if random is None else random}
        buffers = {name: buffers_of(model) for name, model in self._models.items()}
        shared = self._shared(step)
        extra = {name: extra_of(shared["parts"][name], model) for name, model in self._models.items()}
        parts = {n: p.state_dict() for n, p in self._parts.items() if _differs_by_rank(p)}
        gradients = {name: unspent.gradients() for name, unspent in self._unspent.items()}
        if self._rank != 0:
            whole = {name: of for name, of in gradients.items() if not self._unspent[name].in_shards}
            own |= {"buffers": buffers, "extra": extra, "parts": parts, "gradients": whole}
        if any(gradients.values()):
            shared["gradients"] = gradients
        if apart := [name for name, model in self.replicated.items() if _goes_on_apart(model)]:
            shared["buffers_apart"] = apart
        differ = [{"parts": buffers}, {"parts": extra}, {"parts": parts}, {"gradients": gradients}]
        names = [name for some in differ for name in pack({"shared": some})[1]]
        return Captured(shared, own, frozenset(names))

    def _shared(self, step: int) -> dict[str, Any]:
        parts = {name: _saved_of(name, part) for name, part in self._parts.items()}
        versions = {name: versions_of(model) for name, model in self._models.items()}
        return {"step": step, "parts": parts, "orders": self._orders(), "versions": versions}

    def restore(self, loaded: Loaded) -> list[str]:
        """Load all parts; returns the names in the checkpoint that nothing tracks now.

        Random state is left alone: it is restored when the loop begins. Raises CheckpointError where the
        checkpoint lacks a part, WrongConfiguration where a model or an optimizer is another one now.
        """
        saved, had, has = loaded.shared["parts"], loaded.shared.get("orders", {}), self._orders()
        changed, versions = of_other_types(self._models, saved), loaded.shared.get("versions", {})
        own = loaded.own or {}
        for name, part in self._parts.items():
            if name not in saved:
                raise CheckpointError(
                    f"the checkpoint of step {loaded.manifest.step} has no {name!r}: "
                    f"it tracks {', '.join(saved)}. Track the same names, or use a new run directory"
                )
            mine = own.get("parts", {}).get(name, saved[name])
            if isinstance(part, nn.Module):
                mine = {**mine, **own.get("extra", {}).get(name, {})}
            state = join(mine, saved[name])
            if isinstance(part, torch.amp.GradScaler) and not state:
                continue  # saved where none was needed, as with bf16: it begins anew
            if _differs_by_rank(part):
                live, mesh = part.state_dict(), self._mesh
                state = in_kind(state if mesh is None else place_like(state, live, mesh), live)
            orders = had.get(name), has.get(name, [])
            _load(name, part, state, loaded.manifest.step, *orders, changed, versions.get(name))
            if isinstance(part, nn.Module):
                buffers = named_like(own.get("buffers", {}).get(name, {}), part.state_dict().keys())
                with torch.no_grad(), writable(part):
                    for key, value in buffers.items():
                        part.get_buffer(key).copy_(value)
        for name, unspent in self._unspent.items():
            shared = loaded.shared.get("gradients", {}).get(name, {})
            gradients = own.get("gradients", {}).get(name, shared)
            numbers = enumerate(moved(had.get(name), has[name]))
            unspent.restore({now: gradients[then] for now, then in numbers if then in gradients})
        apart = {without_wrapping(name) for name in loaded.shared.get("buffers_apart", ())}
        for name, model in self.replicated.items():
            model.require_forward_param_sync = name not in apart
        return [name for name in saved if name not in self._parts]


def _innermost(name: str, part: Any) -> Stateful:
    """What a part wraps: the module in DDP, in torch.compile's or in one that gives its state as its own,
    such as Lightning Fabric's, where buffers have other names; and the optimizer in one that was never set
    up itself, such as accelerate's. Only the inner one tells when it steps. Raises TypeError where none is
    found."""
    if isinstance(part, nn.Module):
        model = unwrap(part)
        names = model.state_dict().keys()
        return next((m for m in model.children() if names and m.state_dict().keys() == names), model)
    while isinstance(part, torch.optim.Optimizer) and not _tells(part):
        inner = next((v for v in vars(part).values() if isinstance(v, torch.optim.Optimizer)), None)
        if inner is None:
            raise TypeError(
                f"track({name}=...): a {type(part).__name__} is an optimizer that does not tell when it "
                "steps; track the one that it wraps"
            )
        part = inner
    return part  # type: ignore[no-any-return]


def _is_cut_by_fsdp1(module: nn.Module) -> bool:
    """By name, as to import it takes seconds."""
    if "FullyShardedDataParallel" not in (kind.__name__ for kind in type(module).__mro__):
        return False
    fsdp1: Any = module
    return bool(fsdp1.process_group.size() > 1 and fsdp1.sharding_strategy.name != "NO_SHARD")


def _replicated(parts: Mapping[str, Any]) -> dict[str, DistributedDataParallel]:
    """Also where torch.compile or another library has wrapped what DDP wraps."""
    found = _modules(parts)
    return {without_wrapping(n): m for n, m in found if isinstance(m, DistributedDataParallel)}


def _models(parts: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def _names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Of their parameters, by id. One that has several has the first of the alphabet, in whatever order the
    models are tracked."""
    found: dict[int, str] = {}
    for of, model in models.items():
        for path, parameter in named_parameters(model):
            name = without_wrapping(f"{of}.{path}")
            found[id(parameter)] = min(found.get(id(parameter), name), name)
        for parameter in model.parameters():  # of a class of its own, it may give more
            found.setdefault(id(parameter), "")
    return found


def _modules(parts: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """The models among the parts and all modules in them, by name."""
    models = _models(parts).items()
    return [(f"{name}.{path}" if path else name, m) for name, p in models for path, m in p.named_modules()]


def _compiled(parts: Mapping[str, Any]) -> str | bool:
    """What is compiled among the parts; of blocks, which may be many, how many are. False for nothing."""
    found = _modules(parts)
    names = [n for n, m in found if compiled_from(m) is not None or m._compiled_call_impl is not None]
    kinds = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    return ", ".join(f"{count} of {k}" if "*" in k else k for k, count in kinds.items()) or False


def _saved_of(name: str, part: Stateful) -> dict[str, Any]:
    """Its state; a model's under names that do not tell whether a layer of it is compiled. Raises
    UnsupportedState."""
    try:
        state = part.state_dict()
    except KeyError:
        count = _in_no_group(part) if isinstance(part, torch.optim.Optimizer) else 0
        if not count:
            raise
        raise UnsupportedState(
            f"{name} cannot give its state to be saved: it has that of {count} parameters which are in none "
            "of its groups any more. Leave them there and freeze them, by requires_grad_(False)"
        ) from None
    if not isinstance(part, nn.Module):
        return state
    return {without_compiled(name): value for name, value in state.items()}


def _goes_on_apart(model: DistributedDataParallel) -> bool:
    """Whether its next forward pass leaves each rank the buffers that it has."""
    shares = model.broadcast_buffers and len(model.modules_buffers) > 0
    return shares and not model.require_forward_param_sync


def _type_of(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _values(values: Any) -> list[Any]:
    return list(values.values()) if isinstance(values, dict) else []


def _has(part: Stateful, optimizer: object) -> bool:
    """Whether a part that is none of torch's own is made of the optimizer, or of what else torch has, and may
    give its state. An optimizer with torch's own `state_dict`, as SAM is, gives none but what both share."""
    gives_its_own = getattr(type(part), "state_dict", None) is torch.optim.Optimizer.state_dict
    if gives_its_own and getattr(part, "state", None) is not getattr(optimizer, "state", None):
        return False
    return any(one is optimizer for one in _held(part))


def _held(part: Stateful) -> list[Any]:
    """What a part that is none of torch's own is made of."""
    if isinstance(part, nn.Module | LRScheduler):
        return []
    held = list(getattr(part, "__dict__", {}).values())
    several = (
        of.values() if isinstance(of, dict) else of for of in held if isinstance(of, dict | list | tuple)
    )
    return [*held, *chain(*several)]


def _inner(parts: Mapping[str, Stateful]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that parts are made of which are none themselves, by a name of their own."""
    found: dict[str, torch.optim.Optimizer] = {}
    known = {id(part) for part in parts.values()}
    for name, part in parts.items():
        held = [] if isinstance(part, torch.optim.Optimizer) else _held(part)
        tell = [one for one in held if isinstance(one, torch.optim.Optimizer) and _tells(one)]
        for number, one in enumerate(one for one in tell if id(one) not in known):
            found[f"optimizer {number} of {name}"] = one
        known |= {id(one) for one in tell}
    return found


def _count(optimizer: torch.optim.Optimizer) -> int:
    """Of its parameters."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _in_no_group(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters it keeps something for that it does not step any more."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return sum(isinstance(p, torch.Tensor) and id(p) not in stepped for p in optimizer.state)


def _tells(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it was set up itself, and so calls who wants to hear of its steps."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def _differs_by_rank(part: Stateful) -> bool:
    return not isinstance(part, nn.Module | torch.optim.Optimizer)


def _load(
    name: str,
    part: Stateful,
    state: dict[str, Any],
    step: int,
    had: Order | None,
    has: Order,
    changed: set[int],
    versions: dict[str, int] | None,
) -> None:
    if isinstance(part, torch.optim.Optimizer):
        misfit = load_optimizer(part, state, had, has, changed)
    elif isinstance(part, nn.Module):
        misfit = load_model(part, state, versions)
    else:
        part.load_state_dict(state)
        for inner in _held(part):
            if isinstance(inner, torch.optim.Optimizer) and _tells(inner):
                lay_out(inner)
        return
    if misfit:
        raise WrongConfiguration(
            f"{name!r} is not what it was when the checkpoint of step {step} was written: {misfit}. Build it "
            "as it was then, or use a new run directory"
        )


def _adds_up_whole(module: nn.Module) -> bool:
    """Whether FSDP2 has gradients of it that set_requires_gradient_sync(False) kept from being reduced."""
    find: Any = getattr(module, "_get_fsdp_state", None)
    state: Any = None if find is None else find()
    if state is None:
        return False
    older = not hasattr(state, "_fsdp_param_groups")  # torch 2.11 has one group at most
    groups = filter(None, [state._fsdp_param_group]) if older else state._fsdp_param_groups
    return any(_has_whole_gradient(one) for group in groups for one in group.fsdp_params)


def _has_whole_gradient(parameter: Any) -> bool:
    """`parameter`: FSDP2's own view of one."""
    whole: Any = getattr(parameter, "_unsharded_param", None)  # there once it was gathered
    return parameter.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None


STRIDE = 104_729
"""A prime, so that from save to save another part of a parameter is looked at, and in the end all of it."""


def _sample(model: nn.Module, step: int) -> np.ndarray:
    """An element of each parameter that lies whole on this rank."""
    whole = [value for p in model.parameters() if type(value := p.detach()) is torch.Tensor and p.numel()]
    places = (np.unravel_index(step * STRIDE % value.numel(), value.shape) for value in whole)
    found = [value[tuple(map(int, place))].cpu() for value, place in zip(whole, places, strict=True)]
    numbers = [torch.view_as_real(one) if one.is_complex() else one.reshape(1) for one in found]
    return torch.cat([one.double() for one in numbers]).numpy() if numbers else np.zeros(0)
