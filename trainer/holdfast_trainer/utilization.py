"""How busy what a rank computes on is: its GPU as NVML says, or the cores that its process may compute on.

NVML's utilisation of a GPU is the share of time in which at least one kernel ran on it, anybody's: where
several share a GPU it is of all of them, and how much of the GPU a kernel used it does not tell. Whether
several do is told apart, by the number of processes that NVML has seen compute on it: which of them is this
one is not asked, as they may have other numbers there. In a container it may see none but those of that
container, and then a neighbour goes unseen. NVML is asked in a thread of its own, for a driver may hang,
which then costs the figure and nothing else; what is still there to crash is no more than NCCL and torch call
in this process too. The GPU is named by the UUID that CUDA has of it, whatever number it has here. What is
not told (by a MIG device, without nvidia-ml-py, of a driver that says no) is no figure.

On a CPU it is the processor time of all threads of this process, against that of as many cores as it may
compute on at a time. Threads that wait for others by spinning count as busy; the kernel cannot tell them.
No torch here.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from .memory import control_groups

log = logging.getLogger("holdfast")

SAMPLE_SECONDS = 0.5
"""Between two questions to NVML, which looks at about as long a time itself."""


class Reading(NamedTuple):
    """Seconds since some beginning."""

    busy: float
    known: float
    """Those of which it is known how busy they were."""
    shared: float = 0.0
    """Those in which more than one process was found to compute there."""


class Use(Protocol):
    """Of what one rank computes on."""

    @property
    def of(self) -> Literal["cpu", "gpu"]: ...

    def read(self) -> Reading: ...

    def close(self) -> None:
        """No more questions."""


class Meter:
    """The share of time from one question to the next."""

    def __init__(self, use: Use) -> None:
        self.of = use.of
        self._read = use.read
        self._before = use.read()

    def share(self) -> float | None:
        """0 to 1 since the last question (of a CPU more where further threads helped); None: not known."""
        return self.shares()[0]

    def shares(self) -> tuple[float | None, float | None]:
        """As `share`, and of the same time that in which others computed there too."""
        before, self._before = self._before, self._read()
        known = self._before.known - before.known
        if known <= 0:
            return None, None
        return (self._before.busy - before.busy) / known, (self._before.shared - before.shared) / known


class CpuUse:
    """Of `cores` by this process."""

    of: Literal["cpu"] = "cpu"

    def __init__(self, cores: float) -> None:
        self._cores = cores

    def read(self) -> Reading:
        return Reading(time.process_time() / self._cores, time.perf_counter())

    def close(self) -> None:
        """Nothing was started."""


class GpuUse:
    """Of the GPU with this UUID, by all that use it."""

    of: Literal["gpu"] = "gpu"

    def __init__(self, uuid: str, *, every: float = SAMPLE_SECONDS) -> None:
        self._uuid, self._every = uuid, every
        self._reading = Reading(0.0, 0.0)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="gpu-use", daemon=True).start()

    def read(self) -> Reading:
        return self._reading

    def close(self) -> None:
        self._closed.set()  # nobody waits for the thread: it may hang in the driver

    def _watch(self) -> None:
        try:
            import pynvml  # nvidia-ml-py, which only what has a GPU needs
        except ImportError as error:
            log.info("no figure of the GPU's utilisation: %s; pip install nvidia-ml-py", error)
            return
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            pynvml.nvmlDeviceGetUtilizationRates(handle)
        except pynvml.NVMLError as error:
            log.info("no figure of the GPU's utilisation: NVML says %s of %s", error, self._uuid)
            return
        while not self._closed.wait(self._every):
            try:
                percent = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            except pynvml.NVMLError:
                continue
            if 0 <= percent <= 100:
                busy, known, shared = self._reading
                shared += self._every if _computing(pynvml, handle) > 1 else 0.0
                self._reading = Reading(busy + self._every * percent / 100, known + self._every, shared)


RECENT_SECONDS = 2.0
"""NVML samples what each process computed about once a second."""


def _computing(pynvml: Any, handle: Any) -> int:
    """How many processes computed on this GPU of late; 0 where NVML does not tell, as of a MIG device."""
    since = int((time.time() - RECENT_SECONDS) * 1e6)
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except pynvml.NVMLError:
        return 0
    return len({one.pid for one in samples if one.timeStamp > since and one.smUtil})


def process_age(process: Path) -> float:
    """Seconds since the process behind `process`, such as /proc/self, began (proc_pid_stat(5), field 22).
    Raises OSError, and ValueError or IndexError where the kernel tells otherwise."""
    stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
    ticks = int(stat.rpartition(")")[2].split()[19])  # the command's name may hold spaces and brackets
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def cores_allowed(root: Path = Path("/")) -> float:
    """How many this process may compute on at a time: by its affinity, and by the quotas of its control group
    and of those above it, any of which may have one."""
    groups = root / "sys/fs/cgroup"
    v2 = (_quota(one / "cpu.max") for one in control_groups(root, groups, ""))
    v1 = (
        _quota(one / "cpu.cfs_quota_us", one / "cpu.cfs_period_us")
        for one in control_groups(root, groups / "cpu", "cpu")
    )
    return min(len(os.sched_getaffinity(0)), *v2, *v1)


def _quota(*files: Path) -> float:
    """Of version 2 (one file with quota and period) or 1 (one each); infinite where there is none."""
    try:
        quota, period = " ".join(file.read_text(encoding="ascii") for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf
