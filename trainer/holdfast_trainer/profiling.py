"""A window of steps written as a trace: what every operator and kernel did, for chrome://tracing or Perfetto.

The profiler costs a multiple of a step while it is on, so it is on for a few steps in the middle of a run,
on rank 0 alone. Spans (data, forward, backward, optimizer) are named in the trace; on a GPU they are NVTX
ranges too, always, so that nsys shows them without any setting.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger("holdfast")

WRITE_SECONDS = 5.0
"""That a notice has to leave for a trace to be written: a GPU's has a hundred megabytes."""


class Window:
    """Profiles the steps of `window` that this attempt does, into a file in `directory`."""

    def __init__(self, window: range, directory: Path, device: torch.device) -> None:
        self._window, self._directory, self._device = window, directory, device
        self._profile: profile | None = None
        self._first = 0

    @property
    def open(self) -> bool:
        """Whether steps are being recorded."""
        return self._profile is not None

    def begin(self, step: int) -> None:
        """Step `step` (0 is the first) begins."""
        if self._profile is None and step in self._window:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            # PyTorch 2.11 warns that it keeps the last cycle alone, of which there is one here.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._first, self._profile = step, profile(activities=activities)
            self._profile.start()

    def end(self, step: int) -> None:
        """Step `step` has ended."""
        if self._profile is not None and step + 1 not in self._window:
            self.close(step)

    def close(self, last: int, seconds: float = math.inf) -> None:
        """Write what was recorded up to step `last`; where that fails, or `seconds` are too few, say so.

        A profiler that is on as the interpreter ends takes the process with it (SIGSEGV).
        """
        if self._profile is None:
            return
        finished, self._profile, self._window = self._profile, None, range(0)
        path = self._directory / f"trace-{self._first}-{last}.json"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        finished.stop()
        if seconds < WRITE_SECONDS:
            log.warning("no time is left to write the trace of steps %d to %d", self._first, last)
            return
        finished.export_chrome_trace(str(path))  # raises nothing where it fails
        if os.path.isfile(path) and path.stat().st_size:
            log.info("steps %d to %d were profiled: open %s in Perfetto", self._first, last, path)
        else:
            log.warning("the trace of steps %d to %d could not be written to %s", self._first, last, path)
