"""What one attempt saved, another takes on, also where its device computes in another precision."""

from __future__ import annotations

import copy
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lone_gang import Alone
from saving import carried, loaded, make_saver, saved_by
from torch import nn

from holdfast_trainer.checkpoint import Loaded, WrongConfiguration, load_newest, tensorfile
from holdfast_trainer.checkpoint.errors import UnsupportedState
from holdfast_trainer.checkpoint.manifest import Manifest
from holdfast_trainer.checkpoint.tree import in_kind, pack, unpack
from holdfast_trainer.contract import RunDir
from holdfast_trainer.exactness import Exactness
from holdfast_trainer.model_state import load_model
from holdfast_trainer.training_state import TrainingState


def scaler(*, fp16: bool, scale: float = 2.0**16) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale, enabled=fp16)
    made.scale(torch.ones(()))
    return made


@pytest.mark.parametrize(
    ("saved", "own", "fp16", "scale"),
    [
        ({}, None, True, 2.0**16),
        ({}, {}, True, 2.0**16),
        (scaler(fp16=True, scale=8.0).state_dict(), None, True, 8.0),
        (scaler(fp16=True, scale=8.0).state_dict(), None, False, 1.0),
        ({}, None, False, 1.0),
    ],
    ids=["bf16 to fp16", "the same on rank 1", "fp16 to fp16", "fp16 to bf16", "bf16 to bf16"],
)
def test_a_gradient_scaler_goes_on_or_begins_anew(
    saved: dict[str, Any], own: dict[str, Any] | None, fp16: bool, scale: float
) -> None:
    """`precision: auto` is bf16 on one spot GPU and fp16 on the next."""
    here = scaler(fp16=fp16)
    state = TrainingState({"scaler": here}, rank=0 if own is None else 1)
    assert state.restore(loaded(saved, own)) == []
    assert here.get_scale() == scale


@pytest.mark.parametrize("fp16", [False, True])
def test_a_scaler_is_amid_its_turn_from_unscale_to_update(fp16: bool) -> None:
    """One that is switched off, as with any other precision, never is."""
    model, made = nn.Linear(2, 1), torch.amp.GradScaler("cpu", enabled=fp16)
    optimizer = torch.optim.SGD(model.parameters())
    state = TrainingState({"model": model, "optimizer": optimizer, "scaler": made}, rank=0)
    assert state.amid_scaling() == []
    made.scale(model(torch.ones(1, 2)).sum()).backward()  # type: ignore[no-untyped-call]
    made.unscale_(optimizer)
    assert state.amid_scaling() == (["scaler"] if fp16 else [])
    made.step(optimizer)
    made.update()
    assert state.amid_scaling() == []


