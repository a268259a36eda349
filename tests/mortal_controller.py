"""`holdfast up` that is killed by SIGKILL at one of its acts, and started again, and killed again.

`python mortal_controller.py DATA PORT SEED MOST LOG`: each controller dies at its n-th act, n drawn from 2 to
MOST; after DEATHS of them one lives. An act is what another process, or the next controller, can see: a write
to the job store (just before it is durable, and just after), a file of a run made, renamed or removed, a
process started or signalled. Prints a line for each death. Replicas start with tiny_torchrun.py. Each
controller is forked, so that none has to import what it needs.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiosqlite
from local_world import TINY

from holdfast_controller import __main__
from holdfast_controller.local.launch import Runtime

DEATHS = 30
"""A job whose starts they all cut short waits twice as long for each next one: for minutes, after ten."""
_FILES = frozenset({"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir"})


class Mortal:
    """This process, once it is a controller."""

    def __init__(self, acts: int) -> None:
        self._left = acts

    def act(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, event: str, words: tuple[Any, ...]) -> None:
        """An audit hook: called before the act."""
        writes = event == "open" and isinstance(words[2], int) and words[2] & (os.O_WRONLY | os.O_RDWR)
        if event == "os.posix_spawn" or ((writes or event in _FILES) and "/runs/" in str(words[0])):
            self.act()


def live(data: str, port: str, acts: int, log: str) -> None:
    """Be a controller."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    mortal = Mortal(acts)
    execute, send = aiosqlite.Connection.execute, signal.pidfd_send_signal

    def executed(self: aiosqlite.Connection, sql: str, *rest: Any) -> Awaitable[Any]:
        if sql != "COMMIT":
            return execute(self, sql, *rest)

        async def committed() -> Any:
            mortal.act()
            done = await execute(self, sql, *rest)
            mortal.act()
            return done

        return committed()

    def sent(*words: Any) -> None:
        mortal.act()
        send(*words)

    aiosqlite.Connection.execute = executed  # type: ignore[assignment,method-assign]
    signal.pidfd_send_signal = sent  # type: ignore[assignment]
    Runtime.of_this_process = lambda *_: TINY  # type: ignore[method-assign,assignment]
    sys.addaudithook(mortal.watch)
    sys.argv = ["holdfast", "up", "--data-dir", data, "--port", port, "--cpu-slots", "4"]
    __main__.main()


def main() -> None:
    data, port, seed, most, log = sys.argv[1:]
    Path(log).touch()
    for name in ("api", "local.engine", "local.store", "reconciler", "server"):  # once for all controllers
        importlib.import_module(f"holdfast_controller.{name}")
    drawn = random.Random(int(seed))
    for death in itertools.count():
        acts = drawn.randint(2, int(most)) if death < DEATHS else sys.maxsize
        pid = os.fork()
        if pid == 0:
            live(data, port, acts, log)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != -signal.SIGKILL:
            sys.exit(f"a controller ended with {status}:\n{Path(log).read_text()[-3000:]}")
        print(acts, flush=True)


if __name__ == "__main__":
    main()
