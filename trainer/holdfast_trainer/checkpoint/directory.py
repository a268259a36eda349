"""Checkpoints on a POSIX file system: parts, commit, prune.

A save lives in a hidden directory until it is complete::

    checkpoints/.step-00000812.attempt-3.save-7/rank-N.safetensors   written and fsynced by rank N
    checkpoints/.step-00000812.attempt-3.save-7/rank-N.json          its size and checksum, or its error
    checkpoints/.step-00000812.attempt-3.save-7/manifest.json        by rank 0, once every part is there
    checkpoints/step-00000812/                                       one rename makes it a checkpoint

Each arrow is durable before the next: file, then its name (directory fsync), then the manifest, then
the rename, then the parent's fsync. A crash leaves a whole checkpoint or debris, never half of one.
Parts meet through the file system, not through a collective, so nothing waits on the step's path.
No two saves share a directory, so what a rank writes late into a save that failed harms no other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ..contract import (
    UNFINISHED,
    RunDir,
    checkpoint_step,
    read_fence,
    remove_unfinished,
)
from . import manifest as manifests
from .checksums import Written
from .manifest import BadManifest, Manifest
from .storage import Storage
from .tensorfile import UnreadableFile, verify

_POLL_SECONDS = 0.01
_FENCE_SECONDS = 1.0
"""How often a wait for other ranks looks whether a newer attempt has taken over."""


class CheckpointError(Exception):
    """A save or a load failed; training state in memory is unharmed."""


class Fenced(CheckpointError):
    """A newer attempt may write; this one must not, and must stop."""


def check_fence(run: RunDir, attempt: int) -> None:
    """Raises Fenced where a newer attempt was admitted, CheckpointError where the fence is unreadable."""
    try:
        fence = read_fence(run)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the fence: {error}") from error
    if fence > attempt:
        raise Fenced(
            f"attempt {attempt} was superseded by attempt {fence}: it may no longer write to {run.path}"
        )


def part_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _part_record(rank: int) -> str:
    return f"rank-{rank}.json"


class CheckpointDirectory:
    """`checkpoints/` of a run directory, as attempt `attempt` may use it."""

    def __init__(self, run: RunDir, attempt: int, storage: Storage | None = None) -> None:
        self._run = run
        self._attempt = attempt
        self._storage = storage or Storage()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first; whether they verify is not asked."""
        if not self._run.checkpoints.is_dir():
            return []
        found = [
            step
            for path in self._run.checkpoints.iterdir()
            if (step := checkpoint_step(path)) is not None and (path / manifests.NAME).exists()
        ]
        return sorted(found, reverse=True)

    # ------------------------------------------------------------------ parts

    def begin(self, step: int, save: int) -> Path:
        """The directory that all ranks write their part of `step` into; makes it where needed.

        `save` counts the saves of this attempt: the same on every rank, and never used twice.
        """
        path = self._run.checkpoints / f".step-{step:08d}.attempt-{self._attempt}.save-{save}"
        self._storage.make_directory(path)
        return path

    def report_part(self, partial: Path, rank: int, written: Written) -> None:
        """Tell rank 0 that this rank's file is durable; where this raises, it was not told."""
        self._storage.replace(partial / _part_record(rank), json.dumps(asdict(written)))
        # No sync here, as one that failed would take back what rank 0 may have read by now. Rank 0 syncs
        # the same directory before it commits, and does not commit where that fails.

    def report_failure(self, partial: Path, rank: int, error: str) -> None:
        """Tell rank 0 not to wait; frees the rank's own bytes first, as the disk may be full.

        Raises OSError where that fails too: rank 0 then waits until its deadline.
        """
        self._storage.unlink(partial / part_file(rank))
        self._storage.replace_durably(partial / _part_record(rank), json.dumps({"error": error}))

    def await_parts(self, partial: Path, world_size: int, late: Callable[[], bool]) -> dict[str, Written]:
        """Every rank's file by name. Raises CheckpointError naming the rank that failed or is `late`.

        Raises Fenced where a newer attempt swept the save away, for which nobody would bring a part.
        """
        files: dict[str, Written] = {}
        for rank in range(world_size):
            record, look = partial / _part_record(rank), time.monotonic() + _FENCE_SECONDS
            while not record.exists():
                if not partial.exists():
                    check_fence(self._run, self._attempt)
                    raise CheckpointError(f"{partial} was removed while it was written")
                if late():
                    raise CheckpointError(f"rank {rank} did not write its part in time")
                if time.monotonic() > look:  # a rank that came late may have made the directory anew
                    check_fence(self._run, self._attempt)
                    look = time.monotonic() + _FENCE_SECONDS
                time.sleep(_POLL_SECONDS)
            body = json.loads(record.read_text(encoding="utf-8"))
            if "error" in body:
                raise CheckpointError(f"rank {rank} could not write its part: {body['error']}")
            files[part_file(rank)] = Written(**body)
        return files

    # ----------------------------------------------------------------- commit

    def commit(self, partial: Path, manifest: Manifest) -> Manifest:
        """Make the step's parts a checkpoint; returns the manifest that now stands for the step.

        That is another one where the step has a good checkpoint already: what is durable is not
        replaced. Raises Fenced, OSError.
        """
        step = manifest.step
        final = self._run.checkpoint(step)
        for rank in range(manifest.world_size):
            self._storage.unlink(partial / _part_record(rank))
        check_fence(self._run, self._attempt)
        self._storage.replace_durably(partial / manifests.NAME, manifest.to_json())
        check_fence(self._run, self._attempt)
        if final.exists():
            if self.fault(step) is None:
                self.abandon(partial)
                return manifests.read(final)
            self._storage.rename(final, self._run.checkpoints / f".bad-step-{step:08d}.{time.time_ns()}")
        self._storage.rename(partial, final)
        self._storage.sync_directory(self._run.checkpoints)
        return manifest

    def abandon(self, partial: Path) -> None:
        """Remove what a failed save left; what stays is debris, for a later prune."""
        try:
            self._storage.remove_tree(partial)
        except OSError:
            pass

    # ----------------------------------------------------------- verify, prune

    def fault(self, step: int, ranks: Iterable[int] | None = None) -> str | None:
        """Why a checkpoint must not be used, or None. Reads the files of `ranks` (default: all)."""
        directory = self._run.checkpoint(step)
        try:
            manifest = manifests.read(directory)
            if manifest.step != step:
                return f"manifest of step {manifest.step} in {directory.name}"
            names = manifest.files if ranks is None else {part_file(rank) for rank in ranks}
            for name in sorted(names):
                if name not in manifest.files:
                    return f"{name} is not in the manifest"
                verify(directory / name, manifest.files[name])
        except (BadManifest, UnreadableFile) as error:
            return str(error)
        return None

    def newest(self, besides: Iterable[int] = ()) -> Manifest | None:
        """The newest checkpoint whose manifest is sound, `besides` those known to be bad."""
        bad = set(besides)
        for step in self.steps():
            if step not in bad:
                try:
                    return manifests.read(self._run.checkpoint(step))
                except BadManifest:
                    continue
        return None

    def sweep(self) -> None:
        """Remove what saves of this attempt and earlier ones left unfinished: for its start.

        Debris takes the room that the next save needs; and a save of an attempt that was superseded
        between its last look at the fence and its rename has nothing left to rename.
        """
        remove_unfinished(self._run, self._attempt)
        for made in (self._run.path, self._run.path.parent):  # checkpoints/ and the run directory themselves
            self._storage.sync_directory(made)

    def prune(self, stays: Callable[[list[int]], set[int]], bad: Iterable[int] = ()) -> None:
        """Remove good checkpoints but those that `stays` names of them, `bad` ones, and debris of the past.

        The manifest goes first, so that a crash in the middle leaves debris and no false checkpoint.
        An attempt that is frozen here may wake up when a newer one has given such a name to a checkpoint
        of its own: what goes is held before the fence is read, and no other directory is touched.
        Raises Fenced, OSError.
        """
        bad = set(bad)
        good = [step for step in self.steps() if step not in bad]
        kept = stays(good)
        doomed = [self._run.checkpoint(step) for step in [*good, *bad] if step in bad or step not in kept]
        doomed += [path for path in self._run.checkpoints.iterdir() if self._is_debris(path, good)]
        with ExitStack() as holding:
            held: list[tuple[Path, int]] = []
            for path in dict.fromkeys(doomed):
                try:
                    held.append((path, self._storage.hold(path)))
                except (FileNotFoundError, NotADirectoryError):
                    continue
                holding.callback(os.close, held[-1][1])
            check_fence(self._run, self._attempt)
            for path, descriptor in held:
                self._storage.unlink(path / manifests.NAME, descriptor)
                self._storage.sync_directory(path, descriptor)
                self._storage.remove_held(path, descriptor)

    def _is_debris(self, path: Path, good: Iterable[int]) -> bool:
        """Left by a save that failed or was killed, or by a removal; none of a newer attempt's."""
        if match := UNFINISHED.fullmatch(path.name):
            step, attempt = int(match[1]), int(match[2])
            return attempt < self._attempt or (attempt == self._attempt and step <= max(good, default=0))
        headless = checkpoint_step(path) is not None and not (path / manifests.NAME).exists()
        return headless or path.name.startswith(".bad-")
