"""What one attempt saved, another takes on, also where its device computes in another precision."""

from __future__ import annotations

import copy
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lone_gang import Alone
from saving import make_saver
from torch import nn

from holdfast_trainer.checkpoint import Loaded, WrongConfiguration, load_newest, tensorfile
from holdfast_trainer.checkpoint.manifest import Manifest
from holdfast_trainer.checkpoint.shares import part_of
from holdfast_trainer.checkpoint.tree import UnsupportedState, in_kind, pack, unpack
from holdfast_trainer.contract import RunDir
from holdfast_trainer.training_state import TrainingState


def scaler(*, fp16: bool, scale: float = 2.0**16) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale, enabled=fp16)
    made.scale(torch.ones(()))
    return made


def loaded(state: dict[str, Any], own: dict[str, Any] | None = None) -> Loaded:
    manifest = Manifest(step=7, attempt=1, world_size=1, config_hash="", files={}, time=0.0)
    return Loaded(manifest, {"parts": {"scaler": state}}, None if own is None else {"parts": {"scaler": own}})


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


def carried(state: TrainingState) -> Any:
    """Of the gradients, what a save now has."""
    state.end_step()
    return state.capture(1).shared.get("gradients", {}).get("optimizer")


def test_gradients_are_saved_while_they_add_up_and_not_once_they_were_stepped_with() -> None:
    """A loop that steps its optimizer every second step, and one that leaves gradients to its next step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
    assert carried(state) is None

    def backward() -> None:
        model(torch.ones(1, 2)).sum().backward()

    backward()
    assert {number: gradient.tolist() for number, gradient in carried(state).items()} == {0: [[1, 1]], 1: [1]}
    optimizer.step()
    assert carried(state) is None, "they are there, and spent"
    backward()
    assert carried(state)[1].tolist() == [2], "added to what was stepped with, by a loop that clears nothing"
    optimizer.step()
    optimizer.zero_grad()
    assert carried(state) is None
    backward()
    assert carried(state)[1].tolist() == [1]
    optimizer.zero_grad(set_to_none=False)
    assert carried(state) == {0: None, 1: None}, "they are there, and nothing has been added up yet"


@pytest.mark.parametrize("in_bucket", [False, True])
def test_gradients_that_a_loop_never_clears_are_part_of_its_state(in_bucket: bool) -> None:
    """A resume began with none, and went on with other steps, without a word. Also where the save that it
    resumes from is that of its first step after another; and where they are parts of DDP's bucket."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer, TrainingState, list[torch.Tensor]]:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        bucket = torch.zeros(4)
        return (
            model,
            optimizer,
            TrainingState({"model": model, "optimizer": optimizer}, rank=0),
            [
                bucket[:3].view(1, 3),
                bucket[3:],
            ],
        )

    def step(number: int, made: Any) -> None:
        model, optimizer, state, views = made
        model(torch.full((1, 3), 1.0 + number)).square().sum().backward()
        for parameter, view in zip(model.parameters(), views, strict=True):
            if in_bucket and parameter.grad is not view:
                parameter.grad = view.copy_(parameter.grad)
        optimizer.step()
        state.end_step()

    untouched, made = parts(), parts()
    for number in range(6):
        step(number, untouched)
        step(number, made)
        if number > 0:
            saved, made = copy.deepcopy(saved_by(made[2])), parts()
            assert made[2].restore(saved) == []
    assert all(map(torch.equal, untouched[0].parameters(), made[0].parameters()))
    made[1].zero_grad()
    for number in range(2):
        step(number, made)
        made[1].zero_grad()
        made[0](torch.ones(1, 3))
    assert carried(made[2]) is None, "nor is anything kept for it where a loop clears them again"


