"""Every process that a test starts ends with the test, also when the test fails.

Torchrun's workers and the controller's supervisors start sessions of their own and outlive their
parents on purpose, so neither process groups nor parents find them all. An environment variable does:
children inherit it, and /proc shows it. Each is then killed by its own id.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tests.waiting import wait_until

from holdfast_controller.local.memory import parent_group
from holdfast_controller.local.process import environment

MARK = "TEST_MARK"

# Python starts these once for the whole interpreter; they end with it.
_INTERPRETERS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def carrying(name: str, value: str) -> dict[psutil.Process, frozenset[bytes]]:
    """The processes, but this one, that have `name=value` in their environment and have not ended.

    With the variables that each was found by: one that ends shows none a moment before it is a zombie.
    Every test asks twice, so only what has the words is looked at closely.
    """
    words = f"{name}={value}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            variables = environment(int(entry))
            if words not in variables:
                continue
            process = psutil.Process(int(entry))
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process] = variables
        except (OSError, psutil.Error):
            continue  # ended meanwhile, or another user's
    return found


class Processes:
    """Starts processes and, on `end_all`, ends them and all that they started."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Popen in text mode, in a session of its own; `env` is added to this environment."""
        options.setdefault("text", True)
        options.setdefault("start_new_session", True)
        environment = {**os.environ, MARK: self.mark, **(env or {})}
        process = subprocess.Popen([str(word) for word in command], env=environment, **options)
        self._started.append(process)
        return process

    def running(self) -> list[psutil.Process]:
        """Whatever carries this test's mark and has not ended."""
        found = []
        for process in carrying(MARK, self.mark):
            with suppress(psutil.Error):  # ended meanwhile
                if not any(name in " ".join(process.cmdline()) for name in _INTERPRETERS_OWN):
                    found.append(process)
        return found

    def end_all(self) -> None:
        """SIGKILL by id, until nothing with the mark is left: what is killed may have been forking.

        What was started here is waited for, and its pipes are closed, as a test does that passes.
        """

        def none_left() -> bool:
            left = self.running()
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            return not left

        wait_until(none_left, f"the processes with {MARK}={self.mark} to end")
        for process in self._started:
            process.wait(timeout=60)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # what was not written to one that has ended
                        pipe.close()
        self._started.clear()
        _remove_groups()


def _remove_groups() -> None:
    """Memory cgroups of attempts whose engine did not live to see their end; one in use does not go.

    Nor does one of the last minute: an engine of another worker's test may be about to put a process in it.
    """
    parent = parent_group()
    for group in parent.iterdir() if parent is not None else ():
        if re.fullmatch(r"holdfast-[0-9a-f]{12}-\d+", group.name):
            with suppress(OSError):
                if time.time() - group.stat().st_mtime > 60:
                    group.rmdir()
