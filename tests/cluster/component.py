"""Start a long-running program, wait until it is ready, and find again whatever a cluster has started.

Every process carries the cluster's mark in its environment, and children inherit it: so `end_all` finds
them by their ids whoever started them, after a crash as well, and needs no record of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from tests.cluster.errors import ComponentFailed
from tests.cluster.site import MARK, NODE_MARK, Site
from tests.processes import carrying
from tests.waiting import DeadlinePassed, wait_until

MACHINE = "pause"
"""Name of a node's first process. Pods have one of that name too, which carries no mark."""

# What marks the processes of a test: a cluster outlives the test that happened to ask for it first.
_NOT_INHERITED = ("TEST_MARK", "PYTEST_CURRENT_TEST")

_OF_NODE = f"{NODE_MARK}=".encode()


# Children of this process, until `end_all` has reaped them.
_children: dict[Path, list[subprocess.Popen[bytes]]] = {}


@dataclass(frozen=True)
class Component:
    """A started program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    began: int = 0
    """Bytes of the log that are of a program of the same name before it."""

    def tail(self, lines: int = 20) -> str:
        """The end of what it has written to its log."""
        with self.log.open("rb") as log:
            log.seek(self.began)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raises ComponentFailed, with the end of the log, where it has ended."""
        code = self.process.poll()
        if code is not None:
            raise ComponentFailed(f"{self.name} ended with {code}; {self.log}:\n{self.tail()}")

    def wait_ready(self, ready: Callable[[], bool], seconds: float) -> None:
        """Until `ready()` holds. Raises ComponentFailed when it ends or `seconds` pass first."""

        def holds() -> bool:
            if ready():
                return True
            self.check()
            return False

        try:
            wait_until(holds, f"{self.name} to be ready", seconds)
        except DeadlinePassed:
            raise ComponentFailed(
                f"{self.name} is not ready after {seconds:g} s; {self.log}:\n{self.tail()}"
            ) from None


# Else a quarter of an apiserver's time goes to collecting garbage, as soon as there is as much as is used.
_FEWER_COLLECTIONS = {"GOGC": "400"}


def environment(site: Site) -> dict[str, str]:
    """What the programs of a node see: this environment and the marks."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**_FEWER_COLLECTIONS, **inherited, MARK: str(site.state), NODE_MARK: str(site.number)}


def start(site: Site, name: str, command: Sequence[str | Path], *, prefix: Sequence[str] = ()) -> Component:
    """Start `command`, after `prefix`, in a session of its own; its output goes to `<logs>/<name>.log`.

    On further nodes the name ends in the node's number.
    """
    site.logs.mkdir(parents=True, exist_ok=True)
    name = name if site.number == 1 else f"{name}-{site.number}"
    log = site.logs / f"{name}.log"
    words = [*prefix, *(str(word) for word in command)]
    with log.open("ab") as output:
        began = output.tell()
        try:
            process = subprocess.Popen(
                words,
                env=environment(site),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ComponentFailed(f"{name} does not start: {words[0]}: {error.strerror}") from error
    _children.setdefault(site.state, []).append(process)
    return Component(name, process, log, began)


def running(site: Site, name: str = "") -> list[psutil.Process]:
    """Whatever carries the cluster's mark and has not ended, or what of it is named so; not this process."""
    return [one.process for one in _marked(site) if name in ("", one.name)]


def on_node(site: Site, name: str = "") -> list[psutil.Process]:
    """As `running`, of this node alone."""
    return [one.process for one in _marked(site) if one.node == site.number and name in ("", one.name)]


def names_of(site: Site) -> list[tuple[int, str]]:
    """Process id and name of all that runs for a cluster."""
    return [(one.process.pid, one.name) for one in _marked(site)]


def nodes_of(site: Site) -> list[int]:
    """Numbers of the nodes that a cluster has now, in order."""
    return sorted({one.node for one in _marked(site) if one.name == MACHINE})


class _Marked(NamedTuple):
    """What is asked of a process is asked at once: the next moment it may be gone."""

    process: psutil.Process
    name: str
    node: int


def _marked(site: Site) -> list[_Marked]:
    found = []
    for process, variables in carrying(MARK, str(site.state)).items():
        (node,) = (int(words.removeprefix(_OF_NODE)) for words in variables if words.startswith(_OF_NODE))
        try:
            found.append(_Marked(process, process.name(), node))
        except psutil.Error:
            continue  # ended meanwhile
    return found


def end_all(site: Site, seconds: float = 300) -> None:
    """SIGKILL by id, until nothing with the mark is left. Raises ComponentFailed when something stays."""
    end = time.monotonic() + seconds
    while left := running(site):
        for process in left:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(left, timeout=0.2)
        if time.monotonic() > end:
            names = ", ".join(f"{pid} {name}" for pid, name in names_of(site))
            raise ComponentFailed(f"these do not end {seconds:g} s after SIGKILL: {names}")
    for child in _children.pop(site.state, []):
        child.wait()
