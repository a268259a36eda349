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
from typing import Any

import torch

from ..contract import RunDir
from . import tensorfile
from .directory import CheckpointDirectory, CheckpointError, check_fence, part_file
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
        self._run = run
        self._directory = CheckpointDirectory(run, attempt)
        self._attempt, self._rank, self._world_size = attempt, rank, world_size
        self._config_hash, self._keep = config_hash, keep
        self._environment = dict(environment or {})
        self._on_saved, self._on_failed = on_saved, on_failed
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.last_cost: float | None = None
        """Seconds until durable of the newest save; what `auto` plans with."""
        self.bad_steps: set[int] = set()
        """Checkpoints that did not verify at load; pruned once a newer one is durable."""

    @property
    def durable_step(self) -> int:
        """The newest committed step, of whichever attempt; 0 where there is none."""
        return max(self._directory.steps(), default=0)

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
        self._thread = threading.Thread(
            target=self._write,
            args=(step, skeleton, staged, began, stall, time.monotonic() + timeout),
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
        self,
        step: int,
        skeleton: Any,
        tensors: dict[str, torch.Tensor],
        began: float,
        stall: float,
        deadline: float,
    ) -> None:
        try:
            manifest = self._write_part_and_commit(step, skeleton, tensors, deadline)
        except (OSError, CheckpointError) as error:
            self._fail(step, error)
            return
        if manifest is None:
            return
        self.last_cost = time.perf_counter() - began
        self._on_saved(Saved(step, manifest.size, self.last_cost, stall, manifest.digest))
        try:
            self._directory.prune(self._keep, self.bad_steps)
            self.bad_steps.clear()
        except (OSError, CheckpointError) as error:
            self._on_failed(step, CheckpointError(f"step {step} is saved, but old ones stay: {error}"))

    def _write_part_and_commit(
        self, step: int, skeleton: Any, tensors: dict[str, torch.Tensor], deadline: float
    ) -> Manifest | None:
        check_fence(self._run, self._attempt)
        partial = self._directory.begin(step)
        written = tensorfile.write(partial / part_file(self._rank), skeleton, tensors)
        self._directory.report_part(step, self._rank, written)
        if self._rank != 0:
            return None
        manifest = Manifest(
            step=step,
            attempt=self._attempt,
            world_size=self._world_size,
            config_hash=self._config_hash,
            files=self._directory.await_parts(step, self._world_size, deadline),
            time=time.time(),
            environment=self._environment,
        )
        self._directory.commit(manifest)
        return manifest

    def _fail(self, step: int, error: OSError | CheckpointError) -> None:
        if isinstance(error, CheckpointError):
            self._error = error
        else:
            where = f" ({error.filename})" if error.filename else ""
            self._error = CheckpointError(f"step {step} could not be saved: {error.strerror or error}{where}")
            self._error.__cause__ = error
        if self._rank == 0:
            self._directory.abandon(step)
        else:
            self._directory.report_failure(step, self._rank, str(self._error))
        self._on_failed(step, self._error)

    @property
    def error(self) -> CheckpointError | None:
        """What the last save ended with, once it has."""
        return None if self.busy else self._error
