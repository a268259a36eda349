"""What was saved in shards goes on cut over another number of ranks, and none reads more than its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gangs import Workshop
from hypothesis import given
from hypothesis import strategies as st

from holdfast_trainer.checkpoint import tensorfile
from holdfast_trainer.checkpoint.loader import read_state
from holdfast_trainer.checkpoint.manifest import Manifest
from holdfast_trainer.checkpoint.store import part_file
from holdfast_trainer.checkpoint.tensorfile import UnreadableFile
from holdfast_trainer.checkpoint.tree import Piece, is_shard, pack, rows_wanted, shard_rows, unpack
from holdfast_trainer.contract import EXIT_CONFIG_ERROR

RANKS = st.integers(1, 9)


@given(st.integers(0, 40), RANKS)
def test_rows_are_cut_as_torch_cuts_them(total: int, ranks: int) -> None:
    whole = torch.arange(total)
    pieces = [whole[rows.start : rows.stop] for rows in (shard_rows(total, r, ranks) for r in range(ranks))]
    theirs = [*torch.chunk(whole, ranks), *[whole[:0]] * ranks][:ranks]
    assert all(torch.equal(ours, piece) for ours, piece in zip(pieces, theirs, strict=True))


@given(st.integers(0, 40), RANKS, RANKS)
def test_of_the_old_pieces_the_new_ones_are_made(total: int, before: int, after: int) -> None:
    old = [shard_rows(total, rank, before) for rank in range(before)]
    rows = {f"w@{rank}": len(piece) for rank, piece in enumerate(old)}
    for rank in range(after):
        wanted = rows_wanted(rows, rank, after)
        taken = [old[index][row] for index in range(before) for row in wanted[f"w@{index}"]]
        assert taken == list(shard_rows(total, rank, after))


PARTS = {
    "even": torch.arange(24.0).reshape(12, 2),
    "uneven": torch.arange(35, dtype=torch.int64).reshape(7, 5),
    "few": torch.tensor([1.5]),
    "deep": torch.arange(30.0).reshape(5, 2, 3).to(torch.bfloat16),
}
SIZES = {"step": 7, "whole": torch.full((3,), 2.0)}


def save(directory: Path, ranks: int) -> Manifest:
    """As `ranks` write it, each its shards, and the whole tensor rank 0."""
    names = {part: [f"shared.{part}@{rank}" for rank in range(ranks)] for part in PARTS}
    skeleton, tensors = pack({"shared": SIZES})
    skeleton["shared"] |= {part: {"$shards": pieces} for part, pieces in names.items()}
    files = {}
    for rank in range(ranks):
        mine = dict(tensors) if rank == 0 else {}
        for part, whole in PARTS.items():
            rows = shard_rows(len(whole), rank, ranks)
            mine[names[part][rank]] = whole[rows.start : rows.stop]
        mine["own.seed"] = torch.tensor([rank])
        own = {"own": {"seed": {"$tensor": "own.seed"}}}
        files[part_file(rank)] = tensorfile.write(directory / part_file(rank), {**skeleton, **own}, mine)
    return Manifest(step=7, attempt=1, world_size=ranks, config_hash="", files=files, time=0.0)


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_any_number_of_ranks_goes_on_with_what_any_other_saved(
    tmp_path: Path, before: int, after: int
) -> None:
    manifest = save(tmp_path, before)
    for rank in range(after):
        shared, own = read_state(tmp_path, manifest, rank, after, in_shards=True)
        assert shared["step"] == 7
        assert torch.equal(shared["whole"], SIZES["whole"])
        for part, whole in PARTS.items():
            rows = shard_rows(len(whole), rank, after)
            piece: Any = shared[part]
            assert isinstance(piece, Piece)
            assert piece.tensor.dtype == whole.dtype
            assert torch.equal(piece.tensor, whole[rows.start : rows.stop])
        assert (None if own is None else own["seed"].item()) == (rank if after == before else None)

        shared, _ = read_state(tmp_path, manifest, rank, after, in_shards=False)
        assert all(torch.equal(shared[part], whole) for part, whole in PARTS.items())


@pytest.mark.parametrize("place", [4, 300, -3], ids=["length", "header", "data"])
def test_damage_is_found_wherever_it_is(tmp_path: Path, place: int) -> None:
    """Also in a part of which this rank wants no row."""
    manifest = save(tmp_path, 2)
    part = tmp_path / part_file(1)
    data = bytearray(part.read_bytes())
    data[place] ^= 1
    part.write_bytes(data)
    for ranks in (2, 3, 4):
        with pytest.raises(UnreadableFile, match=r"rank-1.safetensors"):
            read_state(tmp_path, manifest, 0, ranks, in_shards=True)


def test_a_piece_is_its_ranks_own_and_the_pieces_are_one_tensor() -> None:
    tensors = {
        "weight@0": torch.arange(4.0).reshape(2, 2),
        "weight@1": torch.ones(1, 2),
        "weight@2": torch.ones(0, 2),
    }
    assert all(map(is_shard, tensors))
    assert not is_shard("weight")
    whole = unpack({"weight": {"$shards": list(tensors)}}, tensors)["weight"]
    assert torch.equal(whole, torch.tensor([[0.0, 1.0], [2.0, 3.0], [1.0, 1.0]]))
    assert pack({"$shards": 1})[0] == {"$dict": [["$shards", 1]]}, "a user's own key is no tag"


AVERAGES = """
import sys
import torch
from holdfast_trainer.run import Run

