"""Processes of an attempt as /proc shows them.

Every process of an attempt inherits ENV_ATTEMPT_UID, so a scan of /proc/*/environ finds all of them:
those started by a controller that is gone, and helpers that made a session of their own. A pid alone
proves nothing (pids are used again); a pid with its start time, on one boot of the machine, does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import holdfast_controller
from holdfast_trainer.contract import ENV_ATTEMPT_UID, ENV_REPLICA

PROC = Path("/proc")
EXEC_TRIES, EXEC_SECONDS = 50, 0.001
"""How often a process that is becoming another program is looked at again, and how soon."""
_STARTED, _ARG_START = 19, 45
"""Of /proc/PID/stat, counted from the state: when it began, and where its words lie (proc_pid_stat(5), fields
22 and 48)."""
NOT_TO_BE_SEEN = (FileNotFoundError, ProcessLookupError, PermissionError)
"""How /proc says that a process has ended, or is another user's. What else keeps us from looking, as where
this process has no file descriptor left, says nothing of it, and who took it for an end would end a job."""
INSIDE = Path(holdfast_controller.__file__).with_name("inside.py")


@dataclass(frozen=True)
class ProcessId:
    """One process for ever: `started` is in clock ticks since boot, from /proc/PID/stat."""

    pid: int
    started: int


def boot_id() -> str:
    """Changes with every boot of the machine; pids of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> ProcessId | None:
    """The identity of a live process; None where there is none, or only a zombie. Raises OSError where nobody
    can tell."""
    try:
        stat = _stat(pid)
    except NOT_TO_BE_SEEN:
        return None
    if stat[0] in (b"Z", b"X"):
        return None
    return ProcessId(pid, int(stat[_STARTED]))


def alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def environment(pid: int) -> frozenset[bytes]:
    """The variables that a process was started with, `name=value` each.

    From the moment in which execve lets go of the old program until it has set up the new one, the kernel
    shows neither words nor variables of the process: such a one is looked at again, or it would escape.
    Raises OSError where it has ended, or is another user's.
    """
    before = 0
    for _ in range(EXEC_TRIES):
        if found := _read(pid, "environ"):
            return frozenset(found.split(b"\0"))
        # Its words may have come since; those of one program twice, and it was given no variables.
        words = _words(pid)
        if (words and words == before) or not _has_program(pid):
            break
        before = words
        time.sleep(EXEC_SECONDS)
    return frozenset()


def _read(pid: int, name: str) -> bytes:
    # No buffer, no Path: it is read of every process of the machine.
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def _stat(pid: int) -> list[bytes]:
    """From the state on: the command's name before it may hold spaces and brackets."""
    stat = _read(pid, "stat")
    return stat[stat.rindex(b")") + 2 :].split()


def _words(pid: int) -> int:
    """The address of the words that it was started with, another for each program that it becomes; 0 where it
    has none yet."""
    if not _read(pid, "cmdline"):
        return 0
    return int(_stat(pid)[_ARG_START])


def _has_program(pid: int) -> bool:
    try:
        return bool(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def find(uid: str, replica: int | None = None, rank: int | None = None) -> list[ProcessId]:
    """Live processes of an attempt (of one replica, or rank). Costs about 20 microseconds a process here.

    Raises OSError where nobody can tell.
    """
    wanted = {f"{ENV_ATTEMPT_UID}={uid}".encode()}
    if replica is not None:
        wanted.add(f"{ENV_REPLICA}={replica}".encode())
    if rank is not None:
        wanted.add(f"RANK={rank}".encode())
    found = []
    for pid, names in _environments():
        with suppress(*NOT_TO_BE_SEEN):
            if wanted <= names and (process := identify(pid)):
                found.append(process)
    return found


def attempts() -> frozenset[str]:
    """The uids of all attempts, anybody's, of which there is a process: for many it is one look as `find` is
    for one. Raises OSError likewise."""
    named = f"{ENV_ATTEMPT_UID}=".encode()
    found = {one for _, names in _environments() for one in names if one.startswith(named)}
    return frozenset(os.fsdecode(one.removeprefix(named)) for one in found)


def _environments() -> Iterator[tuple[int, frozenset[bytes]]]:
    """Of every process that can be seen. Raises OSError where nobody can tell."""
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        with suppress(*NOT_TO_BE_SEEN):
            yield int(entry.name), environment(int(entry.name))


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signal exactly this process: a pidfd cannot come to mean another one."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if alive(process):
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def kill_all(uid: str, replica: int | None = None) -> int:
    """SIGKILL everything of an attempt (of a replica), again until a scan finds nothing it has not killed.

    Returns how many processes were signalled. Does not wait for them to be gone.
    """
    killed: set[ProcessId] = set()
    while fresh := [p for p in find(uid, replica) if p not in killed]:
        for process in fresh:
            send(process, signal.SIGKILL)
        killed.update(fresh)
    return len(killed)


def ranks_of(uid: str, replica: int | None = None) -> list[ProcessId]:
    """What the ranks of an attempt (of a replica) run, without those that supervise it."""
    found = []
    for entry in find(uid, replica):
        with suppress(*NOT_TO_BE_SEEN):
            supervises = b"holdfast_trainer.supervise" in _read(entry.pid, "cmdline")
            if not supervises and any(one.startswith(b"RANK=") for one in environment(entry.pid)):
                found.append(entry)
    return found


def tell_stacks(uid: str, seconds: float) -> int:
    """Start to end the ranks of an attempt so that they write where they stand, also those that are stopped.

    Returns the pid of the child that does it, to be reaped; it is found as one of the attempt.
    """
    words = [sys.executable, "-I", str(INSIDE), "stacks", str(seconds)]
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    told = {**os.environ, ENV_ATTEMPT_UID: uid}
    return os.posix_spawn(words[0], words, told, file_actions=[nowhere], setsid=True)


def reap(pid: int) -> bool:
    """Bury a child that has ended. False where it has not; a process that is no child of ours is no error."""
    return _bury(pid)[0]


def ended_well(pid: int) -> bool:
    """Bury a child that has ended; whether its exit code was 0. Nobody knows it of one that is not ours."""
    return _bury(pid)[1] == 0


def _bury(pid: int) -> tuple[bool, int | None]:
    """Whether it needs no more burying, and the exit code where it was ours."""
    try:
        buried, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True, None
    return buried == pid, os.waitstatus_to_exitcode(status) if buried == pid else None


def out_of_memory_kills() -> int:
    """Processes the kernel killed for memory on this machine since boot; 0 where it does not say."""
    try:
        text = (PROC / "vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0
