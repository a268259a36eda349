"""The manifest: the one file whose presence makes a directory a checkpoint.

It names every file with its size and checksums, and carries a checksum over itself, so that a flipped bit
in it is found like one in the data. `digest` depends on the state alone (not on attempt, time or
host): two runs with equal digests hold equal bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ..contract import MANIFEST
from .bucket import Location
from .checksums import Written

VERSION = 3


class BadManifest(Exception):
    """Unreadable, torn or altered."""


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
    """What the numbers depend on besides the configuration: torch, device, threads."""
    losses: dict[str, float] = field(default_factory=dict)
    """Validation losses by step, of this and older checkpoints, as far as they were known."""

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
        body = {"version": VERSION, **dataclasses.asdict(self), "digest": self.digest}
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises BadManifest that says what is wrong."""
        try:
            body = json.loads(text)
            checksum = body.pop("checksum")
            version = body.pop("version")
            if checksum != _checksum({"version": version, **body}):
                raise BadManifest("its own checksum does not match: a bit has flipped or it was edited")
            if version != VERSION:
                raise BadManifest(f"version {version} is not {VERSION}: written by another Holdfast")
            body.pop("digest")
            body["files"] = {name: Written(**file) for name, file in body["files"].items()}
            manifest = cls(**body)
            if manifest.to_json() != text:  # 1e5 and 1E5 are one value and two texts
                raise BadManifest("it is not the text that was written: a bit has flipped or it was edited")
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadManifest(f"not a manifest: {error}") from error


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read(directory: Location) -> Manifest:
    """The manifest of a checkpoint directory. Raises BadManifest, also where there is none."""
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadManifest(f"{MANIFEST}: {error}") from error
    try:
        return Manifest.from_json(text)
    except BadManifest as error:
        raise BadManifest(f"{MANIFEST}: {error}") from error
