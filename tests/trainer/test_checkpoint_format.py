"""A state taken apart, written, read and put together is the same state; damage is found and named."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from holdfast_trainer import contract
from holdfast_trainer.checkpoint import manifest as manifests
from holdfast_trainer.checkpoint import rng, tensorfile
from holdfast_trainer.checkpoint.cadence import Cadence, young_interval
from holdfast_trainer.checkpoint.errors import UnsupportedState
from holdfast_trainer.checkpoint.manifest import BadManifest, Manifest, OtherVersion
from holdfast_trainer.checkpoint.spread import Spread
from holdfast_trainer.checkpoint.tensorfile import DTYPES, UnreadableFile, Written
from holdfast_trainer.checkpoint.tree import pack, unpack

# ------------------------------------------------------------------------ trees


def same(left: Any, right: Any) -> bool:
    """Equal in type and in every bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and tensorfile.bytes_of(left) == tensorfile.bytes_of(right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right) or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


arrays = st.builds(
    lambda values, dtype: np.array(values, dtype=dtype),
    st.lists(st.integers(0, 100), max_size=4) | st.integers(0, 9),
    st.sampled_from(["u1", "i2", "u4", "i8", "f4", "f8", "?"]),
)
names = st.sampled_from(
    ["a", "b", "a.b", "a.b.c", "", "$tensor", "$dict", "__metadata__", "ü", "\ud800"]
) | st.text(max_size=3)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | names
    | tensors()
    | arrays
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(names | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(trees)
def test_a_state_survives_its_file(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("state") / "rank-0.safetensors"
    skeleton, parts = pack(state)
    tensorfile.write(path, skeleton, parts)
    assert same(unpack(*tensorfile.read(path)), state)


def test_two_tensors_of_one_path_are_both_kept() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0), "1": torch.ones(2)}
    assert same(unpack(*pack(state)), state)


def test_arrays_that_torch_cannot_share_are_kept_by_value() -> None:
    frozen = np.arange(3)
    frozen.setflags(write=False)
    state = {"reversed": np.arange(3)[::-1], "frozen": frozen, "foreign": np.array([1, 2], dtype=">i4")}
    back = unpack(*pack(state))
    assert [array.tolist() for array in back.values()] == [[2, 1, 0], [0, 1, 2], [1, 2]]


def test_an_array_is_not_copied_before_it_is_staged() -> None:
    """A replay buffer of some gigabytes held the training up for seconds more, and doubled its memory."""
    replay = np.zeros((4, 3), dtype=np.float32)
    for array in (replay, replay[:, 1:]):
        (tensor,) = pack({"replay": array})[1].values()
        assert tensor.data_ptr() == array.ctypes.data
        assert tensor.shape == array.shape


def test_a_tensor_of_which_memory_has_the_conjugate_is_kept_by_value(tmp_path: Path) -> None:
    """A filter in the frequency domain, as torch makes one: a large one ended the job at its first save."""
    weight = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    skeleton, parts = pack({"weight": weight, "negative": torch._neg_view(torch.ones(2))})
    tensorfile.write(tmp_path / "file", skeleton, parts)
    back = unpack(*tensorfile.read(tmp_path / "file"))
    assert (back["weight"].tolist(), back["negative"].tolist()) == ([1 - 2j, 3 + 4j], [-1, -1])


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64(0.1),
        np.float16(3),
        np.int64(-5),
        np.uint8(7),
        np.bool_(True),
        np.float32("inf"),
    ],
)
def test_a_number_of_numpys_keeps_its_type(tmp_path: Path, value: np.generic) -> None:
    """A mean of losses in float32 that goes on as Python's float is rounded otherwise from then on; and so is
    an array of float32 that is multiplied by one in float64."""
    skeleton, parts = pack({"mean": value})
    tensorfile.write(tmp_path / "file", skeleton, parts)
    back = unpack(*tensorfile.read(tmp_path / "file"))["mean"]
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.datetime64(1, "s"), "optimizer.x: a datetime64 cannot be saved; keep tensors, numbers"),
        (object(), "optimizer.x: a object cannot be saved; keep tensors, numbers, strings, lists and dicts"),
        ({(1, 2): 3}, "optimizer.x: key (1, 2) is a tuple, not str or int"),
        (np.array(["a"], dtype=object), "optimizer.x: a numpy array of object cannot be saved"),
        (np.ma.masked_less(np.arange(2.0), 1), "optimizer.x: a masked array cannot be saved; keep its data"),
        (torch.zeros(2, dtype=torch.complex128), "optimizer.x: a torch.strided tensor of torch.complex128"),
        (torch.zeros(2, 2).to_sparse(), "optimizer.x: a torch.sparse_coo tensor of torch.float32"),
        (torch.zeros(2, device="meta"), "optimizer.x: a tensor on the meta device has no values"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, message: str) -> None:
    with pytest.raises(UnsupportedState) as raised:
        pack({"optimizer": {"x": value}})
    assert message in str(raised.value)


