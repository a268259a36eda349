"""A cgroup for each replica: it holds its processes to the memory that the job asks for, where it asks, and
counts which of them the kernel has killed for memory, be it the group's or the machine's.

Needs a cgroup that this process may make groups in: as root, or where systemd delegates one to the user. An
address-space limit would be no way around it, for torch reserves far more than it uses. A group's name is a
function of attempt and replica: a controller that comes back finds it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from holdfast_trainer.contract import ENV_ATTEMPT_UID, exists, is_directory

MOUNT = Path("/sys/fs/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.oom_control")
_V2 = ("memory.max", "memory.events")
_UNLIMITED = 2**60
"""Version 1 has a number for no limit, the largest that fits into its pages."""
_HOG = """
import sys
open(sys.argv[1], "w").write("0")
taken = bytearray(int(sys.argv[2]))
"""


class MemoryGroup:
    """The cgroup of one replica of one attempt."""

    def __init__(self, parent: Path, uid: str, replica: int):
        digest = hashlib.sha256(uid.encode()).hexdigest()[:12]
        self._path = parent / f"holdfast-{digest}-{replica}"
        self._limit, self._events = _V1 if exists(parent / _V1[0]) else _V2

    def make(self, limit: int | None) -> None:
        """Raises OSError where it may not. `limit` is in bytes; swap does not extend it."""
        self._path.mkdir(exist_ok=True)
        if limit is None:
            return
        (self._path / self._limit).write_text(str(limit))
        for swap, value in (("memory.memsw.limit_in_bytes", limit), ("memory.swap.max", 0)):
            with suppress(OSError):  # a kernel may not count swap
                if exists(self._path / swap):
                    (self._path / swap).write_text(str(value))

    def add(self, pid: int) -> None:
        """Put a process under the limit, and all that it will start. Raises OSError."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def processes(self) -> frozenset[int]:
        """Their pids. Raises OSError."""
        return frozenset(map(int, (self._path / "cgroup.procs").read_text().split()))

    @property
    def limit(self) -> int | None:
        """In bytes; None where there is none, or no such group."""
        try:
            limit = int((self._path / self._limit).read_text())
        except (OSError, ValueError):
            return None
        return limit if limit < _UNLIMITED else None

    def kills(self) -> int | None:
        """How many of its processes the kernel has killed for memory; None where nobody counts them."""
        with suppress(OSError):
            for line in (self._path / self._events).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return None

    def overfill(self, uid: str, victims: list[int]) -> int:
        """Take as much memory as the limit is, so that the kernel kills `victims` for it. Returns the pid of
        the process that does, a child of ours. Raises OSError."""
        for pid in victims:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was seen
                Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        words = [sys.executable, "-c", _HOG, str(self._path / "cgroup.procs"), str(self.limit)]
        return os.posix_spawn(words[0], words, {ENV_ATTEMPT_UID: uid}, setsid=True)

    def remove(self) -> bool:
        """Whether it is no more. False where a process is still in it, be it one that the kernel is taking
        apart: then again later."""
        try:
            self._path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def parent_group(proc: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> Path | None:
    """Where groups that limit memory can be made; None where this process may not."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return None
    for number, controllers, path in lines:
        if "memory" in controllers.split(","):
            own = mount / "memory" / path.strip("/")
            here = own if is_directory(own) else mount / "memory"
        elif number == "0" and not controllers:
            # Beside our own group: one that holds processes can have no groups that limit anything.
            here = (mount / path.strip("/")).parent if path != "/" else mount
            enabled = here / "cgroup.subtree_control"
            if not exists(enabled) or "memory" not in enabled.read_text().split():
                continue
        else:
            continue
        if os.access(here, os.W_OK) and os.access(here / "cgroup.procs", os.W_OK):
            return here
    return None
