"""Asynchronous saves: the step pays for a copy, threads do the rest.

`save` copies the state into a buffer that was allocated and touched before (`stage`) and returns; threads
of low priority begin meanwhile to checksum and write this rank's file, and rank 0's commits once all
parts are there. Threads, not a process: nearly all of their time is spent in calls that let the interpreter
go, so the training does not feel them as such; they share the buffer, and they end with their process.

State that all ranks hold alike is written once, shared out among the ranks (`shares`). One save is in
flight at most: the next one waits for it, on every rank alike, and that wait is part of the stall that is
reported; a save that the clock asks for is not asked for before the last one is durable. A save that
fails (disk full, a lost peer) harms neither training nor the checkpoints before it; the failure is
reported, and the next save tries again. Where memory is too short for the buffer, `save` writes from the
state itself and returns when that is done: slow, and told, but never lost.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..contract import RunDir
from . import tensorfile
from .checksums import Written
from .directory import CheckpointDirectory, CheckpointError, Fenced, check_fence, part_file
from .flight import Flight, GivenUp, makes_way
from .manifest import Manifest
from .retention import Retention
from .shares import share_out
from .spread import start_thread, step_aside
from .stage import Image, NotEnoughMemory, Stage
from .storage import Storage
from .tensorfile import Header
from .tree import is_shard, pack

log = logging.getLogger("holdfast")

Write = Callable[[Path], Written]

PART_TIMEOUT_SECONDS = 600.0
"""How long rank 0 waits for its peers' parts when no notice presses."""


@dataclass(frozen=True)
class Saved:
    """A durable checkpoint and what it cost."""

    step: int
    bytes: int
    seconds: float
    """From the call of `save` until it was durable."""
    stall_seconds: float
    """What the training thread waited."""
    digest: str


