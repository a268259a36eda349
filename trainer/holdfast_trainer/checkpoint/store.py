"""What a place for checkpoints must be able to do: `directory` on a file system, `objects` in a bucket.

A save has a partial, which all ranks write their parts into and which `commit` makes a checkpoint, all of it
or nothing. An attempt that is fenced commits nothing that a newer one would ever load. Where a rank's file
lies is a `Location`, which has a name, is joined with `/`, and can be read; nobody else asks which kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from . import manifest as manifests
from .bucket import Location
from .checksums import Written
from .errors import CheckpointError
from .manifest import BadManifest, Manifest
from .storage import PartFiles
from .tensorfile import UnreadableFile, verify


def part_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def part_record(rank: int) -> str:
    """Its size and checksums, or why there is none."""
    return f"rank-{rank}.json"


@dataclass(frozen=True)
class Entry:
    """Something that a save left; `location` is None where it is no checkpoint."""

    name: str
    step: int
    attempt: int | None = None
    location: Any = None


class CheckpointStore(ABC):
    """The checkpoints of a run, as one attempt may use them.

    Methods raise CheckpointError where the place does not answer; a store of files raises OSError.
    """

    place: str
    """Where it is, for messages."""
    files: PartFiles
    """What parts are written with."""
    how: Mapping[str, Any] = MappingProxyType({})
    """What `tensorfile.write_image` is to be told besides."""

    @abstractmethod
    def check_fence(self) -> None:
        """Raises Fenced where a newer attempt was admitted, CheckpointError where that cannot be read."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first; whether they verify is not asked."""

    @abstractmethod
    def entries(self) -> Iterable[Entry]:
        """All that saves left, checkpoints or not; what is neither is left out."""

    @abstractmethod
    def location(self, step: int) -> Location:
        """Where the checkpoint of `step` is, or would be."""

    @abstractmethod
    def begin(self, step: int, save: int) -> Any:
        """The partial that all ranks write their part of `step` into.

        `save` counts the saves of this attempt: the same on every rank, and never used twice.
        """

    @abstractmethod
    def report_part(self, partial: Any, rank: int, written: Written, division: str = "") -> None:
        """Tell rank 0 that this rank's file is durable, and who writes what as this rank has it; where this
        raises, it was not told."""

    @abstractmethod
    def report_failure(self, partial: Any, rank: int, error: str) -> None:
        """Tell rank 0 not to wait. Raises where that fails too: rank 0 then waits until its deadline."""

    @abstractmethod
    def await_parts(
        self, partial: Any, world_size: int, late: Callable[[], bool], division: str = ""
    ) -> dict[str, Written]:
        """Every rank's file by name. Raises CheckpointError naming the rank that failed, is `late` or has
        another `division`, Fenced where a newer attempt took over meanwhile."""

    @abstractmethod
    def commit(self, partial: Any, manifest: Manifest) -> Manifest:
        """Make the step's parts a checkpoint; returns the manifest that now stands for the step.

        Raises Fenced, CheckpointError, OSError.
        """

    @abstractmethod
    def abandon(self, partial: Any) -> None:
        """Remove what a failed save left; what stays is debris, for a later prune."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what saves of this attempt and earlier ones left unfinished: for its start."""

    @abstractmethod
    def prune(self, stays: Callable[[list[int]], set[int]], bad: Iterable[int] = ()) -> None:
        """Remove good checkpoints but those that `stays` names of them, `bad` ones, and debris of the past.

        Raises Fenced, CheckpointError, OSError.
        """

    def newest(self, besides: Iterable[int] = ()) -> Manifest | None:
        """The newest checkpoint whose manifest is sound, `besides` those known to be bad."""
        bad = set(besides)
        for step in self.steps():
            if step not in bad:
                try:
                    return manifests.read(self.location(step))
                except (BadManifest, CheckpointError):
                    continue
        return None

    def fault(self, step: int) -> str | None:
        """Why a checkpoint must not be used, or None. Reads all of it; raises CheckpointError where nobody
        can look."""
        location = self.location(step)
        try:
            manifest = manifests.read(location)
            if manifest.step != step:
                return f"manifest of step {manifest.step} in {location.name}"
            for name in sorted(manifest.files):
                verify(location / name, manifest.files[name])
        except (BadManifest, UnreadableFile) as error:
            return str(error)
        return None


def recorded(written: Written, division: str) -> dict[str, Any]:
    """What a rank's record tells of its file."""
    return {**asdict(written), "division": division}


def named_part(rank: int, body: dict[str, Any], division: str) -> Written:
    """What `recorded` was given. Raises CheckpointError where the rank could not write its part, or where the
    parts need not make up a whole."""
    if "error" in body:
        raise CheckpointError(f"rank {rank} could not write its part: {body['error']}")
    if body.pop("division") != division:
        raise CheckpointError(
            f"rank {rank} has other tensors than rank 0, by name or size, where models and optimizers should "
            "be alike: some of them would be in no file"
        )
    return Written(**body)


def gone_before(steps: Sequence[int], stays: set[int], bad: set[int]) -> list[int]:
    """Of `steps`, those that retention lets go or that are bad."""
    return [step for step in steps if step in bad or step not in stays]
