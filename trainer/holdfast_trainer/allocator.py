"""Which malloc a training on a CPU has: tcmalloc, where the machine has that.

Each step asks for the blocks that the one before gave back. The C library returns large ones to the kernel,
which has to find and to zero their pages when they are asked for again: 18,000 page faults in a step of 10 M
parameters. With tcmalloc, which keeps them, and with huge pages for PyTorch's larger tensors it is 300, and a
step takes 0.94 of the time (`make bench-trainer`). A process has it from its first instruction on or not at
all: a command that finds it starts itself again, with it in LD_PRELOAD, before anything else.

Not where there is a GPU, whose memory comes from elsewhere: that was never measured. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

LIBRARY = "libtcmalloc_minimal.so.4"
PACKAGE = "libtcmalloc-minimal4"
"""Debian's and Ubuntu's."""
MULTIARCH = Path(f"/usr/lib/{platform.machine()}-linux-gnu")
"""Where these have it."""
PLACES = (MULTIARCH, Path("/usr/lib64"), Path("/usr/local/lib"), Path("/usr/lib"))
GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""There where a driver is, whether or not a process may use its devices."""
PRELOAD, HUGE_PAGES = "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE"
TUNABLES, TUNING = "GLIBC_TUNABLES", "MALLOC_"


def library(places: Sequence[Path] = PLACES, gpus: Sequence[Path] = GPUS) -> Path | None:
    """What to take, where steps are done on the CPU and this machine has it."""
    if any(os.path.exists(path) for path in gpus):
        return None
    return next((there for place in places if os.path.exists(there := place / LIBRARY)), None)


def preload(environment: MutableMapping[str, str], found: Path | None) -> bool:
    """Have a program started with `environment` take its memory from there; False where nothing changed.

    What the user says stays: LD_PRELOAD, be it empty, or how the C library's malloc is to work.
    """
    said = any(name in (PRELOAD, TUNABLES) or name.startswith(TUNING) for name in environment)
    if found is None or said:
        return False
    environment[PRELOAD] = str(found)
    environment.setdefault(HUGE_PAGES, "1")
    return True


def start_again() -> None:
    """Go on as the same command with another malloc, where there is a better one.

    A program that goes on in a forked process (in_place.py) was never started: it has what its parent has.
    """
    started = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] == sys.argv[1:]
    if started and preload(os.environ, library()):
        with contextlib.suppress(OSError):  # then as it is
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def preloaded(environment: Mapping[str, str]) -> bool:
    """Whether a process of this environment has another malloc than the C library's, whichever it is."""
    return "malloc" in environment.get(PRELOAD, "")
