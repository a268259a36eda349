"""The save in flight: how far it is, and whether a newer one is worth giving it up for.

On notice the step of the stop is to be saved too. Where both fit into the time that is left, the one in
flight is finished first, as it is certain. Where only one of them fits, the newer one covers more steps.
"""

from __future__ import annotations

import threading
import time

from .snapshot import GpuWait


class GivenUp(Exception):
    """This save makes way for a newer one, or would wait in vain."""


class StateChanged(Exception):
    """What was copied is not the state of one instant, so it must never become a checkpoint."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, and not by a tracked optimizer's step. The end of the step that is under way is saved "
            "instead, and from now on saves hold the training up until all is copied, as "
            "checkpoint.snapshot=synchronous has it from the start"
        )


class Flight:
    """One rank's part of a save on its way to the disk; written to by several threads."""

    def __init__(self, size: int) -> None:
        self._size, self._written = size, 0
        self._began = self._moved = time.monotonic()
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._given_up = ""
        self.stall = 0.0
        """Seconds that the training thread waited so far."""
        self._changed = ""
        self._on_gpu: GpuWait | None = None

    def held_up(self, seconds: float) -> None:
        """The training thread waited, so long."""
        self.stall += seconds

    def settle(self, changed: str = "", on_gpu: GpuWait | None = None) -> None:
        """The training thread will wait no more; its GPU does `on_gpu`. `changed`: in words, why the copy is
        worth nothing."""
        self._changed, self._on_gpu = changed, on_gpu
        self._moved = time.monotonic()  # until now it was not the disk that it waited for
        self._settled.set()

    @property
    def changed(self) -> bool:
        """Whether the copy is known to be worth nothing."""
        return self._changed != ""

    def await_settled(self) -> float:
        """Returns how long the training was held up in all, its thread and its GPU. Raises StateChanged."""
        self._settled.wait()
        self.go_on()
        if self._on_gpu is None:
            return self.stall
        began, ended = self._on_gpu
        ended.synchronize()
        on_gpu: float = began.elapsed_time(ended) / 1e3
        return self.stall + on_gpu

    def give_up(self, why: str) -> None:
        """Whoever works on it learns that by the next `advance` or `go_on`."""
        self._given_up = why

    def go_on(self) -> None:
        """Raises GivenUp where it was given up, StateChanged where the copy is worth nothing."""
        if self._changed:
            raise StateChanged(self._changed)
        if self._given_up:
            raise GivenUp(self._given_up)

    def advance(self, count: int) -> None:
        """So many bytes more are written. Raises as `go_on`."""
        with self._lock:
            self._written += count
        self._moved = time.monotonic()
        self.go_on()

    def stands_still(self, seconds: float) -> bool:
        """Whether nothing was written for so long, and for as long as all that is written took."""
        return time.monotonic() - self._moved > max(seconds, self._moved - self._began)

    def seconds_left(self, usual: float | None) -> float | None:
        """Until it is durable, by what it took so far; `usual`: what a whole save takes."""
        elapsed = time.monotonic() - self._began
        return seconds_left(elapsed, self._written / self._size if self._size else 0.0, usual)


def seconds_left(elapsed: float, share: float, usual: float | None) -> float | None:
    """Of a save that has done `share` of its writing in `elapsed` seconds; None where nothing tells.

    What has not begun to move will take what a save usually takes, and as long again as it has stood still.
    """
    if share > 0:
        return elapsed * (1 - min(share, 1.0)) / share
    return None if usual is None else elapsed + usual


def makes_way(notice: float, flight: float | None, usual: float | None) -> bool:
    """Whether to give up the save in flight, which needs `flight` seconds more, with `notice` seconds left.

    `usual`: what a save takes until it is durable. None, where it is not known, keeps what is under way.
    """
    return flight is not None and usual is not None and usual <= notice < flight + usual