class Wrapped(torch.optim.Optimizer):
    """As accelerate has it: an Optimizer by type alone, all else is another's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def test_of_an_optimizer_that_wraps_another_the_inner_one_is_tracked() -> None:
    """It alone tells when it steps: by that the gradients are known that still add up, and until when the
    state may be copied."""
    model = nn.Linear(2, 1)
    inner = torch.optim.AdamW(model.parameters())
    state = TrainingState({"model": model, "optimizer": Wrapped(Wrapped(inner))}, rank=0)
    assert state.optimizers == [inner]
    model(torch.ones(1, 2)).sum().backward()
    assert carried(state)[1].tolist() == [1]
    assert state.restore(saved_by(state)) == []
    inner.step()
    assert carried(state) is None

    held = TrainingState({"model": model, "held": Scheduled(Wrapped(inner))}, rank=0)
    assert held.restore(Loaded(Manifest(1, 1, 1, "", {}, 0.0), held.capture(1).shared, None)) == []

    wrapped = Wrapped(inner)
    wrapped.inner = None  # type: ignore[assignment]
    with pytest.raises(
        TypeError, match=r"track\(optimizer=...\): a Wrapped is an optimizer that does not tell"
    ):
        TrainingState({"model": model, "optimizer": wrapped}, rank=0)


class Scheduled:
    """An optimizer in another's hands, as loops have it that set a rate in each step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = [optimizer]

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizers[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizers[0].load_state_dict(state["inner"])


class Weights:
    """Parameters that are no model's."""

    def __init__(self, *weights: torch.Tensor) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_is_tracked_by_way_of_a_part_counts_as_tracked() -> None:
    model, loose = nn.Linear(2, 1), nn.Parameter(torch.ones(3))
    first = torch.optim.SGD(model.parameters(), 0.1)
    second = torch.optim.SGD([*model.parameters(), loose], 0.1)
    other = torch.optim.SGD([loose], 0.1)
    state = TrainingState({"model": model, "first": Scheduled(first), "loose": Weights(loose)}, rank=0)
    assert [state.found_untracked(one) for one in (first, other, second, second)] == [0, 0, 1, 0]
    assert TrainingState({"model": model, "second": second, "loose": Weights(loose)}, rank=0).unsaved == []
    assert TrainingState({"model": model, "first": first, "second": second}, rank=0).unsaved == ["second"]
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
    state = TrainingState({"model": model, "scheduler": scheduler}, rank=0)
    assert state.found_untracked(first), "a scheduler has one, and does not save it"


class Tally:
    """A part that keeps what people keep: it gives its own containers, and takes what it is given."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {
            "seen": Counter(), "losses": defaultdict(list), "best": Best(0, 1.0), "newest": OrderedDict()
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


class Best(NamedTuple):
    step: int
    loss: float


def test_a_part_gets_its_state_back_in_containers_of_the_kinds_that_it_has() -> None:
    """All came back as dicts and tuples: the first class that was new ended the job with a KeyError, after an
    interruption alone, and so did torch's own MultiStepLR where it is stepped to an epoch."""
    tally, again = Tally(), Tally()
    tally.kept["seen"]["cat"] += 2
    tally.kept["losses"]["train"].append(0.5)
    tally.kept["best"] = Best(7, 0.25)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])
    state = TrainingState({"tally": tally, "scheduler": scheduler}, rank=0)
    skeleton, tensors = pack(state.capture(1).shared)
    shared = unpack(json.loads(json.dumps(skeleton)), tensors)
    resumed = TrainingState({"tally": again, "scheduler": scheduler}, rank=0)
    resumed.restore(Loaded(Manifest(1, 1, 1, "", {}, 0.0), shared, None))
    again.kept["seen"]["dog"] += 1
    again.kept["losses"]["validation"].append(0.75)
    assert again.kept["seen"] == {"cat": 2, "dog": 1}
    assert again.kept["losses"] == {"train": [0.5], "validation": [0.75]}
    assert again.kept["best"].loss == 0.25
    assert isinstance(again.kept["newest"], OrderedDict)
    assert sorted(scheduler.milestones.elements()) == [2, 2, 4]


class InParts(torch.optim.SGD):
    """As torch's ZeroRedundancyOptimizer, which wants a gang to be made."""

    def consolidate_state_dict(self, to: int = 0) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("Please call `consolidate_state_dict(to=0)` on all ranks beforehand")


def test_a_part_gets_its_tensors_back_where_it_has_them() -> None:
    """The average of a model's weights that a loop keeps itself came back in rows, on the CPU: on a GPU its
    next update ended the job, and each attempt after that. The device without memory stands for the GPU."""
    there = {"average": torch.empty(2, 3, device="meta"), "grows": torch.empty(2, device="meta")}
    turned = nn.Parameter(torch.zeros(3, 2).t())
    saved = {"average": torch.ones(2, 3), "grows": torch.ones(4), "turned": torch.ones(2, 3), "new": 1}
    back = in_kind({"inner": [saved]}, {"inner": [{**there, "turned": turned}]})["inner"][0]
    assert {name: back[name].device.type for name in there} == dict.fromkeys(there, "meta")
    assert (back["turned"].stride(), back["turned"].tolist()) == ((1, 2), [[1, 1, 1], [1, 1, 1]])
    assert back["new"] == 1


def test_an_optimizer_that_no_rank_has_whole_is_refused_with_what_helps() -> None:
    """Its own error asks for a call after which all ranks but one fail."""
    optimizer = InParts(nn.Linear(2, 1).parameters(), 0.1)
    with pytest.raises(UnsupportedState, match=r"track\(optimizer=...\): a InParts has .* with `run.shard`"):
        TrainingState({"optimizer": optimizer}, rank=0)


class Group:
    def __init__(self, ranks: int) -> None:
        self.size = lambda: ranks


class FullyShardedDataParallel(nn.Sequential):
    def __init__(self, module: nn.Module, ranks: int, strategy: str) -> None:
        super().__init__(module)
        self.process_group, self.sharding_strategy = Group(ranks), Strategy[strategy]


class Strategy(Enum):
    FULL_SHARD = 1
    NO_SHARD = 3


