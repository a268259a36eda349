"""How much memory something takes: on a GPU what the allocator reserved, on a CPU what became resident.

On a CPU the high-water mark of resident memory counts mapped files too (libraries whose code is used for
the first time, the tokens that were read), which another process or the kernel shares or takes back. So
files are taken off, and memory that the allocator kept from before is given back first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import torch

from .memory import address_space, free_memory, ranks_here

_FILES = ("RssFile", "RssShmem")


def warm_up(device: torch.device) -> None:
    """Take what a first step of any model leaves behind: code that was read, threads, libraries' memory."""
    layer = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(64, 64, device=device)).relu().sum().backward()
    optimizer.step()


def peak_memory(device: torch.device) -> int:
    """Bytes that this process took at most since it began: of a GPU for tensors, else resident in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Footprint:
    """Counts from when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_reserved(device)
            return
        _trim()
        _from_now_on()
        self._before, *files = _status("RssAnon", *_FILES)
        self._peak, self._files = 0, sum(files)
        # As it is now: what is freed later may stay mapped, and be used again.
        self._may_map = address_space()

    def look(self) -> None:
        """Take note of the peak since the last look. What the kernel takes back of files meanwhile, where
        memory is short, does not count as taken; it hides as much of a peak after it, so look before one."""
        if self._device.type == "cuda":
            return
        highest, now, *files = _status("VmHWM", "RssAnon", *_FILES)
        before, self._files = self._files, sum(files)
        self._peak = max(self._peak, max(now, highest - max(before, self._files)) - self._before)
        _from_now_on()

    def peak(self) -> int:
        """Bytes at most until now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) - self._before
        self.look()
        return self._peak

    def room(self) -> int:
        """Bytes that could be taken in all, what was taken since included."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return int(free) + torch.cuda.memory_reserved(self._device) - self._before
        free_now = free_memory()
        taken = max(0, _status("RssAnon")[0] - self._before)
        rooms = [] if free_now is None else [taken + free_now // ranks_here()]
        rooms += [] if self._may_map is None else [self._may_map]
        return min(rooms) if rooms else self.peak()


def _from_now_on() -> None:
    """VmHWM starts anew (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def _trim() -> None:
    """Give back what the process's malloc keeps of memory that was freed: glibc's, and tcmalloc, which keeps
    all of it where it was preloaded (see allocator.py); others keep little."""
    for give_back, *arguments in (("MallocExtension_ReleaseFreeMemory",), ("malloc_trim", 0)):
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), give_back)(*arguments)


def _status(*names: str) -> list[int]:
    """Bytes, by the names of proc_pid_status(5)."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    told = dict(line.split(":", 1) for line in text.splitlines())
    return [int(told.get(name, "0").split()[0]) * 1024 for name in names]
