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
from pathlib import Path

from ..contract import (
    MANIFEST,
    UNFINISHED,
    RunDir,
    checkpoint_step,
    checkpoint_steps,
    exists,
    read_fence,
    remove_unfinished,
)
from . import manifest as manifests
from .checksums import Written
from .errors import CheckpointError as CheckpointError
from .errors import Fenced as Fenced
from .manifest import Manifest
from .storage import Storage
from .store import CheckpointStore, Entry, gone_before, named_part, part_record, recorded
from .store import part_file as part_file

_POLL_SECONDS = 0.01
_FENCE_SECONDS = 1.0
"""How often a wait for other ranks looks whether a newer attempt has taken over."""
_HELD_AT_ONCE = 32
"""By a prune: where `keep` was lowered more are to go than a process may have open files."""


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


class CheckpointDirectory(CheckpointStore):
    """`checkpoints/` of a run directory, as attempt `attempt` may use it."""

    def __init__(self, run: RunDir, attempt: int, storage: Storage | None = None) -> None:
        self._run = run
        self._attempt = attempt
        self.files = self._storage = storage or Storage()
        self.place = str(run.checkpoints)

    def check_fence(self) -> None:
        check_fence(self._run, self._attempt)

    def location(self, step: int) -> Path:
        return self._run.checkpoint(step)

    def entries(self) -> Iterable[Entry]:
        for path in self._run.checkpoints.iterdir():
            if (step := checkpoint_step(path)) is not None:
                yield Entry(path.name, step, location=path)
            elif match := UNFINISHED.fullmatch(path.name):
                yield Entry(path.name, int(match[1]), int(match[2]))

    def steps(self) -> list[int]:
        return checkpoint_steps(self._run)

    # ------------------------------------------------------------------ parts

    def begin(self, step: int, save: int) -> Path:
        """A directory, made where needed."""
        path = self._run.checkpoints / f".step-{step:08d}.attempt-{self._attempt}.save-{save}"
        self._storage.make_directory(path)
        return path

    def report_part(self, partial: Path, rank: int, written: Written, division: str = "") -> None:
        self._storage.replace(partial / part_record(rank), json.dumps(recorded(written, division)))
        # No sync here, as one that failed would take back what rank 0 may have read by now. Rank 0 syncs
        # the same directory before it commits, and does not commit where that fails.

    def report_failure(self, partial: Path, rank: int, error: str) -> None:
        """Tell rank 0 not to wait; frees the rank's own bytes first, as the disk may be full.

        Raises OSError where that fails too: rank 0 then waits until its deadline.
        """
        self._storage.unlink(partial / part_file(rank))
        self._storage.replace_durably(partial / part_record(rank), json.dumps({"error": error}))

    def await_parts(
        self, partial: Path, world_size: int, late: Callable[[], bool], division: str = ""
    ) -> dict[str, Written]:
        """As the base says; Fenced also where a newer attempt swept the save away."""
        files: dict[str, Written] = {}
        for rank in range(world_size):
            record, look = partial / part_record(rank), time.monotonic() + _FENCE_SECONDS
            while not exists(record):
                if not exists(partial):
                    check_fence(self._run, self._attempt)
                    raise CheckpointError(f"{partial} was removed while it was written")
                if late():
                    raise CheckpointError(f"rank {rank} did not write its part in time")
                if time.monotonic() > look:  # a rank that came late may have made the directory anew
                    check_fence(self._run, self._attempt)
                    look = time.monotonic() + _FENCE_SECONDS
                time.sleep(_POLL_SECONDS)
            body = json.loads(record.read_text(encoding="utf-8"))
            files[part_file(rank)] = named_part(rank, body, division)
        return files

    # ----------------------------------------------------------------- commit

    def commit(self, partial: Path, manifest: Manifest) -> Manifest:
        """As the base says: another one stands where the step has a good checkpoint already, as what is
        durable is not replaced.

        A bad one makes way. It is held before the fence is read again: an attempt that is frozen then may
        wake up when a newer one has a good checkpoint of that name, and touches no other directory.
        """
        step = manifest.step
        final = self._run.checkpoint(step)
        for rank in range(manifest.world_size):
            self._storage.unlink(partial / part_record(rank))
        check_fence(self._run, self._attempt)
        self._storage.replace_durably(partial / MANIFEST, manifest.to_json())
        with ExitStack() as holding:
            bad = self._hold(final, holding)
            if bad is not None and self.fault(step) is None:
                self.abandon(partial)
                return manifests.read(final)
            check_fence(self._run, self._attempt)
            if bad is not None:
                self._remove(final, bad)
        self._storage.rename(partial, final)  # fails where something has the name again
        self._storage.sync_directory(self._run.checkpoints)
        return manifest

    def abandon(self, partial: Path) -> None:
        try:
            self._storage.remove_tree(partial)
        except OSError:
            pass

    # --------------------------------------------------------------------- prune

    def sweep(self) -> None:
        """As the base says.

        Debris takes the room that the next save needs; and a save of an attempt that was superseded
        between its last look at the fence and its rename has nothing left to rename.
        """
        remove_unfinished(self._run, self._attempt)
        for made in (self._run.path, self._run.path.parent):  # checkpoints/ and the run directory themselves
            self._storage.sync_directory(made)

    def prune(self, stays: Callable[[list[int]], set[int]], bad: Iterable[int] = ()) -> None:
        """As the base says.

        An attempt that is frozen here may wake up when a newer one has given such a name to a checkpoint
        of its own: what goes is held before the fence is read, and no other directory is touched.
        """
        bad = set(bad)
        good = [step for step in self.steps() if step not in bad]
        doomed = [self.location(step) for step in gone_before([*good, *bad], stays(good), bad)]
        doomed += [path for path in self._run.checkpoints.iterdir() if self._is_debris(path, good)]
        doomed = list(dict.fromkeys(doomed))
        for begin in range(0, len(doomed) or 1, _HELD_AT_ONCE):  # who is superseded hears it in any case
            with ExitStack() as holding:
                held = [(path, self._hold(path, holding)) for path in doomed[begin : begin + _HELD_AT_ONCE]]
                check_fence(self._run, self._attempt)
                for path, descriptor in held:
                    if descriptor is not None:
                        self._remove(path, descriptor)

    def _hold(self, path: Path, holding: ExitStack) -> int | None:
        """The directory that has this name now, until `holding` ends; None where there is none."""
        try:
            descriptor = self._storage.hold(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        holding.callback(os.close, descriptor)
        return descriptor

    def _remove(self, path: Path, held: int) -> None:
        """A checkpoint or debris, whatever has its name by now. The manifest goes first, so that a crash in
        the middle leaves debris and no false checkpoint."""
        self._storage.unlink(path / MANIFEST, held)
        self._storage.sync_directory(path, held)
        self._storage.remove_held(path, held)

    def _is_debris(self, path: Path, good: Iterable[int]) -> bool:
        """Left by a save that failed or was killed, or by a removal; none of a newer attempt's."""
        if match := UNFINISHED.fullmatch(path.name):
            step, attempt = int(match[1]), int(match[2])
            return attempt < self._attempt or (attempt == self._attempt and step <= max(good, default=0))
        return checkpoint_step(path) is not None and not exists(path / MANIFEST)