def test_a_model_that_fsdp1_has_cut_is_refused_before_the_first_step() -> None:
    """Its first save ended the run, with the advice to put the model under DDP."""
    small = nn.Linear(2, 1)
    with pytest.raises(UnsupportedState, match=r"track\(net=...\): Full.* \(FSDP1\) .* with `run.shard`"):
        TrainingState({"net": nn.Sequential(FullyShardedDataParallel(small, 2, "FULL_SHARD"))}, rank=0)
    for ranks, strategy in ((1, "FULL_SHARD"), (2, "NO_SHARD")):
        TrainingState({"net": FullyShardedDataParallel(small, ranks, strategy)}, rank=0)


@pytest.mark.parametrize(
    ("hidden", "groups", "said"),
    [
        (3, 1, "'model' is not what it was when the checkpoint of step 1 was written: Error"),
        (3, 1, "size mismatch for 0.weight: copying a param with shape"),
        (2, 0, "'optimizer' is not what it was .* its groups had \\[4\\] parameters, and have \\[2\\] now"),
        (2, 2, "its groups had \\[4\\] parameters, and have \\[2, 2\\] now. Build it as it was then, or use"),
    ],
    ids=["model", "how", "fewer parameters", "other groups"],
)
def test_a_model_or_optimizer_that_is_another_one_now_is_refused_by_name(
    hidden: int, groups: int, said: str
) -> None:
    """No retry mends what somebody has changed in a script between two attempts."""

    def state(hidden: int, groups: int) -> TrainingState:
        model = nn.Sequential(nn.Linear(2, hidden), nn.Linear(hidden, 1))
        parts = [{"params": list(layer.parameters())} for layer in model]
        optimizer = torch.optim.AdamW(
            [{"params": model.parameters()}] if groups == 1 else parts[: groups or 1]
        )
        sum(p.sum() for group in optimizer.param_groups for p in group["params"]).backward()
        optimizer.step()
        return TrainingState({"model": model, "optimizer": optimizer}, rank=0)

    manifest = Manifest(step=1, attempt=1, world_size=1, config_hash="", files={}, time=0.0)
    saved = Loaded(manifest, state(2, 1).capture(1).shared, None)
    with pytest.raises(WrongConfiguration, match=said):
        state(hidden, groups).restore(saved)


def optimized(kind: type[torch.optim.Optimizer]) -> TrainingState:
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return TrainingState({"model": model, "optimizer": optimizer}, rank=0)


@pytest.mark.parametrize(
    ("had", "has", "lacking"),
    [
        (torch.optim.SGD, torch.optim.AdamW, "a AdamW needs betas, eps, which was not saved"),
        (torch.optim.AdamW, torch.optim.SGD, "a SGD needs dampening, momentum, "),
        (torch.optim.AdamW, torch.optim.NAdam, "a NAdam needs momentum_decay, mu_product, which"),
    ],
)
def test_an_optimizer_of_another_kind_is_refused_by_what_it_needs(
    had: type[torch.optim.Optimizer], has: type[torch.optim.Optimizer], lacking: str
) -> None:
    """It was loaded without a word, and a step failed with torch's own KeyError, if anything did."""
    with pytest.raises(WrongConfiguration, match=lacking):
        optimized(has).restore(saved_by(optimized(had)))


def test_what_an_older_torch_did_not_save_is_filled_in_by_its_optimizer() -> None:
    saved = saved_by(optimized(torch.optim.AdamW), without=("foreach", "maximize", "capturable", "fused"))
    assert optimized(torch.optim.AdamW).restore(saved) == []


