"""What is done to the ranks of an attempt by a process beside them: in a replica's container, by its own
Python, or on this machine.

kube/execution.py sends the text of this file into containers, so it is the same for every image that can run
a replica: standard library only, nothing is written to any disk, and nothing of the trainer is asked for. It
says what came of it in one line of JSON, `{"error": "..."}` where it could not be done.

    freeze RANK        SIGSTOP of all processes of a rank
    overfill BYTES     use up the container's memory, so that the kernel kills a rank for it
    stacks SECONDS     end the ranks by SIGABRT, upon which Python's faulthandler writes where they stand

Before that SIGABRT a rank's main thread is asked for its own stack, by a signal that a rank of `Run` knows. A
process writes the stacks of all its threads while the others run on, which can crash it, and the main thread,
the one that matters, comes last.

Ranks are found as the local engine finds them (local/process.py): by what torchrun and the platform put into
their environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress

UID = "HOLDFAST_ATTEMPT_UID"
CHUNK = 8 << 20
STACK_SIGNAL = 60
"""As the trainer's contract has it."""
SOON = 2.0
"""Seconds for a main thread to write its stack: one that waits for a disk in the kernel hears no signal."""


def environment(pid: int) -> dict[bytes, bytes]:
    """Empty where it has ended, or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            return {name: value for name, _, value in pairs}
    except OSError:
        return {}


def supervises(pid: int) -> bool:
    """Whether it runs no rank, but looks after one."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"holdfast_trainer.supervise" in file.read()
    except OSError:
        return True


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def processes() -> dict[int, int]:
    """Of the attempt's ranks in this container, their supervisors too: the rank by pid. torchrun itself has
    no LOCAL_RANK."""
    uid = os.environb.get(UID.encode(), b"")
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            told = environment(int(name))
            if uid and told.get(UID.encode()) == uid and b"LOCAL_RANK" in told and alive(int(name)):
                found[int(name)] = int(told.get(b"RANK", b"-1"))
    return found


def ranks() -> dict[int, int]:
    return {pid: rank for pid, rank in processes().items() if not supervises(pid)}


def freeze(rank: int) -> dict[str, object]:
    stopped = [pid for pid, whose in processes().items() if whose == rank]
    if not stopped:
        return {"error": f"rank {rank} has not started yet"}
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return {"stopped": stopped}


def overfill(most: int) -> dict[str, object]:
    """Memory of a file that is nobody's: the container is charged with it, and the largest of its processes
    dies for it, which this one is not. It goes as soon as a rank has ended, or with the container."""
    victims = list(ranks())
    if not victims:
        return {"error": "none of its ranks has started yet, so none can grow"}
    for pid in victims:
        with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("1000")
    memory = os.memfd_create("holdfast-drill")
    if os.fork() == 0:  # whoever asked need not wait, and his end is not this one's
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        written, zeros = 0, bytes(CHUNK)
        with suppress(OSError):
            while written < most and all(alive(pid) for pid in victims):
                written += os.write(memory, zeros)
        os._exit(0)
    return {"filling": most}


def signals(pid: int, *names: str) -> int:
    """A mask of /proc/PID/status, or several as one; of the main thread where it is about a thread's."""
    mask = 0
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in names:
                    mask |= int(value, 16)
    except OSError:
        pass
    return mask


def tell_main_stacks(pids: list[int]) -> None:
    """Have the main threads of those that know the signal write their stacks, and wait until they have."""
    wanted = 1 << (STACK_SIGNAL - 1)
    asked = [pid for pid in pids if signals(pid, "SigCgt") & wanted]
    for pid in asked:
        # kill() would let any thread take it; a C library without tgkill leaves it at SIGABRT
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).tgkill(pid, pid, STACK_SIGNAL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    # It waits for the thread to take it, and is blocked while the thread writes.
    deadline = time.monotonic() + SOON
    while any(signals(pid, "SigPnd", "SigBlk") & wanted for pid in asked) and time.monotonic() < deadline:
        time.sleep(0.01)


def stacks(seconds: float) -> dict[str, object]:
    """Waits so long for the ranks to end, and for their supervisors, who pass on what they say."""
    everybody = processes()
    told = {pid: rank for pid, rank in everybody.items() if not supervises(pid)}
    tell_main_stacks(list(told))
    for pid in told:
        with suppress(OSError, ValueError):
            # 1, not 0: a core that is piped to a program is dumped whatever the limit, but for this one
            resource.prlimit(pid, resource.RLIMIT_CORE, (1, 1))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    for pid in everybody:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + seconds
    while any(map(alive, everybody)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"asked": sorted(set(told.values())), "silent": sorted({told[pid] for pid in told if alive(pid)})}


ACTIONS = {
    "freeze": lambda word: freeze(int(word)),
    "overfill": lambda word: overfill(int(word)),
    "stacks": lambda word: stacks(float(word)),
}

if __name__ == "__main__":
    print(json.dumps(ACTIONS[sys.argv[1]](sys.argv[2])), flush=True)
