"""What one rank tells of its run: ledger and steps.jsonl, figures for Prometheus and /progress, traces.

`Run` says when a step begins and ends; everything that listens hangs here. Rank 0's figures are served and
written; the others keep theirs, which costs next to nothing and keeps one way of doing it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from prometheus_client import CollectorRegistry

from . import contract
from .contract import Progress, RunDir
from .endpoint import Endpoint
from .epochs import Epochs
from .footprint import peak_memory
from .ledger import Journal
from .parallel import Gang
from .place import Place, cannot_begin
from .profiling import Window
from .spans import Spans, gemm_peak_once
from .steplog import StepLog
from .telemetry import Telemetry
from .tensorboard import TensorBoard
from .utilization import CpuUse, GpuUse, Meter, Use, cores_allowed

LOOK_SECONDS = 1.0
"""Memory and utilisation are looked at so often at most: memory takes longer than all else that is told of a
step, and a share of a shorter time says nothing."""

STILL_STEPS = 10
"""See contract.STILL_SECONDS."""


class Account:
    """Of one rank in one attempt."""

    def __init__(
        self, run_dir: RunDir, attempt: int, gang: Gang, place: Place, *, profile: range, tensorboard: bool
    ) -> None:
        """On rank 0 serves the port at once. `profile` are steps to trace, counted from 0.

        Raises CheckpointError where it cannot write there, StorageUnavailable where that may pass.
        """
        self._run_dir, self._attempt, self._gang = run_dir, attempt, gang
        try:  # rank 0 could, maybe on another machine
            self.journal = Journal(run_dir, attempt, first=gang.rank == 0)
        except OSError as error:
            raise cannot_begin(run_dir, error) from error
        self.telemetry = Telemetry(attempt, gang.world_size)
        self.spans = Spans(gang.device)
        first = gang.rank == 0
        self.steps = StepLog(self.spans, self.telemetry, self.journal if first else None, gang.world_size)
        self._window = Window(profile if first else range(0), run_dir.attempt(attempt), gang.device)
        self._looked = float("-inf")
        self._use: Use | None = None
        self._meter: Meter | None = None
        """Of the time between two looks, on rank 0: the others' figures are not told."""
        self._wants_tensorboard = tensorboard and first
        self._endpoint: Endpoint | None = None
        self.quiet: Callable[[], tuple[float, float | None]] = lambda: (0.0, None)
        """For how long no step was done, and how long that may be (see Watchdog.quiet)."""
        if first:
            self._endpoint = Endpoint(place.host, place.port, self._registry, self._progress, run_dir)
            try:
                contract.replace_durably(run_dir.progress_address(attempt), self._endpoint.address)
            except OSError as error:
                raise cannot_begin(run_dir, error) from error

    def _still(self, quiet_seconds: float) -> bool:
        """Whether nothing was done for so long that what the newest steps took is no speed of now."""
        usual = self.telemetry.progress.step_seconds or 0.0
        return quiet_seconds > max(contract.STILL_SECONDS, STILL_STEPS * usual)

    def _registry(self) -> CollectorRegistry:
        if self._still(self.quiet()[0]):
            self.telemetry.forget_rates()
        return self.telemetry.registry

    def _progress(self) -> Progress:
        quiet_seconds, quiet_limit = self.quiet()
        still = self._still(quiet_seconds)
        now = self.telemetry.without_rates() if still else self.telemetry.progress
        return replace(now, quiet_seconds=quiet_seconds, quiet_limit=quiet_limit, asked=time.time())

    def begin(
        self,
        step: int,
        total: int,
        durable_step: int,
        flops_per_token: float | None,
        dtype: torch.dtype,
    ) -> None:
        """The loop begins after `step` steps; measures the device's peak where MFU is to be known."""
        peak = None
        if flops_per_token:
            peak = gemm_peak_once(self._gang.device, dtype, torch.get_num_threads())
        self.telemetry.begin(step, total, durable_step, flops_per_token, peak)
        if self._gang.rank == 0 and self._use is None:
            self._use = _use_of(self._gang.device)
        if self._use is not None:
            self._meter = Meter(self._use)
            self.steps.watch(self._use)
        if self._wants_tensorboard and self.steps.tensorboard is None:
            self.steps.tensorboard = TensorBoard(self._run_dir.path / "tensorboard", self._attempt, step)
        self.steps.restart_clock()

    def count_epochs(self, steps_an_epoch: float | None, done: int) -> None:
        """So many steps go through the data once (None: not known), and `done` were done before. A loop that
        goes on after one that was left goes on with the sums of its epoch."""
        if steps_an_epoch == self.telemetry.steps_an_epoch:
            return
        self.steps.epochs = None if steps_an_epoch is None else Epochs(steps_an_epoch, done)
        self.telemetry.steps_an_epoch = steps_an_epoch

    def begin_step(self, step: int) -> None:
        """Step `step` (0 is the first) begins now."""
        self._window.begin(step)
        self.spans.named = self._window.open
        self.steps.begin()

    def end_step(self, step: int, *, owes_counts: bool) -> None:
        """Step number `step` (1 is the first) is done; `owes_counts`: what it worked on is to come."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self.telemetry.memory(peak_memory(self._gang.device))
            if self._meter is not None:
                self.telemetry.utilization(self._meter.of, self._meter.share())
        self.steps.end(step, owes_counts=owes_counts)
        self._window.end(step - 1)

    def stop(self, step: int, seconds: float) -> None:
        """No step comes after `step`, and this long is left for what it would be a pity to lose."""
        self._window.close(step - 1, seconds)

    def close(self, step: int) -> None:
        """The program ends after `step` steps."""
        self._window.close(step - 1)
        if self._use is not None:
            self._use.close()
        if self.steps.tensorboard is not None:
            self.steps.tensorboard.close()
        if self._endpoint is not None:
            self._endpoint.close()


def _use_of(device: torch.device) -> Use:
    """Of a GPU, whoever uses it, or of the cores that this process's threads may have."""
    if device.type == "cuda":
        return GpuUse(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return CpuUse(min(torch.get_num_threads(), cores_allowed()))
