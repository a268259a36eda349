"""Gradients that a loop goes on adding to are part of its state; those that it has stepped with are not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import carried, saved_by
from torch import nn

from holdfast_trainer.checkpoint import Loaded, tensorfile
from holdfast_trainer.checkpoint.manifest import Manifest
from holdfast_trainer.checkpoint.tree import pack, unpack
from holdfast_trainer.training_state import TrainingState


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


def test_of_a_step_that_the_loop_has_left_in_its_middle_no_gradients_are_saved() -> None:
    """By `break`, say: the step will be done again, from its beginning."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainingState({"model": model, "optimizer": optimizer}, rank=0)
    state.end_step()
    model(torch.ones(1, 2)).sum().backward()
    assert "gradients" not in state.capture(1).shared
