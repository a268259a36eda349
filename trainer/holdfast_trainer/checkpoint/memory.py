"""Memory for states: large mappings, and how much is free for this process's container and machine."""

from __future__ import annotations

import mmap
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated before something must be swapped or killed; None where unknown.

    The lesser of the machine's MemAvailable (proc(5)) and what the control group has left (cgroup v2:
    its page cache can be reclaimed, so that counts as free). `root` is where /proc and /sys are.
    """
    known = [free for free in (_machine(root), _group(root / "sys/fs/cgroup")) if free is not None]
    return min(known, default=None)


def _machine(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group(directory: Path) -> int | None:
    try:
        limit = int((directory / "memory.max").read_text(encoding="ascii"))  # "max": no limit
        used = int((directory / "memory.current").read_text(encoding="ascii"))
        stat = dict(
            line.split() for line in (directory / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    except (OSError, ValueError):
        return None
    return max(0, limit - used + cache)


def huge_pages(size: int) -> mmap.mmap:
    """`size` bytes of memory, not touched yet, in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(memory, "MADV_HUGEPAGE")
    return memory


def advise(memory: mmap.mmap, advice: str) -> None:
    """Tell the kernel, where it knows such advice: without it all is slower, not wrong."""
    if hasattr(mmap, advice):
        try:
            memory.madvise(getattr(mmap, advice))
        except OSError:
            pass