def sorted_out(*names: str, groups: int = 1, steps: int = 0) -> tuple[nn.Module, TrainingState]:
    """An optimizer has the parameters in that order."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    parameters = [model.get_parameter(name) for name in names]
    cut = len(names) // groups
    named = [list(zip(names, parameters, strict=True))[n : n + cut] for n in range(0, len(names), cut)]
    optimizer = torch.optim.Adam([{"params": group} for group in named])
    state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, state


def test_each_parameter_gets_its_own_moments_back_in_whatever_order_an_optimizer_has_them() -> None:
    """A loop sorts them into groups by way of a set, which has another order in each process: moments went to
    other parameters of the same shape, without a word."""
    names = "0.weight", "1.weight", "2.weight", "2.bias"
    model, state = sorted_out(*names, steps=2)
    model(torch.ones(1, 2)).sum().backward()  # adds to what the optimizer stepped with
    state.end_step()
    saved = state.capture(2).shared
    manifest = Manifest(2, 1, 1, "", {}, 0.0)
    for order in (names, names[::-1], ("2.bias", *names[:3])):
        again, resumed = sorted_out(*order)
        assert resumed.restore(Loaded(manifest, saved, None)) == []
        (was,), (now,) = state.optimizers, resumed.optimizers
        assert [now.param_groups[0]["param_names"]] == [list(order)]
        for name in names:
            one, other = model.get_parameter(name), again.get_parameter(name)
            assert torch.equal(was.state[one]["exp_avg"], now.state[other]["exp_avg"]), (order, name)
            assert torch.equal(one.grad, other.grad), (order, name)  # type: ignore[arg-type]
    assert state.orders() != resumed.orders(), "ranks would have this told"

    _, state = sorted_out(*names, groups=2, steps=1)
    saved = state.capture(1).shared
    _, regrouped = sorted_out("0.weight", "2.weight", "1.weight", "2.bias", groups=2)
    with pytest.raises(
        WrongConfiguration, match=r"its group 0 has model.2.weight now, which was in another one"
    ):
        regrouped.restore(Loaded(manifest, saved, None))

    del saved["orders"]  # as an earlier Holdfast wrote it
    assert regrouped.restore(Loaded(manifest, saved, None)) == []


class Sums(torch.optim.Optimizer):
    """As loops have it for weights in bfloat16: it adds up in float32, and some it leaves as they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            if not kept:
                kept |= {"sum": parameter.float(), "left": parameter > 0, "seen": [torch.tensor(0)]}
            kept["sum"] -= 0.01 * parameter.grad.float()
            kept["seen"][0] += 1
            parameter.copy_(torch.where(kept["left"], parameter, kept["sum"]))


@pytest.mark.parametrize(
    ("kind", "then", "now", "exact"),
    [
        (Sums, torch.bfloat16, torch.bfloat16, True),
        (torch.optim.NAdam, torch.float64, torch.float64, True),
        (torch.optim.AdamW, torch.float32, torch.bfloat16, False),
    ],
)
def test_what_an_optimizer_keeps_is_of_the_type_that_it_had(
    kind: type[torch.optim.Optimizer], then: torch.dtype, now: torch.dtype, exact: bool
) -> None:
    """torch makes all of it the parameters': a sum in float32 of weights in bfloat16 was rounded at each
    resume, and NAdam's product in float32 went on in float64, without a word. Where the model is of another
    type than it was, its optimizer's moments are too, or no step could be taken."""

    def trained(dtype: torch.dtype) -> tuple[Callable[[int], list[Any]], TrainingState]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        optimizer = kind(model.parameters())  # type: ignore[call-arg]

        def train(steps: int) -> list[Any]:
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.linspace(-1, 1, 12).to(dtype).view(3, 4)).square().sum().backward()
                optimizer.step()
            return [parameter.tolist() for parameter in model.parameters()]

        return train, TrainingState({"model": model, "optimizer": optimizer}, rank=0)

    train, state = trained(then)
    train(3)
    skeleton, tensors = pack(state.capture(3).shared)
    saved = unpack(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})
    goes_on, resumed = trained(now)
    resumed.restore(Loaded(Manifest(3, 1, 1, "", {}, 0.0), saved, None))
    assert (goes_on(5) == train(5)) is exact


