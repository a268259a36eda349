"""Asynchronous saves: the step pays for little of a copy, threads do the rest.

`save` has the state copied into a buffer that was allocated and touched before (`stage`), some of it while
the training goes on (`snapshot`); threads of low priority begin meanwhile to checksum and write this rank's
file, and rank 0's commits once all parts are there (`writer`). Threads, not a process: nearly all of their
time is spent in calls that let the interpreter go, so the training does not feel them as such; they share
the buffer, and they end with their process.

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
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..contract import RunDir
from ..within import start_thread
from . import tensorfile
from .bucket import Location
from .checksums import Written
from .errors import CheckpointError
from .flight import Flight, StateChanged, makes_way
from .manifest import Manifest, version_of
from .retention import Retention
from .shares import Share, part_of
from .snapshot import GpuWait, Snapshot, watch
from .spread import step_aside
from .stage import Image, NotEnoughMemory, Stage
from .storage import Storage
from .tensorfile import Header
from .writer import Job, Saved, Writer

log = logging.getLogger("holdfast")

PART_TIMEOUT_SECONDS = 600.0
"""How long rank 0 waits for its peers' parts when no notice presses."""
_LOOK_SECONDS = 0.5
"""How often to look whether a save that is waited for still moves."""


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
        losses: Mapping[int, float] | None = None,
        environment: Mapping[str, Any] | None = None,
        on_saved: Callable[[Saved], None] = lambda saved: None,
        on_failed: Callable[[int, CheckpointError], None] = lambda step, error: None,
        storage: Storage | None = None,
        stage: Stage | None = None,
        write_image: Callable[..., Written] = tensorfile.write_image,
    ) -> None:
        """`losses` are validations of earlier attempts, by step, that no manifest may have.

        `stage` and `write_image` say where a state is staged and how it gets from there to a file.
        """
        self._writer = Writer(
            run,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            config_hash=config_hash,
            retention=Retention(keep, keep_every, keep_best),
            earlier=losses or {},
            environment=environment or {},
            on_saved=on_saved,
            on_failed=on_failed,
            storage=storage,
        )
        self._rank, self._world_size = rank, world_size
        self._stage, self._write_image = stage or Stage(), write_image
        self._told_memory = False
        self._thread: threading.Thread | None = None
        self._saves = 0
        self._flight = Flight(0)
        self._snapshot: Snapshot | None = None
        self._settling = threading.Lock()
        self._overlaps = True
        """Until a state was changed while it was copied."""

    @property
    def durable_step(self) -> int:
        """The newest committed step, of whichever attempt; 0 where there is none."""
        newest = self.newest
        return 0 if newest is None else newest.step

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest committed step, leaving out those that did not verify."""
        return self._writer.newest

    @property
    def known(self) -> Manifest | None:
        """What `newest` was when it was last looked at, or this rank's own commit since."""
        return self._writer.known

    @property
    def bad_steps(self) -> set[int]:
        """Checkpoints that did not verify at load; pruned once a newer one is durable."""
        return self._writer.bad_steps

    @bad_steps.setter
    def bad_steps(self, steps: set[int]) -> None:
        self._writer.bad_steps = steps

    @property
    def last_saved(self) -> Saved | None:
        """The newest save that became durable in this attempt, and what it took; of rank 0."""
        return self._writer.last_saved

    def check_fence(self) -> None:
        """Raises Fenced where a newer attempt was admitted, CheckpointError where that cannot be read."""
        self._writer.directory.check_fence()

    def validated(self, step: int, loss: float) -> None:
        """The state after `step` steps has this validation loss, as far as retention is concerned."""
        self._writer.losses[step] = loss

    def prune(self) -> None:
        """Weigh again what stays, where no save will come that does; of rank 0."""
        self.join()
        self._writer.prune(self.durable_step)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> CheckpointError | None:
        """What the last save ended with, once it has."""
        return None if self.busy else self._writer.error

    @property
    def dropped(self) -> bool:
        """Whether the newest save's state was changed while it was copied: it wants to be saved again."""
        ended = self.error
        return self._flight.changed or (ended is not None and isinstance(ended.__cause__, StateChanged))

    def prepare(self, shared: Any, own: Any, rank_0_only: Collection[str] | None = None) -> int:
        """Allocate and touch what a save of such a state will need; returns its bytes, at once.

        Call it when the state has its full size: an optimizer has none before its first step. Where
        memory is too short that is logged, and saves will hold the training up.
        """
        self.join()
        tensors = part_of(shared, own, rank_0_only, self._rank, self._world_size).tensors
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
        lasting: Mapping[int, torch.Tensor] | None = None,
        waited: float = 0.0,
        patience: float = math.inf,
    ) -> float:
        """Begin to save `step`; returns the seconds that the caller was held up.

        Rank 0 writes `shared`. Where `rank_0_only` is given every rank passes `shared`, and all but the
        tensors named there (by their path, "shared.parts...") are shared out among the ranks.
        The state may change when this returns, but for tensors in `lasting` (by address): these before
        `settle` is called, at the latest when they are to change. `waited`: seconds that the caller was
        held up for this save before. `patience`: seconds that it is held up by a disk that stands still.
        Raises UnsupportedState where the state holds something that cannot be saved.
        """
        began = time.perf_counter() - waited
        self.join()
        self._overlaps = self._overlaps and not self.dropped
        share = part_of(shared, own, rank_0_only, self._rank, self._world_size)
        self._writer.error = None
        self._saves += 1
        self._writer.deadline = time.monotonic() + timeout
        header = Header.of(share.skeleton, share.tensors)
        try:
            image = self._stage.begin(header, share.tensors)
        except NotEnoughMemory as error:
            self._tell_memory(error)
            self._write_from_the_state(step, share, began, patience)
            return time.perf_counter() - began
        return self._write_from_an_image(step, image, header, share, lasting or {}, began)

    def _write_from_the_state(self, step: int, share: Share, began: float, patience: float) -> None:
        """Returns when that is done. Where the disk stands still it is given up: the state goes on, and what
        would be written of it later is of no instant."""
        flight = self._flight = Flight(0)
        flight.settle()

        def whole(path: Location) -> Written:
            store = self._writer.directory
            return tensorfile.write(path, share.skeleton, share.tensors, store.files, flight.advance)

        version = version_of(share.skeleton)
        job = Job(step, self._saves, whole, flight, began, share.division, version, blocking=True)
        for device in {tensor.device for tensor in share.tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # that of the thread is another one
        self._thread = start_thread(functools.partial(self._writer.write, job), "checkpoint")
        if self._thread is None:
            self._writer.write(job)
        self.join_while_it_moves(patience)
        if self.busy:
            flight.give_up("its disk stood still, and the training went on without it")

    def _write_from_an_image(
        self,
        step: int,
        image: Image,
        header: Header,
        share: Share,
        lasting: Mapping[int, torch.Tensor],
        began: float,
    ) -> float:
        flight = self._flight = Flight(image.size)
        watched = watch(share.tensors, lasting) if self._overlaps else {}
        snapshot = Snapshot(self._stage, image, header, share.tensors, watched, seed=step)

        def whole(path: Location) -> Written:
            store = self._writer.directory
            hooks = {"ready": image.wait, "heard": flight.advance, **store.how}
            return self._write_image(path, image.view, image.size, store.files, **hooks)

        version = version_of(share.skeleton)
        job = Job(step, self._saves, whole, flight, began, share.division, version, snapshot.compare)
        self._thread = start_thread(functools.partial(self._write, job), "checkpoint")
        try:
            snapshot.begin()
        finally:
            flight.held_up(time.perf_counter() - began)
        self._snapshot = snapshot
        if not watched or self._thread is None:
            self.settle()
        if self._thread is None:
            self._writer.write(job)
        return flight.stall

    def _write(self, job: Job) -> None:
        step_aside()
        self._writer.write(job)

    def settle(self) -> tuple[float, GpuWait | None]:
        """To be called before the state changes; returns the seconds that the caller was held up, and what
        its GPU will be.

        For the thread that trains alone: what it has done until here is what the copy is judged by.
        """
        with self._settling:
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is None:
                return 0.0, None
            began = time.perf_counter()
            changed = snapshot.settle()
            waited = time.perf_counter() - began
            self._flight.held_up(waited)
            self._flight.settle(changed, snapshot.held)
            return waited, snapshot.held

    def settle_if_copied(self) -> None:
        """`settle`, where that would not wait: what is copied can be made durable the earlier."""
        if self._snapshot is not None and self._snapshot.copied:
            self.settle()

    def join(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight, for no more than `timeout` seconds."""
        self.settle()
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None

    def join_while_it_moves(self, seconds: float) -> None:
        """Wait until no save is in flight, or the one that is stands still for so long: its disk may hang, of
        which nothing else tells."""
        self.settle()
        while self.busy and not self.stands_still(seconds):
            self.join(_LOOK_SECONDS)

    def stands_still(self, seconds: float) -> bool:
        """Whether a save is in flight of which nothing was written for so long."""
        return self.busy and self._saves > 0 and self._flight.stands_still(seconds)

    def hurry(self, seconds: float) -> None:
        """Give peers no longer than this to bring their parts of the save in flight."""
        self._writer.deadline = min(self._writer.deadline, time.monotonic() + seconds)

    def makes_way(self, seconds: float) -> bool:
        """Whether the save in flight should be given up for a newer one, with `seconds` left for both."""
        usual = None if self.last_saved is None else self.last_saved.seconds
        return self.busy and makes_way(seconds, self._flight.seconds_left(usual), usual)

    def give_up(self, why: str) -> None:
        """End the save in flight as one that failed, unless it is being committed by now."""
        self._flight.give_up(why)

    def wait(self) -> None:
        """Wait for the save in flight. Raises the CheckpointError it ended with.

        On rank 0 the checkpoint is then durable, on others their part of it.
        """
        self.join()
        if self._writer.error is not None:
            raise self._writer.error
