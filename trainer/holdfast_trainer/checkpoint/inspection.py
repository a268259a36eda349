"""Checkpoints from outside of a run: list, verify, compare. Reads only; needs no fence and no gang.

A checkpoint is seen as named values. Tensors that all ranks share have one name wherever they lie
("shared.parts.model.weight"); what a rank has of its own is told by rank ("rank 1: own.rng.torch").
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..contract import MANIFEST, RunDir, is_directory
from . import manifest as manifests
from .bucket import Bucket, Location, ObjectPath, is_bucket
from .errors import CheckpointError
from .manifest import BadManifest, Manifest, OtherVersion
from .scan import Bytes, scan, size_of
from .store import Entry
from .stores import open_store
from .tensorfile import UnreadableFile, verify
from .tree import unpack

_PART = re.compile(r"rank-(\d+)\.safetensors")
SHARED = "shared"
OTHER_VERSION = "other version"


@dataclass(frozen=True)
class Listed:
    """One directory of `checkpoints/`; figures are None where no sound manifest gives them."""

    name: str
    step: int
    state: str
    """good (manifest sound, sizes right; contents not read) | damaged | unfinished | other version, which is
    not read here"""
    attempt: int | None = None
    world_size: int | None = None
    bytes: int | None = None
    age_seconds: float | None = None
    digest: str | None = None
    reason: str = ""


def open_run(text: str) -> RunDir:
    """The run that `text` names, a directory or s3://BUCKET/PREFIX. Raises CheckpointError where none is."""
    if is_bucket(text):
        run = RunDir(Path(), Bucket(text).url)
        if not list(open_store(run, 0).entries()):
            raise CheckpointError(f"{text} has no checkpoints/ below it, so it is no run that saved")
        return run
    path = Path(text)
    if not is_directory(path):
        raise CheckpointError(f"{path} is no directory; name a run directory, such as ./holdfast-run")
    if not is_directory(path / "checkpoints"):
        raise CheckpointError(f"{path} has no checkpoints/ in it, so it is no run directory that saved")
    return RunDir(path)


def listing(run: RunDir) -> list[Listed]:
    """Newest first; what is no checkpoint and no rest of one is left out, and what is removed meanwhile."""
    before = committed(run)
    found = [_describe(entry) for entry in open_store(run, 0).entries()]
    if any(item.state == "damaged" for item in found):
        gone = before - committed(run)
        found = [item for item in found if item.state != "damaged" or item.step not in gone]
    return sorted(found, key=lambda item: (item.step, item.name), reverse=True)


def committed(run: RunDir) -> set[int]:
    """Steps that have a checkpoint now. A job may be running, which removes old ones while others read them:
    what is missing of such a one is no damage."""
    return set(open_store(run, 0).steps())


def _describe(entry: Entry) -> Listed:
    step, location = entry.step, entry.location
    if location is None:
        return Listed(entry.name, step, "unfinished", attempt=entry.attempt, reason="never committed")
    try:
        manifest = manifests.read(location)
    except OtherVersion as error:
        return Listed(entry.name, step, OTHER_VERSION, reason=str(error))
    except BadManifest as error:
        return Listed(entry.name, step, "damaged", reason=str(error))
    fault = (
        f"its manifest is of step {manifest.step}"
        if manifest.step != step
        else _wrong_size(location, manifest)
    )
    return Listed(
        entry.name,
        step,
        "damaged" if fault else "good",
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        bytes=manifest.size,
        age_seconds=max(0.0, time.time() - manifest.time),
        digest=manifest.digest,
        reason=fault,
    )


