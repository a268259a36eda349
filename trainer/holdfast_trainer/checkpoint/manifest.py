"""The manifest: the one file whose presence makes a directory a checkpoint.

It names every file with its size and checksums, and carries a checksum over itself, so that a flipped bit
in it is found like one in the data. `digest` depends on the state alone (not on attempt, time or
host): two runs with equal digests hold equal bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract import MANIFEST
from .bucket import Location
from .checksums import Written
from .errors import not_looked_at

PLAIN, APART, CLEARED = 3, 4, 5
"""A later one is written where the state holds what a reader of the one before would pass over, and go on
with other bits: APART for gradients that still add up, buffers with which each rank goes on by itself and
numbers of a type of numpy's, CLEARED for gradients that are cleared in place. Else PLAIN, so that an older
Holdfast resumes."""


class BadManifest(Exception):
    """Unreadable, torn or altered."""


class OtherVersion(BadManifest):
    """Whole, and of a version that is not read here."""


@dataclass(frozen=True)
class Manifest:
    step: int
    attempt: int
    world_size: int
    config_hash: str
    files: dict[str, Written]
    time: float
    """Seconds since the epoch."""
    environment: dict[str, Any] = field(default_factory=dict)
    """What the numbers depend on besides the state: torch, device, threads; and what `config_hash` is of."""
    losses: dict[str, float] = field(default_factory=dict)
    """Validation losses by step, of this and older checkpoints, as far as they were known."""
    version: int = PLAIN

    @property
    def digest(self) -> str:
        """SHA-256 over names and checksums of all files: equal digests, equal state of every rank."""
        lines = "".join(f"{name} {self.files[name].digest}\n" for name in sorted(self.files))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def to_json(self) -> str:
        told = dataclasses.asdict(self)
        body = {"version": told.pop("version"), **told, "digest": self.digest}
        return _text(body)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises BadManifest that says what is wrong."""
        try:
            body = json.loads(text)
            checksum = body.pop("checksum")
            if checksum != _checksum(body):
                raise BadManifest("its own checksum does not match: a bit has flipped or it was edited")
            if (version := body["version"]) not in (PLAIN, APART, CLEARED):
                raise OtherVersion(
                    f"version {version} is none of {PLAIN} to {CLEARED}: written by another Holdfast"
                )
            if _text(body) != text:  # 1e5 and 1E5 are one value and two texts
                raise BadManifest("it is not the text that was written: a bit has flipped or it was edited")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadManifest(f"not a manifest: {error}") from error
        # What is wrong from here on was written so: the first of version 3 had no losses, a later Holdfast's
        # may have what nobody here knows.
        try:
            body.pop("digest")
            body["files"] = {name: Written(**file) for name, file in body["files"].items()}
            return cls(**body)
        except (KeyError, TypeError, AttributeError) as error:
            raise OtherVersion(f"whole, but written by another Holdfast: {error}") from error


def version_of(skeleton: Any) -> int:
    """The one to write for what rank 0 packed (tree.py): its `shared`, and its own."""
    shared = skeleton.get("shared")
    shared = shared if isinstance(shared, dict) else {}
    if _holds(shared.get("gradients", {}), lambda part: part is None):
        return CLEARED
    goes_on = not shared.keys().isdisjoint(("gradients", "buffers_apart"))
    scalars = _holds(skeleton, lambda part: isinstance(part, dict) and "$scalar" in part)
    return APART if goes_on or scalars else PLAIN


def _holds(skeleton: Any, what: Callable[[Any], bool]) -> bool:
    parts = (
        skeleton.values() if isinstance(skeleton, dict) else skeleton if isinstance(skeleton, list) else ()
    )
    return what(skeleton) or any(_holds(part, what) for part in parts)


def _text(body: dict[str, Any]) -> str:
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read(directory: Location) -> Manifest:
    """The manifest of a checkpoint directory. Raises BadManifest, also where there is none, CheckpointError
    where nobody can look."""
    try:
        return _read(directory)
    except BadManifest:
        if isinstance(directory, Path):
            raise
        return _read(directory)  # a bit may have flipped on its way here


def _read(directory: Location) -> Manifest:
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except OSError as error:
        raise not_looked_at(directory / MANIFEST, error) or BadManifest(f"{MANIFEST}: {error}") from error
    except UnicodeDecodeError as error:
        raise BadManifest(f"{MANIFEST}: {error}") from error
    try:
        return Manifest.from_json(text)
    except BadManifest as error:
        raise type(error)(f"{MANIFEST}: {error}") from error
