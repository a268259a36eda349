"""Models in a checkpoint: wrapped, compiled, with buffers and state of their own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from saving import saved_by
from torch import nn

from holdfast_trainer.checkpoint import Loaded, WrongConfiguration, tensorfile
from holdfast_trainer.checkpoint.manifest import Manifest
from holdfast_trainer.checkpoint.shares import part_of
from holdfast_trainer.checkpoint.tree import pack, unpack
from holdfast_trainer.training_state import TrainingState


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


def test_what_was_made_under_inference_mode_comes_back() -> None:
    """As a table, or a copy for an average: each resume was refused, as if the model were another one."""

    def model(value: float) -> nn.Sequential:
        with torch.inference_mode():
            table, copied = torch.full((3,), value), nn.Linear(2, 1)
            copied.weight.fill_(value)
        made = nn.Sequential(nn.Linear(2, 1), copied.requires_grad_(False))
        made.register_buffer("table", table)
        return made

    state, resumed = (TrainingState({"model": model(value)}, rank=1) for value in (2.0, 3.0))
    captured = state.capture(1)
    assert resumed.restore(Loaded(Manifest(1, 1, 2, "", {}, 0.0), captured.shared, captured.own)) == []
    (after,) = resumed.parts
    assert isinstance(after, nn.Sequential)
    assert after.get_buffer("table").tolist() == [2, 2, 2]
    assert after[1].weight.tolist() == [[2, 2]]
    after[0](torch.ones(3, 2)).sum().backward()


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