def _wrong_size(path: Location, manifest: Manifest) -> str:
    for name in sorted(manifest.files):
        try:
            size = size_of(path / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != manifest.files[name].size:
            return f"{name} has {size} bytes, its manifest says {manifest.files[name].size}"
    return ""


def faults(run: RunDir, step: int) -> list[str]:
    """What is wrong with a checkpoint, each file named; [] where every byte is as written.

    Raises OtherVersion where only another Holdfast can tell.
    """
    path = open_store(run, 0).location(step)
    try:
        manifest = manifests.read(path)
    except OtherVersion:
        raise
    except BadManifest as error:
        return [str(error)]
    found = []
    if manifest.step != step:
        found.append(_other_step(path, manifest))
    for name in sorted(manifest.files):
        try:
            verify(path / name, manifest.files[name])
        except UnreadableFile as error:
            found.append(str(error))
    return found


def _other_step(path: Location, manifest: Manifest) -> str:
    return f"{MANIFEST}: of step {manifest.step}, in {path.name}"


def choose(run: RunDir, step: int | None) -> int:
    """`step`, or the newest one. Raises CheckpointError naming those there are."""
    store = open_store(run, 0)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{store.place} holds no checkpoint")
    if step is None:
        return steps[0]
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise CheckpointError(
            f"{run.objects or run.path} has no checkpoint of step {step}; there are {there}"
        )
    return step


class Opened:
    """The values of one checkpoint, verified first, read when asked for. Use as a context manager."""

    def __init__(self, run: RunDir, step: int) -> None:
        """Raises CheckpointError where a file cannot be used or a byte of it is not as it was written."""
        self.path = open_store(run, 0).location(step)
        self._stack = ExitStack()
        self._places: dict[str, tuple[Any, str]] = {}
        self._skeletons: dict[int, Any] = {}
        self._pieces: dict[str, list[str]] = {}
        """Of each tensor that is written in pieces, by each rank its own, their names in order."""
        try:
            with ExitStack() as undo:
                undo.callback(self._stack.close)
                self._read(step)
                undo.pop_all()
        except OtherVersion as error:
            raise CheckpointError(f"{self.path} cannot be read here: {error}") from error
        except (BadManifest, UnreadableFile, OSError, SafetensorError, KeyError, ValueError) as error:
            if step not in committed(run):
                raise CheckpointError(f"step {step} was removed by the run meanwhile. Ask again") from error
            raise CheckpointError(f"{self.path} is bad: {error}. Name another step") from error

    def _read(self, step: int) -> None:
        self.manifest = manifests.read(self.path)
        if self.manifest.step != step:
            raise BadManifest(_other_step(self.path, self.manifest))
        for name in sorted(self.manifest.files):
            self._open(name)
        for names in _cut(self._skeletons[0]):
            self._pieces[names[0].rpartition("@")[0]] = names

    def _open(self, name: str) -> None:
        match = _PART.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is no rank's file")
        rank = int(match[1])
        file = self._stack.enter_context(safe_open(self._local(name), framework="pt"))
        self._skeletons[rank] = json.loads(file.metadata()["holdfast"])
        for key in file.keys():  # noqa: SIM118
            shared = key.startswith(f"{SHARED}.")
            self._places[key if shared else f"rank {rank}: {key}"] = (file, key)

    def _local(self, name: str) -> Path:
        """The file itself, or a copy of the object that lasts as long as this; either is verified."""
        location = self.path / name
        expected = self.manifest.files[name]
        if not isinstance(location, ObjectPath):
            verify(location, expected)
            return location
        copy = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))) / name
        with open(copy, "wb") as file:

            def put(offset: int, data: Bytes) -> None:
                os.pwrite(file.fileno(), data.data, offset)

            scan(location, expected.size, expected, put, alone=True)
        return copy

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def tensors(self) -> list[str]:
        """Names of all tensors, sorted; of whole ones, also where they are in pieces."""
        pieces = {name for names in self._pieces.values() for name in names}
        return sorted((self._places.keys() - pieces) | self._pieces.keys())

    def tensor(self, name: str) -> torch.Tensor:
        if name in self._pieces:
            return torch.cat([self.tensor(piece) for piece in self._pieces[name]])
        file, key = self._places[name]
        found: torch.Tensor = file.get_tensor(key)
        return found

    def shared(self) -> dict[str, Any]:
        """The state that all ranks share: {"step", "parts": {name: state_dict}, "versions": of modules}."""
        tensors = _Lazy({n: (self, n) for n in self._places if n.startswith(f"{SHARED}.")})
        state: dict[str, Any] = unpack(self._skeletons[0][SHARED], tensors)
        return state

    def plain_values(self) -> dict[str, Any]:
        """Numbers, strings and such, by name."""
        found: dict[str, Any] = {}
        for rank, skeleton in self._skeletons.items():
            for name, value in _leaves(skeleton, ""):
                found[name if name.startswith(f"{SHARED}.") else f"rank {rank}: {name}"] = value
        return found


