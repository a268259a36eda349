"""Starts ranks by forking, so that a test does not pay for `import torch` once a rank.

Run as a script it imports what ranks need, then reads orders from standard input, a JSON object each:
`{"argv": [...], "env": {...}, "log": path}` forks a process that runs the script in `argv` as a rank that
torchrun has forked does (in_place.py), in a session of its own, and answers its pid; `{"poll": pid}` answers
its return code as `Popen.returncode` has it, or null while it runs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from holdfast_trainer import in_place
from holdfast_trainer.importing import without_collector

COMPILER = "torch._inductor.compile_fx"
"""Takes a second, and makes forks heavier: for ranks that have its cache, and those after them."""

LARGE = 2 * 2**20
MADV_COLLAPSE = 25
"""Of Linux' mman.h; Python does not know it yet."""


def prepare(*modules: str) -> None:
    """Import what ranks need, once for all of them."""
    with without_collector():  # nothing of this is looked at again, when a fork ends
        for name in modules:
            importlib.import_module(name)


def in_large_pages() -> None:
    """Where the kernel can (6.1), keep this process's memory in pages of 2 MiB.

    A fork copies the table of all pages, and its end takes that apart: of a hundred thousand small ones 30 to
    40 ms together, of two hundred large ones 5. What a rank then writes to is copied in small pieces still.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if mine := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\b", line):  # no file's
            first, end = -(-int(mine[1], 16) // LARGE) * LARGE, int(mine[2], 16) // LARGE * LARGE
            if first < end:
                madvise(first, end - first, MADV_COLLAPSE)  # as far as it goes: nothing depends on it


def serve() -> dict[str, object] | None:
    """Answer orders until there are no more; in a forked process, return the order it is to carry out."""
    # All of this has been imported by now.
    import torch

    from holdfast_trainer.compilation import CACHE
    from holdfast_trainer.spans import gemm_peak_once

    # Nearly all of them train in fp32. Each alone takes a sixth of a second for it.
    gemm_peak_once(torch.device("cpu"), torch.float32, torch.get_num_threads())
    in_large_pages()
    running: set[int] = set()
    ended: dict[int, int] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid = order["poll"]
            if pid in running:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    running.discard(pid)
                    ended[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps(ended.get(pid)), flush=True)
            continue
        if CACHE in order["env"]:
            prepare(COMPILER)
        pid = os.fork()
        if pid == 0:
            return dict(order)
        running.add(pid)
        ended.pop(pid, None)  # of another one, which had this number before
        print(pid, flush=True)
    return None


def become(order: dict[str, object]) -> NoReturn:
    """Turn this fork into the process that was ordered."""
    os.setsid()
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["env"])  # type: ignore[call-overload]
    script, *arguments = order["argv"]  # type: ignore[misc]
    in_place.become(in_place.Program(module=None, script=script, arguments=tuple(arguments)))


if __name__ == "__main__":
    # torch._dynamo: what cuts a model over the ranks imports it.
    prepare("torch._inductor", "torch._dynamo", "torch.distributed", "holdfast_trainer.run")
    mine = serve()
    if mine is None:
        os._exit(0)
    become(mine)