class Saver:
    """Saves of one rank. `own` state differs by rank; `shared` state is rank 0's to write."""

    def __init__(
        self,
        run: RunDir,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        config_hash: str = "",
        keep: int = 3,
        keep_every: int = 0,
        keep_best: int = 0,
        environment: Mapping[str, Any] | None = None,
        on_saved: Callable[[Saved], None] = lambda saved: None,
        on_failed: Callable[[int, CheckpointError], None] = lambda step, error: None,
        storage: Storage | None = None,
    ) -> None:
        self._retention = Retention(keep, keep_every, keep_best)
        self._run = run
        self._storage = storage or Storage()
        self._directory = CheckpointDirectory(run, attempt, self._storage)
        self._attempt, self._rank, self._world_size = attempt, rank, world_size
        self._config_hash = config_hash
        self._environment = dict(environment or {})
        self._on_saved, self._on_failed = on_saved, on_failed
        self._stage = Stage()
        self._told_memory = False
        self._thread: threading.Thread | None = None
        self._saves = 0
        self._deadline = 0.0
        self._flight = Flight(0)
        self._error: CheckpointError | None = None
        self._losses: dict[int, float] = {}
        self.last_cost: float | None = None
        """Seconds until durable of the newest save; what `auto` plans with."""
        self.bad_steps: set[int] = set()
        """Checkpoints that did not verify at load; pruned once a newer one is durable."""

    @property
    def durable_step(self) -> int:
        """The newest committed step, of whichever attempt; 0 where there is none."""
        newest = self.newest
        return 0 if newest is None else newest.step

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest committed step, leaving out those that did not verify."""
        return self._directory.newest(self.bad_steps)

    def validated(self, step: int, loss: float) -> None:
        """The state after `step` steps has this validation loss, as far as retention is concerned."""
        self._losses[step] = loss

    def _known_losses(self) -> dict[int, float]:
        """What this attempt measured, and what the newest checkpoint tells of the past."""
        newest = self.newest
        told = {} if newest is None else {int(step): loss for step, loss in newest.losses.items()}
        there = self._directory.steps()
        return {step: loss for step, loss in {**told, **self._losses}.items() if step in there}

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, shared: Any, own: Any, rank_0_only: Collection[str] | None = None) -> int:
        """Allocate and touch what a save of such a state will need; returns its bytes, at once.

        Call it when the state has its full size: an optimizer has none before its first step. Where
        memory is too short that is logged, and saves will hold the training up.
        """
        self.join()
        _, tensors = self._part(shared, own, rank_0_only)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            self._stage.reserve(size, pinned=any(tensor.is_cuda for tensor in tensors.values()))
        except NotEnoughMemory as error:
            self._tell_memory(error)
            return 0
        self._thread = start_thread(self._touch, "checkpoint-memory")
        return self._stage.size

    def _touch(self) -> None:
        step_aside()
        self._stage.touch()

    def _tell_memory(self, error: NotEnoughMemory) -> None:
        if not self._told_memory:
            log.warning("%s: every save will hold training up until it is written", error)
            self._told_memory = True

    def save(
        self,
        step: int,
        shared: Any,
        own: Any,
        *,
        timeout: float = PART_TIMEOUT_SECONDS,
        rank_0_only: Collection[str] | None = None,
    ) -> float:
        """Begin to save `step`; returns the seconds that the caller was held up.

        Rank 0 writes `shared`. Where `rank_0_only` is given every rank passes `shared`, and all but the
        tensors named there (by their path, "shared.parts...") are shared out among the ranks.
        Raises UnsupportedState where the state holds something that cannot be saved.
        """
        began = time.perf_counter()
        self.join()
        skeleton, tensors = self._part(shared, own, rank_0_only)
        self._error = None
        self._saves += 1
        self._deadline = time.monotonic() + timeout
        header = Header.of(skeleton, tensors)
        try:
            image = self._stage.begin(header, tensors)
        except NotEnoughMemory as error:
            self._tell_memory(error)
            self._flight = Flight(0)
            whole = lambda path: tensorfile.write(path, skeleton, tensors, self._storage)  # noqa: E731
            self._write(step, whole, began, None)
            return time.perf_counter() - began
        flight = self._flight = Flight(image.size)
        write = functools.partial(self._write_image, step, image, began, flight)
        self._thread = start_thread(write, "checkpoint")
        try:
            self._stage.fill(image, header, tensors)
        finally:
            stall = time.perf_counter() - began
            flight.staged(stall)
        if self._thread is None:
            write()
        return stall

    def _part(
        self, shared: Any, own: Any, rank_0_only: Collection[str] | None
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """What this rank writes of the state: (skeleton, tensors)."""
        if self._rank != 0 and rank_0_only is None:
            shared = None
        skeleton, tensors = pack({"own": own, "shared": shared})
        if rank_0_only is not None and self._world_size > 1:
            sizes = {
                n: t.numel() * t.element_size()
                for n, t in tensors.items()
                if n.startswith("shared.") and not is_shard(n)
            }
            # A prime marks a path that another tensor has too: which of them is meant is not known.
            unsure = {name for name in sizes if name.endswith("'")}
            owners = share_out(sizes, self._world_size, {*rank_0_only, *unsure})
            tensors = {n: t for n, t in tensors.items() if owners.get(n, self._rank) == self._rank}
        if self._rank != 0:
            del skeleton["shared"]
        return skeleton, tensors

    def join(self) -> None:
        """Wait until no save is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def hurry(self, seconds: float) -> None:
        """Give peers no longer than this to bring their parts of the save in flight."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def makes_way(self, seconds: float) -> bool:
        """Whether the save in flight should be given up for a newer one, with `seconds` left for both."""
        return self.busy and makes_way(seconds, self._flight.seconds_left(self.last_cost), self.last_cost)

    def give_up(self) -> None:
        """End the save in flight as one that failed, unless it is being committed by now."""
        self._flight.give_up()

    def wait(self) -> None:
        """Wait for the save in flight. Raises the CheckpointError it ended with.

        On rank 0 the checkpoint is then durable, on others their part of it.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def _write_image(self, step: int, image: Image, began: float, flight: Flight) -> None:
        step_aside()

        def whole(path: Path) -> Written:
            hooks = {"ready": image.wait, "heard": flight.advance}
            return tensorfile.write_image(path, image.view, image.size, self._storage, **hooks)

        self._write(step, whole, began, flight.stall)

    def _write(self, step: int, write: Write, began: float, stall: Callable[[], float] | None) -> None:
        partial: Path | None = None
        try:
            check_fence(self._run, self._attempt)
            partial = self._directory.begin(step, self._saves)
            written = write(partial / part_file(self._rank))
            self._directory.report_part(partial, self._rank, written)
            if self._rank != 0:
                return
            manifest = self._commit(step, partial)
        except Exception as error:
            # Whatever it is: a save that failed must never pass for one that did not.
            self._fail(step, partial, error)
            return
        self.bad_steps.discard(step)
        self.last_cost = time.perf_counter() - began
        waited = self.last_cost if stall is None else stall()
        self._on_saved(Saved(step, manifest.size, self.last_cost, waited, manifest.digest))
        try:
            losses = self._known_losses()
            self._directory.prune(lambda steps: self._retention.stays(steps, losses), self.bad_steps)
            self.bad_steps.clear()
        except (OSError, CheckpointError) as error:
            self._on_failed(step, CheckpointError(f"step {step} is saved, but old ones stay: {error}"))

    def _commit(self, step: int, partial: Path) -> Manifest:
        def late() -> bool:
            self._flight.go_on()
            return time.monotonic() > self._deadline

        manifest = Manifest(
            step=step,
            attempt=self._attempt,
            world_size=self._world_size,
            config_hash=self._config_hash,
            files=self._directory.await_parts(partial, self._world_size, late),
            time=time.time(),
            environment=self._environment,
            losses={str(step): loss for step, loss in self._known_losses().items()},
        )
        return self._directory.commit(partial, manifest)

    def _fail(self, step: int, partial: Path | None, error: Exception) -> None:
        try:
            # A newer attempt sweeps away what this one writes: a file that is gone may mean that.
            check_fence(self._run, self._attempt)
        except CheckpointError as fenced:
            error = fenced if isinstance(fenced, Fenced) else error
        if isinstance(error, Fenced):
            self._error = error
        else:
            self._error = CheckpointError(f"step {step} could not be saved: {_say(error)}")
            self._error.__cause__ = error
        if partial is not None:
            try:
                if self._rank == 0:
                    self._directory.abandon(partial)
                else:
                    self._directory.report_failure(partial, self._rank, _say(error))
            except OSError:
                pass  # rank 0 waits until its deadline
        self._on_failed(step, self._error)

    @property
    def error(self) -> CheckpointError | None:
        """What the last save ended with, once it has."""
        return None if self.busy else self._error


def _say(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return str(error) if isinstance(error, CheckpointError | GivenUp) else f"{type(error).__name__}: {error}"
