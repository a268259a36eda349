"""Work on numbered blocks, shared out among threads.

Not an executor of the standard library: those refuse work once the interpreter is ending, which is when a
program that left its loop early makes its last save. A thread that cannot be started is done without.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..within import start_thread

T = TypeVar("T")


class Spread(Generic[T]):
    """`work(0)` to `work(count - 1)`, begun at once where there is more than one."""

    def __init__(
        self,
        work: Callable[[int], T],
        count: int,
        *,
        name: str,
        aside: bool = False,
        least: int = 1,
        alone: bool = False,
    ) -> None:
        """With `aside` the threads have low priority; `least` many there are, however few the cores.

        With `alone` one thread begins, be there only one block: whoever waits joins in when it must.
        """
        self._work, self._aside = work, aside
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._left = iter(range(count))
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        helpers = min(max(threads(), least), count) if count > 1 else 0
        for _ in range(min(1, count) if alone else helpers):
            if thread := start_thread(self._run, name):
                self._threads.append(thread)

    def _run(self) -> None:
        if self._aside:
            step_aside()
        self._help()

    def _help(self) -> None:
        while not self._errors:
            with self._lock:
                number = next(self._left, None)
            if number is None:
                return
            try:
                self._results[number] = self._work(number)
            except BaseException as error:
                self._errors.append(error)

    def cancel(self) -> None:
        """Begin nothing more, and wait for what was begun."""
        with self._lock:
            self._left = iter(())
        for thread in self._threads:
            thread.join()

    def finish(self) -> list[T]:
        """Help, wait, and give the results by number.

        Raises what `work` raised first. To be called once.
        """
        self._help()
        for thread in self._threads:
            thread.join()
        if self._errors:
            try:
                raise self._errors[0]
            finally:  # its traceback leads here: what was worked on would stay until garbage is collected
                self._errors = []
        return [self._results[number] for number in sorted(self._results)]


def step_aside() -> None:
    """Lower the calling thread's priority: the training's threads go first. Linux counts by thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    except OSError:
        pass


def threads() -> int:
    """How many work at once: the cores this process may use, at most eight."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return max(1, min(8, len(affinity(0)) if affinity else os.cpu_count() or 1))
