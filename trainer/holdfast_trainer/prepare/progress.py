"""How far a preparation is, for people: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_SECONDS = 5.0


class Report(Protocol):
    """Told the bytes of text that are done."""

    def __call__(self, done: int) -> None: ...


def say(message: str) -> None:
    """One line to standard error."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def reporting(doing: str, total: int, done: int) -> Iterator[Report]:
    """Shows progress of what is done, from `done` to `total` bytes, while it is open."""
    if sys.stderr.isatty():
        columns = (TextColumn(doing), BarColumn(), TextColumn("{task.percentage:.0f} %"))
        with Progress(
            *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
        ) as bar:
            task = bar.add_task(doing, total=total, completed=done)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield _Lines(doing, total, done)


class _Lines:
    def __init__(self, doing: str, total: int, done: int):
        self.doing = doing
        self.total, self.first = max(1, total), done
        self.started = self.last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_SECONDS:
            self.last = now
            speed = (done - self.first) / (now - self.started) / 1e6
            left = f", about {(self.total - done) / 1e6 / speed:.0f} s left" if speed else ""
            say(
                f"{self.doing}: {100 * done // self.total} % of {self.total / 1e6:.1f} MB, "
                f"{speed:.1f} MB/s{left}"
            )
