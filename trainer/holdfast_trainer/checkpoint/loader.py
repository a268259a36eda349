"""Resume: the newest checkpoint that every rank can verify, and why newer ones were passed over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..contract import RunDir
from . import manifest as manifests
from . import tensorfile
from .bucket import Location
from .errors import CheckpointError, ObjectStoreError
from .errors import WrongConfiguration as WrongConfiguration
from .manifest import BadManifest, Manifest
from .store import CheckpointStore, part_file
from .stores import open_store
from .tensorfile import UnreadableFile
from .tree import is_shard, unpack


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


def has_checkpoint(run: RunDir, attempt: int, gang: Agreement) -> bool:
    """Whether the run has any, usable or not. Collective; raises CheckpointError where nobody can look."""
    return bool(_all_steps(open_store(run, attempt), gang))


def load_newest(
    run: RunDir, attempt: int, gang: Agreement, config_hash: str = "", *, in_shards: bool = False
) -> tuple[Loaded | None, list[Skipped]]:
    """Collective. (None, []) where the run has no checkpoint yet.

    `in_shards`: the state is cut over the gang; of what was cut over as many ranks each keeps its own Piece.
    Raises CheckpointError where checkpoints exist and none can be used: starting over would lose
    work silently. Raises WrongConfiguration where the newest good one was written under another one.
    An object store that does not answer is no damage: that raises ObjectStoreError, on every rank.
    """
    store = open_store(run, attempt)
    skipped: list[Skipped] = []
    for step in _all_steps(store, gang):
        loaded, fault = _try(store, step, gang, in_shards=in_shards)
        faults = gang.gather(fault)
        for rank, unanswered in enumerate(faults):
            if isinstance(unanswered, ObjectStoreError):
                raise ObjectStoreError(f"step {step} cannot be loaded by rank {rank}: {unanswered}")
        first = next((f"rank {rank}: {f}" for rank, f in enumerate(faults) if f), None)
        if first is not None:
            skipped.append(Skipped(step, first))
            continue
        assert loaded is not None
        _check_config(store, loaded.manifest, config_hash)
        return loaded, skipped
    if skipped:
        reasons = "; ".join(f"step {s.step}: {s.reason}" for s in skipped)
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {store.place} can be used ({reasons}). "
            "Restore one from a backup, or remove the directory to start over"
        )
    return None, []


def _all_steps(store: CheckpointStore, gang: Agreement) -> list[int]:
    """As rank 0 sees them, the newest first. Collective; raises CheckpointError on every rank."""
    steps: list[int] | CheckpointError = gang.broadcast(_steps(store) if gang.rank == 0 else None)
    if isinstance(steps, CheckpointError):
        raise steps
    return steps


def _steps(store: CheckpointStore) -> list[int] | CheckpointError:
    try:
        return store.steps()
    except CheckpointError as error:
        return error


def _try(
    store: CheckpointStore, step: int, gang: Agreement, *, in_shards: bool
) -> tuple[Loaded | None, str | ObjectStoreError | None]:
    try:
        path = store.location(step)
        manifest = manifests.read(path)
        if manifest.step != step:
            return None, f"manifest of step {manifest.step} in {path.name}"
        rank = gang.rank if manifest.world_size == gang.world_size else None
        shared, own = read_state(path, manifest, rank, in_shards=in_shards, alone=gang.world_size == 1)
        return Loaded(manifest, shared, own), None
    except (BadManifest, UnreadableFile, KeyError) as error:
        return None, str(error)
    except ObjectStoreError as error:
        return None, error


def read_state(
    path: Location, manifest: Manifest, rank: int | None, *, in_shards: bool, alone: bool
) -> tuple[Any, Any | None]:
    """(what all ranks share, what `rank` had of its own), every block read and verified.

    What is shared lies in parts in the files of all ranks; rank 0's says how they fit together. `in_shards`:
    of what was cut only `rank`'s pieces are kept, where it had any. `rank` is None where nobody of then goes
    on. `alone`: no other process reads it now. Raises UnreadableFile, KeyError where a part is missing.
    """
    skeletons, shared, own = [], {}, None
    for number in range(manifest.world_size):
        name, mine = part_file(number), number == rank
        keeps = partial(_keeps, mine=mine, pieces=mine or rank is None or not in_shards)
        skeleton, tensors = tensorfile.read(path / name, manifest.files[name], alone=alone, wanted=keeps)
        skeletons.append(skeleton)
        if mine:
            own = unpack(skeleton["own"], tensors)
        shared.update({key: value for key, value in tensors.items() if key.startswith("shared.")})
    return unpack(skeletons[0]["shared"], shared), own


def _keeps(name: str, *, mine: bool, pieces: bool) -> bool:
    """Of a file that is this rank's own, or not; `pieces`: of what was cut, too."""
    return pieces or not is_shard(name) if name.startswith("shared.") else mine


def _check_config(store: CheckpointStore, manifest: Manifest, config_hash: str) -> None:
    if config_hash and manifest.config_hash and manifest.config_hash != config_hash:
        raise WrongConfiguration(
            f"{store.location(manifest.step)} was written under another configuration "
            f"({manifest.config_hash[:12]}, this is {config_hash[:12]}): its numbers would not continue. "
            "Use a new run directory, or go back to the configuration of the run"
        )