class Bounded(torch.optim.Optimizer):
    """Of a user's own: its steps are bounded by a mean over all parameters, which it keeps for none of them,
    and what it keeps for each is a tensor and no dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything: Any = self.state
        of_all, parameters = everything["all"], self.param_groups[0]["params"]
        of_all["size"] = of_all.get("size", 0.0) * 0.9 + sum(float(p.grad.norm()) for p in parameters)
        everything["steps"] = everything.get("steps", 0) + 1
        for p in parameters:
            everything[p] = p.grad.double() + everything.get(p, 0)
            p -= everything[p] / (of_all["size"] + everything["steps"])


def test_an_optimizer_that_keeps_something_for_all_parameters_goes_on() -> None:
    """As torch saves and loads it. Each attempt after an interruption ended with KeyError: 'all'."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(2, 1).to(torch.bfloat16)
        return model, Bounded(model.parameters())

    def step(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 2), float(number), dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()

    model, optimizer = parts()
    state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
    for number in range(3):
        step(number, model, optimizer)
    saved = copy.deepcopy(saved_by(state))
    resumed, its_optimizer = parts()
    again = TrainingState({"model": resumed, "optimizer": its_optimizer}, rank=0)
    assert again.restore(saved) == []
    for one, of in ((model, optimizer), (resumed, its_optimizer)):
        step(3, one, of)
    assert its_optimizer.state["steps"] == 4  # type: ignore[index,comparison-overlap]
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_rate_that_a_script_sets_in_what_it_took_from_its_optimizer_counts_after_a_resume_too() -> None:
    """torch makes other groups as it loads: after a resume, and after none else, such a rate was of none."""

    def made() -> tuple[dict[str, Any], torch.Tensor, TrainingState]:
        model = nn.Linear(2, 1)
        rate = torch.tensor(0.5)
        optimizer = torch.optim.SGD(
            [{"params": [model.weight], "lr": 0.25}, {"params": [model.bias], "lr": rate}]
        )
        group = optimizer.param_groups[0]
        return group, rate, TrainingState({"model": model, "optimizer": optimizer}, rank=0)

    group, rate, state = made()
    group["lr"] = 0.125
    rate.fill_(0.0625)
    saved = saved_by(state)
    group, rate, resumed = made()
    assert resumed.restore(saved) == []
    (optimizer,) = resumed.optimizers
    assert [float(one["lr"]) for one in optimizer.param_groups] == [0.125, 0.0625], "as they were saved"
    group["lr"] = 1.0
    rate.fill_(2.0)
    assert [float(one["lr"]) for one in optimizer.param_groups] == [1.0, 2.0]


class Sharpness(torch.optim.SGD):
    """As SAM has it: another optimizer takes its steps, by the same groups."""

    def __init__(self, parameters: Any, momentum: float = 0.0) -> None:
        super().__init__(parameters, 0.5, momentum=momentum)
        self.base = torch.optim.SGD(self.param_groups, 0.5, momentum=momentum)
        self.param_groups = self.base.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


def test_an_optimizer_that_shares_its_groups_with_an_inner_one_goes_on_sharing_them() -> None:
    def made() -> tuple[Sharpness, TrainingState]:
        model = nn.Linear(2, 1)
        optimizer = Sharpness(model.parameters())
        return optimizer, TrainingState({"model": model, "optimizer": optimizer}, rank=0)

    _, state = made()
    optimizer, resumed = made()
    assert resumed.restore(saved_by(state)) == []
    optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.base.param_groups[0]["lr"] == 0.25


def test_moments_of_an_inner_optimizer_that_an_outer_one_does_not_give_are_told_to_be_lost() -> None:
    """As SAM has it: a resume began with moments of 0, without a word."""

    def steps_of(optimizer: Sharpness, **others: torch.optim.Optimizer) -> list[bool]:
        state = TrainingState({"model": model, "optimizer": optimizer, **others}, rank=0)
        told = []
        for _ in range(3):
            told.append(state.found_untracked(optimizer.base))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.base.step()
        return told

    model = nn.Linear(2, 1)
    assert steps_of(Sharpness(model.parameters())) == [False, False, False], "it keeps nothing"
    assert steps_of(Sharpness(model.parameters(), momentum=0.5)) == [False, True, False]
    tracked = Sharpness(model.parameters(), momentum=0.5)
    assert steps_of(tracked, base=tracked.base) == [False, False, False]
    sharing = Sharpness(model.parameters(), momentum=0.5)
    sharing.state = sharing.base.state
    assert steps_of(sharing) == [False, False, False]


def test_lists_too_long_to_be_read_again_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shuffled order of 13 million numbers was saved, and no attempt could load what was durable."""
    monkeypatch.setattr(tensorfile, "_LARGEST_HEADER", 16_384)
    model, tally = nn.Linear(2, 1), Tally()
    state = TrainingState({"model": model, "tally": tally}, rank=0)
    saver = make_saver(RunDir(tmp_path))
    saver.save(1, state.capture(1).shared, {})
    saver.wait()
    tally.kept["order"] = list(range(10_000))
    told = r"parts\.tally\.order: what the state has besides its tensors is 53\.\d kB as text"
    with pytest.raises(UnsupportedState, match=told):
        saver.save(2, state.capture(2).shared, {})
    with pytest.raises(UnsupportedState, match=told):
        TrainingState({"model": model, "tally": tally}, rank=0)
    loaded, skipped = load_newest(RunDir(tmp_path), 2, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, skipped) == (1, [])


class Memory(nn.Module):
    """Keeps a row of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 2))

    def grow(self) -> None:
        self.rows = torch.cat([self.rows, torch.ones(1, 2)])


