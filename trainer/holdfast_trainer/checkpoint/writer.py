"""From a staged state to a checkpoint: this rank's file and its record, and on rank 0 commit and pruning.

Runs in a thread of low priority. Nothing is reported before the training's thread has said that what was
copied is the state of one instant: from its record on a rank takes nothing back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contract import RunDir
from .bucket import Location
from .checksums import Written
from .errors import CheckpointError, Fenced
from .flight import Flight, GivenUp, StateChanged
from .manifest import PLAIN, Manifest
from .retention import Retention
from .storage import Storage
from .store import part_file
from .stores import open_store

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class Saved:
    """A durable checkpoint and what it cost."""

    step: int
    bytes: int
    seconds: float
    """From the call of `save` until it was durable."""
    stall_seconds: float
    """What the training thread waited: in that call, and before it might change the state again."""
    digest: str


@dataclass(frozen=True)
class Job:
    """One save, as far as its writing is concerned."""

    step: int
    number: int
    """Of the saves of this attempt, the same on all ranks."""
    write: Callable[[Location], Written]
    """Writes this rank's file."""
    flight: Flight
    began: float
    """By `time.perf_counter`."""
    division: str = ""
    """Of the state among the ranks, as this rank has it."""
    version: int = PLAIN
    """Of the manifest, by what this rank's part holds."""
    compare: Callable[[], str] = lambda: ""
    """What was wrong with the copy, once all of it was written; empty where nothing was."""
    blocking: bool = False
    """Whether the training thread waits for all of it."""


class Writer:
    """Of one rank, one save at a time."""

    def __init__(
        self,
        run: RunDir,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        config_hash: str,
        retention: Retention,
        earlier: Mapping[int, float],
        environment: Mapping[str, Any],
        on_saved: Callable[[Saved], None],
        on_failed: Callable[[int, CheckpointError], None],
        storage: Storage | None,
    ) -> None:
        self._retention, self._earlier = retention, earlier
        self.directory = open_store(run, attempt, storage)
        self._attempt, self._rank, self._world_size = attempt, rank, world_size
        self._config_hash, self._environment = config_hash, environment
        self._on_saved, self._on_failed = on_saved, on_failed
        self.deadline = 0.0
        """By `time.monotonic`: how long rank 0 waits for its peers' parts."""
        self.error: CheckpointError | None = None
        """What the newest save ended with."""
        self.last_saved: Saved | None = None
        self.losses: dict[int, float] = {}
        """Validation losses by step, as this attempt measured them."""
        self.bad_steps: set[int] = set()
        """Checkpoints that did not verify at load; pruned once a newer one is durable."""
        self.known: Manifest | None = None
        """What `newest` was when it was last looked at, or this rank's own commit since."""

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest committed step, leaving out those that did not verify."""
        self.known = self.directory.newest(self.bad_steps)
        return self.known

    def write(self, job: Job) -> None:
        """Make `job` durable, or leave in `error` why it is not; tells the listeners of either."""
        partial: Location | None = None
        try:
            self.directory.check_fence()
            partial = self.directory.begin(job.step, job.number)
            written = job.write(partial / part_file(self._rank))
            if changed := job.compare():
                raise StateChanged(changed)
            stall = job.flight.await_settled()
            self.directory.report_part(partial, self._rank, written, job.division)
            if self._rank != 0:
                return
            manifest = self._commit(job, partial)
        except Exception as error:
            # Whatever it is: a save that failed must never pass for one that did not.
            self._fail(job.step, partial, error)
            return
        self.bad_steps.discard(job.step)
        self.known = manifest
        seconds = time.perf_counter() - job.began
        stall = seconds if job.blocking else stall
        self.last_saved = Saved(job.step, manifest.size, seconds, stall, manifest.digest)
        self._tell(self.last_saved)
        self.prune(job.step)

    def prune(self, step: int) -> None:
        """Remove what is not to stay, now that `step` is durable; tells the listeners where that fails."""
        try:
            losses = self._known_losses()
            self.directory.prune(lambda steps: self._retention.stays(steps, losses), self.bad_steps)
            self.bad_steps.clear()
        except Fenced as error:
            self.error = error
            self._tell_failed(step, error)
        except (OSError, CheckpointError) as error:
            self._tell_failed(step, CheckpointError(f"step {step} is saved, but old ones stay: {error}"))

    def _commit(self, job: Job, partial: Location) -> Manifest:
        def late() -> bool:
            job.flight.go_on()
            return time.monotonic() > self.deadline

        manifest = Manifest(
            step=job.step,
            attempt=self._attempt,
            world_size=self._world_size,
            config_hash=self._config_hash,
            files=self.directory.await_parts(partial, self._world_size, late, job.division),
            time=time.time(),
            environment=dict(self._environment),  # what is known of it may grow while the run goes on
            losses={str(step): loss for step, loss in self._known_losses(job.step).items()},
            version=job.version,
        )
        return self.directory.commit(partial, manifest)

    def _known_losses(self, *coming: int) -> dict[int, float]:
        """What this attempt measured, and what the newest checkpoint and the ledgers tell of the past; of the
        checkpoints that are there, and that are `coming`."""
        newest = self.newest
        told = {} if newest is None else {int(step): loss for step, loss in newest.losses.items()}
        there = {*self.directory.steps(), *coming}
        known = {**self._earlier, **told, **self.losses}
        return {step: loss for step, loss in known.items() if step in there}

    def _fail(self, step: int, partial: Location | None, error: Exception) -> None:
        try:
            # A newer attempt sweeps away what this one writes: a file that is gone may mean that.
            self.directory.check_fence()
        except CheckpointError as fenced:
            error = fenced if isinstance(fenced, Fenced) else error
        if isinstance(error, Fenced):
            self.error = error
        else:
            self.error = CheckpointError(f"step {step} could not be saved: {_say(error)}")
            self.error.__cause__ = error
        if partial is not None:
            try:
                if self._rank == 0:
                    self.directory.abandon(partial)
                else:
                    self.directory.report_failure(partial, self._rank, _say(error))
            except (OSError, CheckpointError):
                pass  # rank 0 waits until its deadline
        self._tell_failed(step, self.error)

    def _tell(self, saved: Saved) -> None:
        try:
            self._on_saved(saved)
        except Exception as error:  # a listener's trouble is not the checkpoint's
            log.warning("step %d is durable, but telling of it failed: %s", saved.step, _say(error))

    def _tell_failed(self, step: int, error: CheckpointError) -> None:
        try:
            self._on_failed(step, error)
        except Exception as trouble:
            log.warning("%s; telling of it failed: %s", error, _say(trouble))


def _say(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    plain = isinstance(error, CheckpointError | GivenUp | StateChanged)
    return str(error) if plain else f"{type(error).__name__}: {error}"