class _Lazy(dict[str, Any]):
    """Tensors by name, read as `unpack` reaches them."""

    def __getitem__(self, name: str) -> Any:
        opened, key = super().__getitem__(name)
        return opened.tensor(key)


def _cut(skeleton: Any) -> Iterator[list[str]]:
    """The names of the pieces of each tensor that is in pieces."""
    if isinstance(skeleton, dict) and skeleton.keys() == {"$shards"}:
        yield skeleton["$shards"]
    elif isinstance(skeleton, dict | list):
        for value in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _cut(value)


def _leaves(skeleton: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(skeleton, dict):
        if len(skeleton) == 1:
            tag, body = next(iter(skeleton.items()))
            if tag in ("$tensor", "$shards", "$elsewhere", "$array"):
                return
            if tag == "$tuple":
                yield from _leaves(body, path)
                return
            if tag == "$dict":
                for key, value in body:
                    yield from _leaves(value, f"{path}.{key}" if path else str(key))
                return
        for key, value in skeleton.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(skeleton, list):
        for index, value in enumerate(skeleton):
            yield from _leaves(value, f"{path}.{index}" if path else str(index))
    else:
        yield path, skeleton


# ------------------------------------------------------------------------ diff


@dataclass(frozen=True)
class Difference:
    """One name at which two checkpoints part."""

    name: str
    what: str
    max_abs: float | None = None
    """Largest absolute difference of two tensors of one shape and type; None where there is no such
    number: other values, infinities, NaN."""


def differences(left: Opened, right: Opened) -> list[Difference]:
    """Where two states part: missing values, other shapes, other bits. What ranks share comes first."""
    found = _missing(set(left.tensors), set(right.tensors))
    for name in sorted(set(left.tensors) & set(right.tensors)):
        if difference := _compare(name, left.tensor(name), right.tensor(name)):
            found.append(difference)
    mine, theirs = left.plain_values(), right.plain_values()
    found += _missing(set(mine), set(theirs))
    # repr: 0.0 and -0.0, 1 and True, nan and nan
    for name in sorted(set(mine) & set(theirs)):
        if repr(mine[name]) != repr(theirs[name]):
            found.append(Difference(name, f"{mine[name]!r} / {theirs[name]!r}"))
    return sorted(found, key=lambda difference: not difference.name.startswith(f"{SHARED}."))


def _missing(left: set[str], right: set[str]) -> list[Difference]:
    return [
        Difference(n, "only in the first" if n in left else "only in the second")
        for n in sorted(left ^ right)
    ]


def _compare(name: str, left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    if left.dtype != right.dtype or left.shape != right.shape:
        return Difference(name, f"{_kind(left)} / {_kind(right)}")
    if torch.equal(_bits(left), _bits(right)):
        return None
    exact = torch.complex128 if left.is_complex() else torch.float64
    gap: float = (left.to(exact) - right.to(exact)).abs().max().item()
    count = int((_bits(left) != _bits(right)).reshape(left.numel(), -1).any(1).sum())
    what = f"{count} of {left.numel()} elements differ"
    return Difference(name, what, gap if math.isfinite(gap) else None)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
