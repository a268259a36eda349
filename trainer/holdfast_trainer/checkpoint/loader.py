"""Resume: the newest checkpoint that every rank can verify, and why newer ones were passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..contract import RunDir
from . import manifest as manifests
from . import tensorfile
from .bucket import Location
from .configuration import other_configuration
from .errors import CheckpointError, StorageUnavailable, may_pass, not_given
from .errors import WrongConfiguration as WrongConfiguration
from .manifest import BadManifest, Manifest, OtherVersion
from .store import CheckpointStore, part_file
from .stores import open_store
from .tensorfile import UnreadableFile
from .tree import is_shard, rows_wanted, unpack


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


class _NotGiven(str):
    """Why a checkpoint cannot be used, where its bytes may be sound and were not given this time."""


def has_checkpoint(run: RunDir, attempt: int, gang: Agreement) -> bool:
    """Whether the run has any, usable or not. Collective; raises CheckpointError where nobody can look."""
    return bool(_all_steps(open_store(run, attempt), gang))


def load_newest(
    run: RunDir,
    attempt: int,
    gang: Agreement,
    config_hash: str = "",
    configuration: Mapping[str, Any] | None = None,
    *,
    in_shards: bool = False,
) -> tuple[Loaded | None, list[Skipped]]:
    """Collective. (None, []) where the run has no checkpoint yet.

    `in_shards`: the state is cut over the gang, and of what was saved in shards each keeps its own Piece, by
    however many ranks it was saved. `configuration`: what `config_hash` is of, for its message.
    Raises CheckpointError where checkpoints exist and none can be used: starting over would lose
    work silently. Raises WrongConfiguration where the newest good one was written under another one, or by a
    Holdfast whose checkpoints are not read here: it is no damaged one, and to go back would lose its work.
    An object store that does not answer is no damage, nor is a file that the system does not let us read, or
    that is whole and finds no memory: that raises ObjectStoreError or CheckpointError, on every rank. Nor are
    bytes that were not given (EIO), until those of an older checkpoint were: then all are asked for again,
    and what is still not given is lost. Where none are given, that raises StorageUnavailable.
    """
    store = open_store(run, attempt)
    loaded, skipped, not_all_given = _newest(store, gang, in_shards=in_shards)
    if loaded is not None and not_all_given:
        loaded = None  # its memory is wanted
        loaded, skipped, not_all_given = _newest(store, gang, in_shards=in_shards)
    if loaded is not None:
        _check_config(store, loaded.manifest, config_hash, configuration or {})
    if loaded is not None or not skipped:
        return loaded, skipped
    reasons = "; ".join(f"step {s.step}: {s.reason}" for s in skipped)
    none = f"none of the {len(skipped)} checkpoints in {store.place} can be used ({reasons}). "
    if not_all_given:
        raise StorageUnavailable(
            f"{none}The server of their mount does not answer, or their disk fails: see to that. If it has "
            "lost them, restore one from a backup, or remove the directory to start over"
        )
    raise CheckpointError(f"{none}Restore one from a backup, or remove the directory to start over")


def _newest(
    store: CheckpointStore, gang: Agreement, *, in_shards: bool
) -> tuple[Loaded | None, list[Skipped], bool]:
    """What `load_newest` returns, and whether any was passed over as its bytes were not given."""
    skipped, not_all_given = list[Skipped](), False
    for step in _all_steps(store, gang):
        loaded, fault = _try(store, step, gang, in_shards=in_shards)
        faults = gang.gather(fault)
        for rank, unanswered in enumerate(faults):
            if isinstance(unanswered, CheckpointError):
                raise type(unanswered)(f"step {step} cannot be loaded by rank {rank}: {unanswered}")
        other = next((fault for fault in faults if isinstance(fault, OtherVersion)), None)
        if other is not None:
            raise WrongConfiguration(
                f"{store.location(step)} cannot be read here: {other}. Run that one, or remove this "
                "checkpoint to go on from the one before it"
            )
        first = next((f"rank {rank}: {f}" for rank, f in enumerate(faults) if f), None)
        if first is not None:
            skipped.append(Skipped(step, first))
            not_all_given = not_all_given or any(isinstance(fault, _NotGiven) for fault in faults)
            continue
        assert loaded is not None
        return loaded, skipped, not_all_given
    return None, skipped, not_all_given


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
    except OSError as error:
        kind = StorageUnavailable if may_pass(error) else CheckpointError
        return kind(f"the checkpoints in {store.place} cannot be listed: {error}")


def _try(
    store: CheckpointStore, step: int, gang: Agreement, *, in_shards: bool
) -> tuple[Loaded | None, str | CheckpointError | OtherVersion | None]:
    try:
        path = store.location(step)
        manifest = manifests.read(path)
        if manifest.step != step:
            return None, f"manifest of step {manifest.step} in {path.name}"
        shared, own = read_state(path, manifest, gang.rank, gang.world_size, in_shards=in_shards)
        return Loaded(manifest, shared, own), None
    except (CheckpointError, OtherVersion) as error:
        return None, error
    except (BadManifest, UnreadableFile, KeyError) as error:
        return None, _NotGiven(error) if not_given(error) else str(error)


def read_state(
    path: Location, manifest: Manifest, rank: int, world_size: int, *, in_shards: bool
) -> tuple[Any, Any | None]:
    """(what all ranks share, what `rank` had of its own), every block read and verified.

    What is shared lies in parts in the files of all ranks; rank 0's says how they fit together. `in_shards`:
    of what was cut only the rows are kept that `rank` of `world_size` gets. The second is None where the
    number of ranks is another one. Raises UnreadableFile, KeyError where a part is missing.
    """
    files = [(number, part_file(number)) for number in range(manifest.world_size)]
    same, rows = manifest.world_size == world_size, dict[str, int]()
    if in_shards:
        for _, name in files:
            shapes = tensorfile.shapes(path / name, manifest.files[name])
            rows |= {tensor: shape[0] for tensor, shape in shapes.items() if _is_cut(tensor)}
    anew = {} if same else rows_wanted(rows, rank, world_size)
    skeletons, shared, own = [], {}, None
    for number, file in files:
        mine = same and number == rank

        def wanted(name: str, mine: bool = mine) -> bool | range:
            if not name.startswith("shared."):
                return mine
            return anew.get(name, mine) if in_shards and _is_cut(name) else True

        skeleton, tensors = tensorfile.read(
            path / file, manifest.files[file], alone=world_size == 1, wanted=wanted
        )
        skeletons.append(skeleton)
        if mine:
            own = unpack(skeleton["own"], tensors)
        shared.update({key: value for key, value in tensors.items() if key.startswith("shared.")})
    return unpack(skeletons[0]["shared"], shared, cut=rows if in_shards else None), own


def _is_cut(name: str) -> bool:
    return name.startswith("shared.") and is_shard(name)


def _check_config(
    store: CheckpointStore, manifest: Manifest, config_hash: str, configuration: Mapping[str, Any]
) -> None:
    if told := other_configuration(manifest, config_hash, configuration):
        raise WrongConfiguration(
            f"{store.location(manifest.step)} was written under another configuration ({told}): its numbers "
            "would not continue. Use a new run directory, or go back to the configuration of the run"
        )