class LoadsAnyShape(Memory):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.rows = torch.empty_like(state[f"{prefix}rows"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_buffer_that_grows_is_told_at_the_first_save_as_a_resume_refuses_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the attempt after an interruption heard of it, which ended the job for good."""
    model = nn.Sequential(nn.Linear(2, 2), Memory(), LoadsAnyShape())
    state = TrainingState({"model": model}, 0)
    exactness = Exactness({}, Alone())
    exactness.before_save(state)
    assert not caplog.messages
    for _ in range(2):  # it is told once
        model[1].grow()
        model[2].grow()
        exactness.before_save(state)
    assert caplog.messages == [
        "the buffer 1.rows of model, [1, 2] where it was [0, 2], has another shape than at run.track: a "
        "resume is refused, as torch loads it into one of the same shape alone. Give it all its room before "
        "run.track"
    ]
    saved = model[2].state_dict()
    LoadsAnyShape().load_state_dict(saved)
    with pytest.raises(RuntimeError, match="size mismatch for rows"):
        Memory().load_state_dict(saved)


class Adapted(nn.Module):
    """A layer with a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 1, bias=False), nn.Linear(1, 4)


def test_a_model_that_is_built_anew_is_told_at_the_first_save_as_a_resume_refuses_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where adapters are merged. Only the attempt after an interruption heard of it, and ended the job."""
    model = nn.Sequential(Adapted(), nn.Linear(4, 1))
    adapted, layer = model[0], model[1]
    state = TrainingState({"model": model}, 0)
    exactness = Exactness({}, Alone())
    model[1] = torch.compile(layer)  # type: ignore[assignment]
    exactness.before_save(state)
    assert not caplog.messages, "it is what it was"
    for _ in range(2):  # it is told once
        model[0] = adapted.base
        exactness.before_save(state)
        model[0] = adapted
        exactness.before_save(state)
    assert caplog.messages == [
        "model is not built as it was at run.track (0.base.bias, 0.base.weight, 0.bias, 0.down.weight and 3 "
        "more): a resume is refused, for which the script builds it as it was. Change it after the last "
        "step, such as where adapters are merged into it"
    ]
    model[0] = adapted.base
    misfit = load_model(nn.Sequential(Adapted(), nn.Linear(4, 1)), model.state_dict(), None)
    assert 'Unexpected key(s) in state_dict: "0.weight", "0.bias"' in misfit


def test_points_that_multiply_are_told_as_a_resume_refuses_them(caplog: pytest.LogCaptureFixture) -> None:
    """As Gaussians that a scene is made of: with other parameters of other shapes in the groups that there
    are. Only the attempt after an interruption heard of it, and ended the job."""
    model = nn.Module()
    model.points = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([model.points], 0.1)
    state = TrainingState({"model": model, "optimizer": optimizer}, 0)
    exactness = Exactness({}, Alone())
    exactness.look_at_optimizer(state, optimizer)
    exactness.before_save(state)
    assert not caplog.messages
    model.points = nn.Parameter(torch.zeros(4, 3))
    optimizer.param_groups[0]["params"] = [model.points, nn.Parameter(torch.zeros(1))]
    for _ in range(2):  # it is told once
        exactness.look_at_optimizer(state, optimizer)
        exactness.before_save(state)
    first, second = caplog.messages
    assert first.startswith("optimizer was given parameters after run.track: a resume is refused")
    assert second.startswith("the parameter points of model, [4, 3] where it was [2, 3], has another shape")
    again = nn.Module()
    again.points = nn.Parameter(torch.zeros(2, 3))
    assert "size mismatch for points" in load_model(again, model.state_dict(), None)


def test_an_optimizer_that_has_its_parameters_again_has_lost_none() -> None:
    """A loop that gives it a layer for a while and takes it back can be gone on with."""
    model, more = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainingState({"model": model, "optimizer": optimizer}, 0)
    told = [state.resized_optimizer(optimizer)]
    optimizer.add_param_group({"params": list(more.parameters())})
    told += [state.resized_optimizer(optimizer), state.resized_optimizer(optimizer)]
    optimizer.param_groups.pop()
    told += [state.resized_optimizer(optimizer)]
    optimizer.param_groups.pop()
    told += [state.resized_optimizer(optimizer), state.resized_optimizer(torch.optim.SGD(model.parameters()))]
    assert told == [
        ("optimizer", 0),
        ("optimizer", 2),
        ("optimizer", 0),
        ("optimizer", 0),
        ("optimizer", -2),
        ("", 0),
    ]