class Several:
    """Of a user's own: optimizers that are one part."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.seen: list[int] = []
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        for one, saved in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(saved)


@pytest.mark.parametrize("carries", [False, True])
def test_optimizers_within_a_part_go_on_as_those_that_are_parts(carries: bool, tmp_path: Path) -> None:
    """A resume lost the gradients that they add up, and gave weights in channels_last the moments of others,
    without a word."""

    def parts() -> tuple[nn.Sequential, Several]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
        first = torch.optim.AdamW(model[0].parameters(), 0.01, fused=True)
        return model, Several(first, torch.optim.SGD(model[1].parameters(), 0.1, momentum=0.9, fused=True))

    def step(number: int, model: nn.Module, several: Several) -> None:
        images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(number))
        model(images).square().mean().backward()
        several.seen.append(number)
        if not carries or number % 2:
            for optimizer in several.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, several = parts()
    state = TrainingState({"model": model, "several": several}, rank=0)
    assert list(state.inner_optimizers) == list(several.optimizers)
    for number in range(3):
        step(number, model, several)
        state.end_step()
    tensorfile.write(tmp_path / "file", *pack(state.capture(3).shared))
    shared = unpack(*tensorfile.read(tmp_path / "file"))
    resumed, its_optimizers = parts()
    again = TrainingState({"model": resumed, "several": its_optimizers}, rank=0)
    assert again.restore(Loaded(Manifest(3, 1, 1, "", {}, 0.0), shared, None)) == []
    for number in range(3, 6):
        for one, of in ((model, several), (resumed, its_optimizers)):
            step(number, one, of)
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("carries", [False, True])
def test_weights_that_do_not_lie_in_rows_have_their_moments_and_gradients_beside_them(
    kind: Any, carries: bool, tmp_path: Path
) -> None:
    """A fused optimizer goes through memory. Of weights in channels_last, and of a matrix that is transposed,
    a resume gave each the moments of another one, without a word."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
        model.matrix = nn.Parameter(torch.randn(5, 3).t())
        more = {} if kind is torch.optim.AdamW else {"momentum": 0.9}
        return model, kind(model.parameters(), 0.01, fused=True, **more)

    def step(number: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(number)
        images, rows = torch.randn(2, 3, 6, 6, generator=generator), torch.randn(2, 3, generator=generator)
        (model(images).square().mean() + (rows @ model.matrix).square().mean()).backward()
        if not carries or number % 2:
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = parts()
    state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
    for number in range(3):
        step(number, model, optimizer)
        state.end_step()
    tensorfile.write(tmp_path / "file", *pack(state.capture(3).shared))
    shared = unpack(*tensorfile.read(tmp_path / "file"))
    assert ("gradients" in shared) == carries
    resumed, its_optimizer = parts()
    again = TrainingState({"model": resumed, "optimizer": its_optimizer}, rank=0)
    assert again.restore(Loaded(Manifest(3, 1, 1, "", {}, 0.0), shared, None)) == []
    for number in range(3, 6):
        for one, of in ((model, optimizer), (resumed, its_optimizer)):
            step(number, one, of)
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("clears", "saved_at", "turns"),
    [
        ("before", 4, [(0, 1 + number // 3 % 2) for number in range(9)]),
        ("after", 4, [(0, 1 + number // 3 % 2) for number in range(9)]),
        ("before", 2, [(0, 1), (0, 2), *3 * [(0, 1)]]),
        ("after", 2, [(0, 1), (0, 2), *3 * [(0, 1)]]),
        ("before", 2, [(2,), (1,), *3 * [(0,)]]),
        ("after", 1, [(0, 1), *3 * [(0, 2)]]),
    ],
    ids=["before", "after", "a last one first", "likewise after", "a first one last", "after the first step"],
)
def test_a_parameter_that_a_step_leaves_out_has_the_gradient_that_it_had(
    sparse: bool, clears: str, saved_at: int, turns: list[tuple[int, ...]]
) -> None:
    """A loop that clears gradients in place, with heads that take turns: an optimizer goes on decaying the
    moments of a head with a gradient of zeros, and passes over one that has none. A resume that had lost
    which there are went on with other bits, without a word; so did one from a save before the turn of the
    first head, or of the last, had come twice."""

    def parts() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(1)
        heads = nn.ModuleList(nn.Embedding(3, 2, sparse=sparse) for _ in range(4))
        kind = torch.optim.SparseAdam if sparse else torch.optim.AdamW
        return heads, kind(heads.parameters(), 0.1)

    def step(number: int, heads: nn.ModuleList, optimizer: torch.optim.Optimizer) -> None:
        if clears == "before":
            optimizer.zero_grad(set_to_none=False)
        for turn in turns[number]:  # and the last is never there
            heads[turn](torch.tensor([number % 3])).square().sum().backward()
        optimizer.step()
        if clears == "after":
            optimizer.zero_grad(set_to_none=False)

    heads, optimizer = parts()
    state = TrainingState({"model": heads, "optimizer": optimizer}, rank=0)
    for number in range(saved_at):
        step(number, heads, optimizer)
        state.end_step()
    saved = copy.deepcopy(saved_by(state))
    there = {head for turn in turns[:saved_at] for head in turn}
    assert saved.shared["gradients"]["optimizer"].keys() == there
    resumed, its_optimizer = parts()
    again = TrainingState({"model": resumed, "optimizer": its_optimizer}, rank=0)
    assert again.restore(saved) == []
    for number in range(saved_at, len(turns)):
        for one, of in ((heads, optimizer), (resumed, its_optimizer)):
            step(number, one, of)
    pairs = zip(heads.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_gradients_that_are_parts_of_a_bucket_come_back_and_are_not_kept() -> None:
    """As DDP has them: each checkpoint said which there are, and an older Holdfast refused it."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
    bucket = torch.zeros(4)
    views = [bucket[:3].view(1, 3), bucket[3:]]
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(1, 3)).sum().backward()
        for parameter, view in zip(model.parameters(), views, strict=True):
            assert parameter.grad is not None
            parameter.grad = view.copy_(parameter.grad)
        optimizer.step()
        state.end_step()
    assert "gradients" not in saved_by(state).shared


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


class Fabrics(nn.Module):
    """As Lightning Fabric has it: what it runs and what it was made of, whose state it gives as its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = nn.Sequential(model)
        self._original_module = model

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._original_module.state_dict(**options)

    def load_state_dict(self, state: Any, **options: Any) -> Any:  # type: ignore[override]
        return self._original_module.load_state_dict(state, **options)


def test_of_a_model_that_is_wrapped_each_rank_keeps_its_own_buffers() -> None:
    """Else running statistics of one rank are saved for all, and the resume is another training."""
    norms = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    ranks = [TrainingState({"model": Fabrics(norm)}, rank) for rank, norm in enumerate(norms)]
    for rank, norm in enumerate(norms):
        norm(torch.full((3, 2), 10.0 * (rank + 1)))
    first, second = (state.capture(1) for state in ranks)
    assert "shared.parts.model.running_mean" in first.rank_0_only
    assert second.own["buffers"]["model"]["running_mean"].tolist() == [2, 2]

    resumed = nn.BatchNorm1d(2)
    manifest = Manifest(step=1, attempt=1, world_size=2, config_hash="", files={}, time=0.0)
    TrainingState({"model": Fabrics(resumed)}, 1).restore(Loaded(manifest, first.shared, second.own))
    running: Any = resumed.running_mean
    assert running.tolist() == [2, 2]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group, which DDP wants."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def compiled(net: nn.Module) -> nn.Module:
    """Compiled when it is first called, which nobody does here."""
    made: Any = torch.compile(net)
    assert isinstance(made, nn.Module)
    return made


def layers_compiled(net: nn.Module) -> nn.Module:
    for layer in range(2):
        net[layer] = compiled(net[layer])  # type: ignore[index,operator]
    return net


def under_ddp(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def named(net: nn.Module, wrapping: str) -> dict[str, torch.Tensor]:
    return {wrapping + name: value for name, value in net.state_dict().items()}


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "compiled": compiled,
    "compiled DDP": lambda net: compiled(under_ddp(net)),
    "DDP of what is compiled": lambda net: under_ddp(compiled(net)),
    "layers compiled": layers_compiled,
}


def test_what_is_compiled_is_told_in_a_few_words() -> None:
    """Where it is another part, dropout may draw other numbers, and sums round otherwise."""
    blocks = nn.Sequential(*(compiled(nn.Linear(2, 2)) for _ in range(40)), nn.Linear(2, 2))
    assert TrainingState({"model": nn.ModuleDict({"blocks": blocks})}, rank=0).compiled == (
        "40 of model.blocks.*"
    )
    assert TrainingState({"model": compiled(small_net()), "other": small_net()}, rank=0).compiled == "model"
    assert TrainingState({"model": layers_compiled(small_net())}, rank=0).compiled == "2 of model.*"
    assert TrainingState({"model": small_net()}, rank=0).compiled is False


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("now", ["compiled DDP", "DDP"])
@pytest.mark.parametrize("then", ["compiled DDP", "DDP"])
def test_each_rank_goes_on_with_its_own_buffers_also_where_ddp_is_compiled_now(then: str, now: str) -> None:
    """After a pass that exchanged nothing they stay apart in the next pass, by what DDP is named."""
    first, second = under_ddp(small_net()), under_ddp(small_net())
    assert isinstance(first, nn.parallel.DistributedDataParallel)
    assert isinstance(second, nn.parallel.DistributedDataParallel)
    first.require_forward_param_sync = False
    was, is_now = (
        TrainingState({"model": compiled(model) if "compiled" in way else model}, rank=0)
        for model, way in ((first, then), (second, now))
    )
    manifest = Manifest(step=1, attempt=1, world_size=1, config_hash="", files={}, time=0.0)
    assert is_now.restore(Loaded(manifest, was.capture(1).shared, None)) == []
    assert second.require_forward_param_sync is False


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("now", WAYS)
@pytest.mark.parametrize("then", WAYS)
def test_torch_compile_is_switched_on_and_off_between_two_attempts(then: str, now: str) -> None:
    """It changes how a model is computed, not which: what was saved with it goes on without, and each rank's
    own running statistics as well."""
    was, is_now = small_net(), small_net()
    buffers = {name for name, _ in was.named_buffers()}
    with torch.no_grad():
        was.get_buffer("1.running_mean").fill_(5.0)
    saves = TrainingState({"model": WAYS[then](was)}, rank=1)
    saved = saves.capture(7)
    resumes = TrainingState({"model": WAYS[now](is_now)}, rank=1)
    assert (bool(saves.compiled), bool(resumes.compiled)) == ("compiled" in then, "compiled" in now)
    manifest = Manifest(step=7, attempt=1, world_size=2, config_hash="", files={}, time=0.0)
    assert resumes.restore(Loaded(manifest, saved.shared, saved.own)) == []
    for mine, theirs in zip(is_now.state_dict().values(), was.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert saved.shared["parts"]["model"].keys() == small_net().state_dict().keys()
    assert saved.own["buffers"]["model"].keys() == buffers


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("now", WAYS)
@pytest.mark.parametrize("then", WAYS)
def test_an_average_of_a_wrapped_model_goes_on_on_one_rank_and_on_several(then: str, now: str) -> None:
    """Where `run.wrap` makes no DDP of it, or does, the average was another model, and the job failed."""
    was, is_now = (torch.optim.swa_utils.AveragedModel(WAYS[way](small_net())) for way in (then, now))
    with torch.no_grad():
        was.n_averaged.fill_(3)
    saved = TrainingState({"ema": was}, rank=1).capture(7)
    manifest = Manifest(step=7, attempt=1, world_size=2, config_hash="", files={}, time=0.0)
    assert TrainingState({"ema": is_now}, rank=1).restore(Loaded(manifest, saved.shared, saved.own)) == []
    for mine, theirs in zip(is_now.state_dict().values(), was.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("wrapping", ["_orig_mod.", "_orig_mod.module."])
def test_a_compiled_model_that_an_earlier_holdfast_saved_goes_on(wrapping: str) -> None:
    """It saved a compiled model under the names that torch.compile gives it."""
    was, is_now = small_net(), small_net()
    state = TrainingState({"model": compiled(is_now)}, rank=0)
    manifest = Manifest(step=7, attempt=1, world_size=1, config_hash="", files={}, time=0.0)
    assert state.restore(Loaded(manifest, {"parts": {"model": named(was, wrapping)}}, None)) == []
    assert torch.equal(is_now.state_dict()["0.weight"], was.state_dict()["0.weight"])

    twice = {"parts": {"model": named(was, "") | named(was, wrapping)}}
    with pytest.raises(WrongConfiguration, match=r"Unexpected key\(s\) in state_dict: .*_orig_mod"):
        state.restore(Loaded(manifest, twice, None))


def test_of_a_step_that_the_loop_has_left_in_its_middle_no_gradients_are_saved() -> None:
    """By `break`, say: the step will be done again, from its beginning."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
    state.end_step()
    model(torch.ones(1, 2)).sum().backward()
    assert "gradients" not in state.capture(1).shared


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


def saved_by(state: TrainingState, *, without: tuple[str, ...] = ()) -> Loaded:
    shared = state.capture(1).shared
    for group in shared["parts"]["optimizer"]["param_groups"]:
        for key in without:
            del group[key]
    return Loaded(Manifest(1, 1, 1, "", {}, 0.0), shared, None)


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


class Named(nn.Linear):
    """As libraries have it from before torch's own took more."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        yield from nn.Module.named_parameters(self, prefix, recurse)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_model_of_torch_jit_or_with_names_of_its_own_is_tracked_as_any_other() -> None:
    """Of a scripted one `run.track` ended with an AttributeError."""
    for make in (lambda: torch.jit.script(small_net()), lambda: Named(2, 1)):
        model, again = make(), make()
        optimizer, other = (torch.optim.Adam(one.parameters()) for one in (model, again))
        state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        resumed = TrainingState({"model": again, "optimizer": other}, rank=0)
        assert resumed.restore(saved_by(state)) == []
        pairs = zip(model.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
        assert resumed.unsaved == []


class Counting(nn.Linear):
    """Of the user's own: what it counts is saved as PyTorch has it for what is no tensor."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_a_module_with_state_that_is_no_tensor_is_tracked_and_goes_on() -> None:
    model = Counting(2, 1)
    model.calls = 3
    state = TrainingState({"model": model}, rank=0)
    assert state.describe().startswith("model (")
    saved = state.capture(1).shared
    model.calls = 0
    manifest = Manifest(step=1, attempt=1, world_size=1, config_hash="", files={}, time=0.0)
    assert state.restore(Loaded(manifest, saved, None)) == []
    assert model.calls == 3


class Tallying(nn.Linear):
    """Likewise, of a kind that a checkpoint does not have."""

    def __init__(self, *seen: str) -> None:
        super().__init__(2, 1)
        self.seen, self.total = Counter(seen), torch.tensor(len(seen))

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": self.total}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen, self.total = state["seen"], state["total"]


def test_what_a_module_gives_of_its_own_is_each_ranks_and_of_the_kind_that_it_was() -> None:
    """All ranks went on with rank 0's, or with a tensor that any of them had written."""
    ranks = [Tallying("cat"), Tallying("dog", "dog")]
    states = [TrainingState({"model": nn.Sequential(one)}, rank) for rank, one in enumerate(ranks)]
    first, second = (state.capture(1) for state in states)
    assert first.rank_0_only == second.rank_0_only == {"shared.parts.model.0._extra_state.total"}
    shared, own = (unpack(json.loads(json.dumps(s)), t) for s, t in map(pack, (first.shared, second.own)))
    for rank, has in ((0, None), (1, own)):
        model = Tallying()
        loaded = Loaded(Manifest(1, 1, 2, "", {}, 0.0), shared, has)
        assert TrainingState({"model": nn.Sequential(model)}, rank).restore(loaded) == []
        assert (model.seen, model.total) == (ranks[rank].seen, ranks[rank].total)
        model.seen["bird"] += 1


def test_a_buffer_that_two_modules_share_is_each_ranks_own_under_both_names() -> None:
    """Batch norm that is used twice, and counts each rank's own batches: one name alone had rank 0's."""
    norm = nn.BatchNorm1d(2)
    state = TrainingState({"model": nn.ModuleDict({"a": norm, "b": norm})}, rank=1)
    captured = state.capture(1)
    assert set(captured.own["buffers"]["model"]) == {
        f"{module}.{name}"
        for module in "ab"
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert captured.rank_0_only == {f"shared.parts.model.{name}" for name in captured.own["buffers"]["model"]}


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


def test_a_buffer_that_is_expanded_comes_back() -> None:
    """Each resume was refused, as if the model were another one: the work before an interruption was lost."""

    def model() -> nn.Linear:
        made = nn.Linear(2, 1)
        made.register_buffer("mask", torch.arange(3).expand(4, 3))
        made.register_buffer("row", torch.arange(3).expand(1, 3))
        return made

    state, resumed = (TrainingState({"model": model()}, rank=1) for _ in range(2))
    captured = state.capture(1)
    assert resumed.restore(Loaded(Manifest(1, 1, 2, "", {}, 0.0), captured.shared, captured.own)) == []
    (after,) = resumed.parts
    assert isinstance(after, nn.Linear)
    assert after.get_buffer("mask").tolist() == [[0, 1, 2]] * 4


class Whitened(nn.Linear):
    """It takes the mean from its first batch."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("mean", None)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = batch.mean(0)
        return super().forward(batch - self.mean)


def test_a_buffer_that_a_model_makes_in_its_first_pass_comes_back() -> None:
    """Each resume was refused, as if the model were another one."""
    whitened, again = (nn.Sequential(Whitened()) for _ in range(2))
    state, resumed = (TrainingState({"model": model}, rank=1) for model in (whitened, again))
    whitened(torch.ones(3, 2))
    captured = state.capture(1)
    assert resumed.restore(Loaded(Manifest(1, 1, 2, "", {}, 0.0), captured.shared, captured.own)) == []
    batch = torch.randn(3, 2)
    assert torch.equal(again(batch), whitened(batch))
    assert resumed.capture(1).rank_0_only == captured.rank_0_only


class Accuracy(nn.Module):
    """As torchmetrics has them: attributes, which its own `state_dict` gives."""

    def __init__(self, *seen: int) -> None:
        super().__init__()
        self.total, self.rows = torch.tensor(sum(seen)), [torch.full((one,), one) for one in seen]

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        prefix = options.get("prefix", "")
        return state | {f"{prefix}total": self.total, f"{prefix}rows": self.rows}

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        self.total, self.rows = state.pop(f"{prefix}total"), state.pop(f"{prefix}rows")


def test_what_a_module_counts_on_its_own_rank_stays_that_ranks() -> None:
    """All ranks went on with rank 0's sums, and where ranks had lists of other lengths no save was made."""
    ranks = [Accuracy(1), Accuracy(2, 3)]
    states = [TrainingState({"accuracy": one}, rank) for rank, one in enumerate(ranks)]
    first, second = (state.capture(1) for state in states)
    divisions = [
        part_of(captured.shared, captured.own, captured.rank_0_only, rank, 2).division
        for rank, captured in enumerate((first, second))
    ]
    assert divisions[0] == divisions[1]
    shared, own = (unpack(json.loads(json.dumps(s)), t) for s, t in map(pack, (first.shared, second.own)))
    for rank, has in ((0, None), (1, own)):
        accuracy = Accuracy()
        loaded = Loaded(Manifest(1, 1, 2, "", {}, 0.0), shared, has)
        assert TrainingState({"accuracy": accuracy}, rank).restore(loaded) == []
        assert accuracy.total == ranks[rank].total
        assert [row.tolist() for row in accuracy.rows] == [row.tolist() for row in ranks[rank].rows]


class Second(nn.Linear):
    """As torchvision's MNASNet: it refuses a state of no version, and reads one of its first otherwise."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any
    ) -> None:
        if (version := metadata.get("version")) not in (1, 2):
            raise ValueError(f"version should be 1 or 2, not {version}")
        if version == 1:
            state[f"{prefix}bias"] = state[f"{prefix}bias"] + 1
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize(("saved", "added"), [(Second, 0), (nn.Linear, 1)])
def test_a_module_hears_of_which_version_its_state_is(
    saved: type[nn.Linear], added: int, tmp_path: Path
) -> None:
    """Each resume ended with an error of the module's, or with a state that it took for an older one."""
    before, after = nn.Sequential(nn.Sequential(saved(2, 1))), nn.Sequential(nn.Sequential(Second(2, 1)))
    compiled = nn.Sequential(torch.compile(before[0]))
    captured = TrainingState({"model": compiled}, rank=0).capture(1).shared
    tensorfile.write(tmp_path / "file", *pack(captured))
    shared = unpack(*tensorfile.read(tmp_path / "file"))
    resumed = TrainingState({"model": after}, rank=0)
    assert resumed.restore(Loaded(Manifest(1, 1, 1, "", {}, 0.0), shared, None)) == []
    assert torch.equal(after[0][0].bias, before[0][0].bias + added)
