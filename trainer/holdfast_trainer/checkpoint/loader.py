"""Resume: the newest checkpoint that every rank can verify, and why newer ones were passed over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..contract import RunDir
from . import manifest as manifests
from . import tensorfile
from .directory import CheckpointDirectory, CheckpointError, part_file
from .manifest import BadManifest, Manifest
from .tensorfile import UnreadableFile
from .tree import unpack


class Agreement(Protocol):
    """What loading needs of the gang: all ranks must take the same checkpoint."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""


class WrongConfiguration(CheckpointError):
    """The run directory belongs to another configuration: trying again cannot mend that."""


@dataclass(frozen=True)
class Loaded:
    """A verified state. `own` is None where the world size differs: that rank had no part then."""

    manifest: Manifest
    shared: Any
    own: Any | None


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was not used, and why."""

    step: int
    reason: str


def load_newest(
    run: RunDir, attempt: int, gang: Agreement, config_hash: str = ""
) -> tuple[Loaded | None, list[Skipped]]:
    """Collective. (None, []) where the run has no checkpoint yet.

    Raises CheckpointError where checkpoints exist and none can be used: starting over would lose
    work silently. Raises WrongConfiguration where the newest good one was written under another one.
    """
    directory = CheckpointDirectory(run, attempt)
    steps: list[int] = gang.broadcast(directory.steps() if gang.rank == 0 else None)
    skipped: list[Skipped] = []
    for step in steps:
        loaded, fault = _try(run, directory, step, gang)
        faults = gang.gather(fault)
        first = next((f"rank {rank}: {f}" for rank, f in enumerate(faults) if f), None)
        if first is not None:
            skipped.append(Skipped(step, first))
            continue
        assert loaded is not None
        _check_config(run, loaded.manifest, config_hash)
        return loaded, skipped
    if skipped:
        reasons = "; ".join(f"step {s.step}: {s.reason}" for s in skipped)
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {run.checkpoints} can be used ({reasons}). "
            "Restore one from a backup, or remove the directory to start over"
        )
    return None, []


def _try(
    run: RunDir, directory: CheckpointDirectory, step: int, gang: Agreement
) -> tuple[Loaded | None, str | None]:
    path = run.checkpoint(step)
    try:
        manifest = manifests.read(path)
        if manifest.step != step:
            return None, f"manifest of step {manifest.step} in {path.name}"
        shared, own = read_state(path, manifest, alone=gang.world_size == 1)
        same_world = manifest.world_size == gang.world_size
        return Loaded(manifest, shared, own[gang.rank] if same_world else None), None
    except (BadManifest, UnreadableFile, KeyError) as error:
        return None, str(error)


def read_state(path: Path, manifest: Manifest, *, alone: bool) -> tuple[Any, list[Any]]:
    """(what all ranks share, what each had of its own), every block read and verified.

    What is shared lies in parts in the files of all ranks; rank 0's says how they fit together.
    `alone`: no other process reads it now. Raises UnreadableFile, KeyError where a part is missing.
    """
    skeletons, shared, own = [], {}, []
    for rank in range(manifest.world_size):
        name = part_file(rank)
        skeleton, tensors = tensorfile.read(path / name, manifest.files[name], alone=alone)
        skeletons.append(skeleton)
        own.append(unpack(skeleton["own"], tensors))
        shared.update({key: value for key, value in tensors.items() if key.startswith("shared.")})
    return unpack(skeletons[0]["shared"], shared), own


def _check_config(run: RunDir, manifest: Manifest, config_hash: str) -> None:
    if config_hash and manifest.config_hash and manifest.config_hash != config_hash:
        raise WrongConfiguration(
            f"{run.checkpoint(manifest.step)} was written under another configuration "
            f"({manifest.config_hash[:12]}, this is {config_hash[:12]}): its numbers would not continue. "
            "Use a new run directory, or go back to the configuration of the run"
        )


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What bits depend on besides configuration and state; kept in the manifest."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"torch": torch.__version__, "device": kind, "threads": torch.get_num_threads()}
