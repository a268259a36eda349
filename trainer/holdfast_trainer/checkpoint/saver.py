"""Asynchronous saves: the step pays for a copy, a thread does the rest.

`save` copies the state into buffers that are allocated once (pinned, where it comes from a GPU) and
returns; a thread writes, hashes and syncs this rank's file, and rank 0's thread commits once all
parts are there. One save is in flight at most: the next one waits for it, and that wait is part of
the stall that is reported. A save that fails (disk full, a lost peer) harms neither training nor the
checkpoints before it; the failure is reported, and the next save tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..contract import RunDir
from . import tensorfile
from .directory import CheckpointDirectory, CheckpointError, Fenced, check_fence, part_file
from .manifest import Manifest
from .tree import pack

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
        environment: Mapping[str, Any] | None = None,
        on_saved: Callable[[Saved], None] = lambda saved: None,
        on_failed: Callable[[int, CheckpointError], None] = lambda step, error: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept, or nothing is durable")
        self._run = run
        self._directory = CheckpointDirectory(run, attempt)
        self._attempt, self._rank, self._world_size = attempt, rank, world_size
        self._config_hash, self._keep = config_hash, keep
        self._environment = dict(environment or {})
        self._on_saved, self._on_failed = on_saved, on_failed
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._saves = 0
        self._deadline = 0.0
        self._error: CheckpointError | None = None
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

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, shared: Any, own: Any, *, timeout: float = PART_TIMEOUT_SECONDS) -> float:
        """Begin to save `step`; returns the seconds that the caller was held up.

        Raises UnsupportedState where the state holds something that cannot be saved.
        """
        began = time.perf_counter()
        self.join()
        state = {"own": own, "shared": shared} if self._rank == 0 else {"own": own}
        skeleton, tensors = pack(state)
        staged = self._stage(tensors)
        stall = time.perf_counter() - began
        self._error = None
        self._saves += 1
        self._deadline = time.monotonic() + timeout
        self._thread = threading.Thread(
            target=self._write,
            args=(step, skeleton, staged, began, stall),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()
        return stall

    def join(self) -> None:
        """Wait until no save is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def hurry(self, seconds: float) -> None:
        """Give peers no longer than this to bring their parts of the save in flight."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def wait(self) -> None:
        """Wait for the save in flight. Raises the CheckpointError it ended with.

        On rank 0 the checkpoint is then durable, on others their part of it.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        staged: dict[str, torch.Tensor] = {}
        on_gpu = False
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                pinned = tensor.is_cuda
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            buffer.copy_(tensor, non_blocking=True)
            on_gpu |= tensor.is_cuda
            staged[name] = buffer
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self._buffers = staged
        return staged

    def _write(
        self, step: int, skeleton: Any, tensors: dict[str, torch.Tensor], began: float, stall: float
    ) -> None:
        partial: Path | None = None
        try:
            check_fence(self._run, self._attempt)
            partial = self._directory.begin(step, self._saves)
            written = tensorfile.write(partial / part_file(self._rank), skeleton, tensors)
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
        self._on_saved(Saved(step, manifest.size, self.last_cost, stall, manifest.digest))
        try:
            self._directory.prune(self._keep, self.bad_steps)
            self.bad_steps.clear()
        except (OSError, CheckpointError) as error:
            self._on_failed(step, CheckpointError(f"step {step} is saved, but old ones stay: {error}"))

    def _commit(self, step: int, partial: Path) -> Manifest:
        late = lambda: time.monotonic() > self._deadline  # noqa: E731
        manifest = Manifest(
            step=step,
            attempt=self._attempt,
            world_size=self._world_size,
            config_hash=self._config_hash,
            files=self._directory.await_parts(partial, self._world_size, late),
            time=time.time(),
            environment=self._environment,
        )
        return self._directory.commit(partial, manifest)

    def _fail(self, step: int, partial: Path | None, error: Exception) -> None:
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
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