class Average:
    def __init__(self):
        self.of, self.rank = {}, run.rank
        if sys.argv[1] == "at once":
            self.update()

    def update(self):
        for name, parameter in model.named_parameters():
            of = self.of.setdefault(name, parameter.detach().clone())
            of.lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return {"of": self.of, "again": [(self.rank, of) for of in self.of.values()]}

    def load_state_dict(self, state):
        self.of, self.rank = state["of"], state["again"][0][0]
        assert all(again is not None and again.shape == of.shape for (_, again), of in
                   zip(state["again"], self.of.values(), strict=True))

torch.manual_seed(3)
run = Run(checkpoint_every=3)
model = run.shard(torch.nn.Linear(4, 7), [])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
average = Average()
run.track(model=model, optimizer=optimizer, average=average)
for step in run.steps(3):
    loss = model(torch.ones(2, 4) + step).square().mean()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    average.update()
for (name, of), (_, parameter) in zip(average.of.items(), model.named_parameters(), strict=True):
    assert type(of) is type(parameter.data), (type(of), type(parameter.data))
    whole = of.full_tensor() if hasattr(of, "full_tensor") else of
    print("average", name, whole.tolist(), flush=True)
print("it is of rank", average.rank, flush=True)
"""


@pytest.mark.parametrize("there", ["lazily", "at once"])
def test_an_average_that_a_loop_keeps_of_its_shards_goes_on_with_them(
    workshop: Workshop, tmp_path: Path, there: str
) -> None:
    """A class of one's own that keeps what `parameter.detach().clone()` gives, which is in shards: each rank
    but the first wrote its piece once more, as its own, and no checkpoint could be loaded."""
    script = tmp_path / "averages.py"
    script.write_text(AVERAGES)
    seen = []
    for ranks in (2, 2, 3, 1) if there == "lazily" else (2, 2):
        gang = workshop.start(ranks=ranks, script=script, arguments=[there])
        assert gang.wait() == [0] * ranks, gang.texts()
        texts = [rank.text().splitlines() for rank in gang.ranks]
        seen += [[line for line in text if line.startswith("average")] for text in texts]
        assert [text[-1] for text in texts] == [
            f"it is of rank {rank if ranks == 2 else 0}" for rank in range(ranks)
        ]
    assert len(seen[0]) == 2
    assert all(one == seen[0] for one in seen)


CLASSES = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run()
model = run.shard(torch.nn.Linear(4, int(sys.argv[1])), [])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(2):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_shards_of_a_model_of_another_shape_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    """With one row on each rank, two classes were spread over six, each weight for three of them."""
    script = tmp_path / "classes.py"
    script.write_text(CLASSES)
    workshop.finish(ranks=2, script=script, arguments=["2"])
    gang = workshop.start(ranks=2, script=script, arguments=["6"])
    assert gang.wait() == [EXIT_CONFIG_ERROR] * 2, gang.texts()
    assert (
        "torch.Size([2, 4]) from checkpoint, the shape in current model is torch.Size([6, 4])" in gang.texts()
    )
