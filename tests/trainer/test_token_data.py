"""A run reads its batches; any rank, world size and step sees what it must, damage is named."""

from __future__ import annotations

import errno
import functools
import gc
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_trainer.data import DataError, TokenDataset
from holdfast_trainer.permutation import epoch_keys, permute
from holdfast_trainer.token_index import may_come

CONTEXT = 8
VOCABULARY = 1000


def write_shards(
    directory: Path, sizes: list[int], *, split: str = "train", vocab_size: int = VOCABULARY
) -> None:
    """Shards whose tokens count up from 0, so that a token tells its position."""
    directory.mkdir(exist_ok=True)
    stream = np.arange(sum(sizes), dtype="<u2") % vocab_size
    shards, start = [], 0
    for number, size in enumerate(sizes):
        content = stream[start : start + size].tobytes()
        start += size
        name = f"{split}-{number:05d}.bin"
        (directory / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        shards.append({"file": name, "split": split, "tokens": size, "bytes": 2 * size, "sha256": sha256})
    index = {"format": "holdfast-tokens/1", "dtype": "uint16", "vocab_size": vocab_size, "end_of_text": 0}
    (directory / "index.json").write_text(json.dumps({**index, "shards": shards}))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", [100, 37, 3, 262])
    return tmp_path / "data"


def open_data(path: Path, **options: object) -> TokenDataset:
    return TokenDataset(path, **{"context": CONTEXT, "vocab_size": VOCABULARY, **options})  # type: ignore[arg-type]


# ---------------------------------------------------------------- permutation


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
@settings(max_examples=60)
def test_every_epoch_visits_every_sample_once(size: int, seed: int, epoch: int) -> None:
    points = np.arange(size, dtype=np.uint64)
    visited = permute(points, epoch_keys(seed, np.full(size, epoch, dtype=np.uint64)), size)
    assert sorted(visited.tolist()) == list(range(size))


def test_orders_look_random_and_differ_between_seeds_and_epochs() -> None:
    size = 5000
    points = np.arange(size, dtype=np.uint64)
    orders = [
        permute(points, epoch_keys(seed, np.full(size, epoch, dtype=np.uint64)), size).astype(np.int64)
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    for number, order in enumerate(orders):
        # Correlation of a random permutation with its position is N(0, 1/n): 5 sigma.
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 5 / size**0.5
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / size**0.5
        for other in orders[:number]:
            assert (order == other).sum() < 12  # Poisson with mean 1


def test_small_permutations_are_all_about_equally_likely() -> None:
    count = 12000
    points = np.tile(np.arange(3, dtype=np.uint64), count)
    keys = epoch_keys(7, np.repeat(np.arange(count, dtype=np.uint64), 3))
    orders = Counter(map(tuple, permute(points, keys, 3).reshape(count, 3).tolist()))
    assert len(orders) == 6
    assert max(orders.values()) - min(orders.values()) < 0.15 * count / 6


def test_the_order_is_the_same_on_every_machine_for_ever() -> None:
    order = permute(np.arange(8, dtype=np.uint64), epoch_keys(1337, np.zeros(8, dtype=np.uint64)), 1000)
    assert order.tolist() == [712, 322, 728, 332, 821, 843, 995, 789]


# --------------------------------------------------------------------- batches


def test_a_batch_holds_whole_windows_and_their_targets_across_shards(prepared: Path) -> None:
    data = open_data(prepared, verify=True)
    assert (data.tokens, data.samples) == (402, 50)
    seen = []
    for step in range(10):
        tokens, targets = data.batch(seed=1, step=step, rank=0, world_size=1, global_batch=5)
        assert (tokens.shape, tokens.dtype, targets.dtype) == ((5, CONTEXT), torch.int64, torch.int64)
        assert torch.equal(targets, tokens + 1)
        assert torch.equal(tokens - tokens[:, :1], torch.arange(CONTEXT).expand(5, CONTEXT))
        seen += tokens[:, 0].tolist()
    assert sorted(seen) == [CONTEXT * n for n in range(50)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("step", [0, 3, 4, 10**12])
def test_any_world_size_sees_the_same_global_batch(prepared: Path, world_size: int, step: int) -> None:
    data = open_data(prepared)
    whole = data.batch(seed=5, step=step, rank=0, world_size=1, global_batch=12)
    parts = [
        data.batch(seed=5, step=step, rank=rank, world_size=world_size, global_batch=12)
        for rank in range(world_size)
    ]
    for index in (0, 1):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])


def test_an_epoch_ends_inside_a_batch_and_the_next_has_another_order(prepared: Path) -> None:
    data = open_data(prepared)
    epochs = [data.order(seed=3, first=n * 50, count=50).tolist() for n in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert data.order(seed=3, first=45, count=10).tolist() == epochs[0][45:] + epochs[1][:5]


def test_steps_in_any_order_have_the_batches_that_they_have_one_by_one(prepared: Path) -> None:
    """Windows are worked out for many steps at a time; validation asks for others in between."""
    data = open_data(prepared)
    asked = [(0, 1), (1, 1), (1, 2), (2, 1), (700, 1), (10**12, 1), (10**12 + 1, 1), (0, 1)]
    for step, seed in asked:
        for rank in (0, 1):
            said = {"seed": seed, "step": step, "rank": rank, "world_size": 2, "global_batch": 6}
            tokens, targets = data.batch(**said)
            windows = data.order(seed, step * 6 + rank * 3, 3).tolist()
            places = [[window * CONTEXT + at for at in range(CONTEXT + 1)] for window in windows]
            assert tokens.tolist() == [[place % VOCABULARY for place in row[:-1]] for row in places]
            assert targets.tolist() == [[place % VOCABULARY for place in row[1:]] for row in places]


def calls_of(work: Callable[[], object]) -> int:
    """How many functions were called, Python's and C's."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # finalizers of what others have left are not its work
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_batch_costs_the_same_work_wherever_the_run_stands(prepared: Path) -> None:
    """After 10^9 tokens, and after 10^15, as after a few: the position is a number, nothing is replayed."""
    most: list[int] = []
    for tokens in (10**3, 10**9, 10**15):
        first = tokens // (CONTEXT * 12)
        batch = functools.partial(open_data(prepared).batch, seed=7, rank=1, world_size=2, global_batch=12)
        counts = [calls_of(functools.partial(batch, step=first + step)) for step in range(20)]
        most.append(max(counts))
    assert max(most) <= 1.2 * most[0], f"function calls a batch: {most}"


def test_a_batch_that_can_not_be_is_refused(prepared: Path) -> None:
    data = open_data(prepared)
    for wrong in ({"rank": 2}, {"rank": -1}, {"step": -1}, {"global_batch": 5}, {"global_batch": 0}):
        with pytest.raises(ValueError, match="no batch for rank"):
            data.batch(**{"seed": 1, "step": 0, "rank": 0, "world_size": 2, "global_batch": 4, **wrong})


def test_the_identity_is_that_of_the_content(prepared: Path, tmp_path: Path) -> None:
    moved = prepared.rename(tmp_path / "moved")
    identity = open_data(moved).identity
    write_shards(tmp_path / "again", [100, 37, 3, 262])
    write_shards(tmp_path / "other", [100, 37, 3, 263])
    assert open_data(tmp_path / "again").identity == identity
    assert open_data(tmp_path / "other").identity != identity


# ----------------------------------------------------------------------- damage


def fault(path: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        open_data(path, **options)
    return str(caught.value)


def test_what_is_missing_is_named(prepared: Path) -> None:
    shard = prepared / "train-00002.bin"
    shard.unlink()
    assert f"shard {shard} is missing" in fault(prepared)
    (prepared / "index.json").unlink()
    assert "has no index.json: preparation did not finish; make it with: python -m" in fault(prepared)
    assert "does not exist; make it with" in fault(prepared / "nowhere")


def test_what_the_system_does_not_let_a_run_look_at_is_named(prepared: Path) -> None:
    """As in a directory of another user, which ended in a traceback of where that was met."""
    shard = prepared / "train-00002.bin"
    shard.unlink()
    shard.symlink_to(shard.name)
    assert f"shard {shard} cannot be read: Too many levels of symbolic links" in fault(prepared)
    nowhere = prepared / ("too-long" * 40)
    assert f"data {nowhere / 'index.json'} cannot be read: File name too long" in fault(nowhere)


def test_a_truncated_shard_is_named_with_its_sizes(prepared: Path) -> None:
    shard = prepared / "train-00003.bin"
    shard.write_bytes(shard.read_bytes()[:-3])
    assert f"shard {shard} has 521 bytes, expected 524" in fault(prepared)


def test_a_flipped_bit_is_found_by_verify(prepared: Path) -> None:
    shard = prepared / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    open_data(prepared)
    assert f"shard {shard} is damaged: its SHA-256 is" in fault(prepared, verify=True)


def test_a_disk_that_fails_while_it_is_verified_is_told_as_one(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a traceback, nor as data that no later attempt would find."""

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hashlib, "file_digest", failing)
    with pytest.raises(DataError, match=r"shard .*bin cannot be read: Input/output error") as told:
        open_data(prepared, verify=True)
    assert may_come(told.value)


def test_a_token_outside_of_the_vocabulary_never_reaches_the_model(prepared: Path) -> None:
    (prepared / "train-00003.bin").write_bytes(b"\xff" * 524)
    data = open_data(prepared)
    with pytest.raises(DataError, match="holds token 65535, and its vocabulary ends at 999"):
        data.batch(seed=1, step=0, rank=0, world_size=1, global_batch=50)


def test_a_vocabulary_larger_than_the_models_names_both(prepared: Path) -> None:
    message = fault(prepared, vocab_size=512)
    assert "a vocabulary of 1000 tokens, the model of 512: set model.vocab_size to at least 1000" in message


def test_too_little_text_for_one_window(prepared: Path) -> None:
    assert "has 402 tokens, and one sample needs 403" in fault(prepared, context=402)
    assert open_data(prepared, context=401).samples == 1
    message = fault(prepared, split="validation")
    assert "the validation split" in message
    assert "larger --validation-fraction" in message


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "holdfast-tokens/9"}'])
def test_a_damaged_index(prepared: Path, content: str) -> None:
    (prepared / "index.json").write_text(content)
    assert "index.json" in fault(prepared)
    assert f"remove {prepared}" in fault(prepared)