# ----------------------------------------------------------------- tensor files


def test_of_a_file_only_what_is_wanted_is_kept_and_all_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {name: torch.randn(5000, 300) for name in ("a", "b", "c")} | {"none": torch.empty(0)}
    written = tensorfile.write(path, None, tensors)
    _, kept = tensorfile.read(path, written, wanted=lambda name: name in ("b", "none"))
    assert same(dict(sorted(kept.items())), {"b": tensors["b"], "none": tensors["none"]})
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UnreadableFile, match="checksum"):
        tensorfile.read(path, written, wanted=lambda name: name == "a")


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"w": torch.randn(3, 4), "b": torch.tensor(2.5, dtype=torch.bfloat16), "e": torch.empty(0, 7)}
    skeleton, parts = pack(tensors)
    written = tensorfile.write(path, skeleton, parts)
    assert written.size == path.stat().st_size
    assert same(dict(sorted(load_file(path).items())), dict(sorted(tensors.items())))
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)


def test_one_state_has_one_text(tmp_path: Path) -> None:
    state = {"a": torch.arange(5), "n": [1, 2.5, None]}
    first = tensorfile.write(tmp_path / "1", *pack(state))
    second = tensorfile.write(tmp_path / "2", *pack({"a": torch.arange(5), "n": [1, 2.5, None]}))
    assert first == second
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.safetensors"
    written = tensorfile.write(path, *pack({"w": torch.ones(100)}))
    whole = path.read_bytes()
    tensorfile.verify(path, written)

    path.write_bytes(whole[:-1])
    with pytest.raises(UnreadableFile, match=r"rank-3.safetensors has \d+ bytes, its manifest says \d+"):
        tensorfile.verify(path, written)
    with pytest.raises(UnreadableFile, match=r"rank-3\.safetensors"):
        tensorfile.read(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UnreadableFile, match=r"rank-3\.safetensors: checksum"):
        tensorfile.verify(path, written)
    path.unlink()
    with pytest.raises(UnreadableFile, match=r"rank-3\.safetensors: No such file"):
        tensorfile.verify(path, written)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UnreadableFile, match=r"rank-3\.safetensors"):
        tensorfile.read(path)


# -------------------------------------------------------------------- manifests

MANIFEST = Manifest(
    step=1_200,
    attempt=3,
    world_size=2,
    config_hash="c0ffee",
    files={f"rank-{rank}.safetensors": Written(12345, "ab" * 32) for rank in range(2)},
    time=1760000000.123456,
    environment={"torch": "2.15.0", "device": "cpü", "threads": 1, "small": 1e-07},
)


@pytest.mark.parametrize("blocks", [1, 3])
def test_memory_of_what_could_not_be_read_is_free_for_the_checkpoint_before_it(blocks: int) -> None:
    """At once, and not when Python collects garbage: the two may not fit beside each other."""

    def read_into(memory: torch.Tensor) -> None:
        def block(number: int) -> None:
            raise UnreadableFile(f"block {number} of {len(memory)} bytes")

        Spread(block, blocks, name="read").finish()

    memory = torch.empty(8)
    there = weakref.ref(memory)
    gc.disable()
    try:
        with contextlib.suppress(UnreadableFile):
            read_into(memory)
        del memory
        assert there() is None
    finally:
        gc.enable()


def test_a_manifest_reads_back() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    whole = MANIFEST.to_json().encode()
    for index in range(len(whole)):
        for bit in range(8):
            text = (whole[:index] + bytes([whole[index] ^ 1 << bit]) + whole[index + 1 :]).decode("latin-1")
            with pytest.raises(BadManifest):
                Manifest.from_json(text)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    whole = MANIFEST.to_json().encode()
    path = tmp_path / contract.MANIFEST
    with pytest.raises(BadManifest, match=r"manifest\.json: .*No such file"):
        manifests.read(tmp_path)
    path.write_bytes(whole.replace(b'"attempt": 3', b'"attempt": 2'))
    with pytest.raises(BadManifest, match=r"manifest\.json: its own checksum does not match"):
        manifests.read(tmp_path)
    path.write_bytes(whole.replace(b"1e-07", b"1E-07"))
    with pytest.raises(BadManifest, match=r"manifest\.json: it is not the text that was written"):
        manifests.read(tmp_path)
    path.write_bytes(b"\xff" + whole)
    with pytest.raises(BadManifest, match=r"manifest\.json: .*codec can't decode"):
        manifests.read(tmp_path)


