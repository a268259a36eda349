"""Memory for states: large mappings, and how much is free for this process's container and machine."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated before something must be swapped or killed; None where unknown.

    The least of the machine's MemAvailable (proc(5)) and what the control groups of this process have left,
    version 2 or 1 (their page cache can be reclaimed, so that counts as free): its own, which a container
    sees as the topmost one, and all above it, any of which may have a limit. `root` is where /proc and /sys
    are.
    """
    v2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
    v1 = (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    )
    groups = root / "sys/fs/cgroup"
    known = [
        _machine(root),
        *(_group(directory, *v2) for directory in control_groups(root, groups, "")),
        *(_group(directory, *v1) for directory in control_groups(root, groups / "memory", "memory")),
    ]
    return min((free for free in known if free is not None), default=None)


def control_groups(root: Path, mounted: Path, controller: str) -> list[Path]:
    """This process's group of a controller (empty: of version 2) and those above it, as cgroups(7) has it.
    A path that belongs to another namespace is not there to be read."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controller in controllers.split(","):
            own = mounted / path.lstrip("/")
            return [own, *(above for above in own.parents if above.is_relative_to(mounted))]
    return [mounted]


def address_space() -> int | None:
    """Bytes that this process alone may still map (`ulimit -v`), be they used or not; None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return max(0, limit - pages * resource.getpagesize())


def ranks_here() -> int:
    """How many ranks share this machine's memory, as torchrun tells; 1 where nobody does."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) else 1


def _machine(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group(directory: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    try:
        bound = int((directory / limit).read_text(encoding="ascii"))  # "max": no limit
        used = int((directory / usage).read_text(encoding="ascii"))
        lines = (directory / "memory.stat").read_text(encoding="ascii").splitlines()
        stat = dict(line.split() for line in lines)
        reclaimable = sum(int(stat.get(name, 0)) for name in cache)
    except (OSError, ValueError):
        return None
    return max(0, bound - used + reclaimable)


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