@pytest.mark.parametrize("text", ["0", "null", "[1]", "{}", '"text"', "[" * 100_000])
def test_what_is_json_and_no_manifest_is_named(text: str) -> None:
    with pytest.raises(BadManifest, match="not a manifest"):
        Manifest.from_json(text)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_torn_manifest_is_found(length: int) -> None:
    with pytest.raises(BadManifest):
        Manifest.from_json(MANIFEST.to_json()[:length])


def written_with(**changes: object) -> str:
    """A manifest as another Holdfast writes it; what is None it does not have."""
    body = {**json.loads(MANIFEST.to_json()), **changes}
    del body["checksum"]
    return manifests._text({key: value for key, value in body.items() if value is not None})


def test_a_manifest_of_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(OtherVersion, match="version 7 is none of 3 to 5: written by another Holdfast"):
        Manifest.from_json(written_with(version=7))


def test_a_manifest_that_another_holdfast_wrote_is_not_called_damaged() -> None:
    """A run that was begun in the first hour of version 3, when no manifest had losses, went on from an
    older checkpoint and removed it, as it was said that a bit had flipped."""
    assert Manifest.from_json(written_with(losses=None)) == MANIFEST
    told = "whole, but written by another Holdfast: .*'from_the_future'"
    with pytest.raises(OtherVersion, match=told):
        Manifest.from_json(written_with(from_the_future=1))
    for missing in ("digest", "files", "config_hash"):
        with pytest.raises(OtherVersion, match="whole, but written by another Holdfast"):
            Manifest.from_json(written_with(**{missing: None}))


def test_the_digest_is_of_the_state_alone() -> None:
    import dataclasses

    later = dataclasses.replace(MANIFEST, time=1.0, attempt=9, environment={})
    assert later.digest == MANIFEST.digest
    files = {**MANIFEST.files, "rank-1.safetensors": Written(12345, "cd" * 32)}
    two = dataclasses.replace(MANIFEST, files=files)
    assert two.digest != MANIFEST.digest
    in_the_order_that_ranks_came = dict(reversed(files.items()))
    assert dataclasses.replace(MANIFEST, files=in_the_order_that_ranks_came).digest == two.digest
    exchanged = dict(zip(files, reversed(files.values()), strict=True))
    assert dataclasses.replace(MANIFEST, files=exchanged).digest != two.digest, "each rank has the other's"


# ------------------------------------------------------------- random, cadence


def test_random_state_survives() -> None:
    import random

    rng.seed_all(5, rank=2)
    state = unpack(*pack(rng.capture()))
    first = (random.random(), float(np.random.rand()), float(torch.rand(())))
    rng.restore(state)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == first
    rng.seed_all(5, rank=1)
    assert random.random() != first[0]


@pytest.mark.parametrize(
    ("text", "cadence"),
    [("auto", Cadence()), ("500", Cadence(steps=500)), (7, Cadence(steps=7)), ("90s", Cadence(seconds=90.0))],
)
def test_cadence(text: str | int, cadence: Cadence) -> None:
    assert Cadence.parse(text) == cadence


@pytest.mark.parametrize("text", ["0", "-5", "5m", "", "often", "1.5s"])
def test_a_wrong_cadence_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is none of: auto, a number of steps") as raised:
        Cadence.parse(text)
    assert repr(text) in str(raised.value)


def test_when_a_save_is_due() -> None:
    assert [step for step in range(1, 11) if Cadence(steps=4).due_at_step(step)] == [4, 8]
    besides = Cadence(seconds=5, besides=(6, 0, 4))
    assert [step for step in range(1, 13) if besides.due_at_step(step)] == [4, 6, 8, 12]
    assert not any(Cadence(besides=(0, 0)).due_at_step(step) for step in range(1, 13))
    assert not Cadence(steps=4).due_after(1e9, 1.0)
    assert Cadence(seconds=5).due_after(5.0, None)
    assert not Cadence(seconds=5).due_after(4.9, None)
    assert young_interval(None, 7200) == 10.0
    assert young_interval(0.5, 7200) == pytest.approx(math.sqrt(7200))
    assert (young_interval(1e-9, 7200), young_interval(1e6, 7200)) == (10.0, 900.0)
