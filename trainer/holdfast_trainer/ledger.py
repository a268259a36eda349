"""The attempt's journal: ledger.jsonl (what happened) and steps.jsonl (what each step did).

Lines are appended whole with O_APPEND, so ranks do not tear each other's; in the ledger they take turns, as
on NFS each machine appends at what it takes for the end. The ledger is synced line by line, the steps with
every checkpoint that is told: one that none covers is lost anyway, one that is covered is not done again. On
a disk that is slow to append to, as a network's are, training does not wait for steps. Where the disk is full
lines wait in memory, in order, until there is room again; one that the disk has taken with an error may be
there twice. The formats are in contract.py.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from .contract import RunDir, exists, is_count, is_figure, line_of, newest_lines, read_lines
from .records import EVENTS, Records
from .within import start_thread

TURN_SECONDS = 1.0
"""How long an append waits for those of other ranks: one that is frozen may hold them all up."""
SLOW_SECONDS, SLOW_IN_A_ROW = 0.001, 5
"""So many appends of that length, and steps are written in a thread of their own from then on."""
NEWEST_BYTES = 1 << 18
"""Of an attempt's steps, that are looked at first: a thousand or two."""
MOST_LATE = 10_000
"""Lines of a file that wait for room, some 2 MB; beyond that the oldest are lost."""


class Journal:
    """Writes what one attempt has to tell. A full disk makes it late, never the training fail."""

    def __init__(self, run: RunDir, attempt: int, *, first: bool = True) -> None:
        """`first`: of rank 0, which copies it where the run's checkpoints are objects."""
        run.attempt(attempt).mkdir(parents=True, exist_ok=True)
        self._attempt = attempt
        self._ledger, self._steps = _Lines(run.ledger(attempt), sync=True), _Lines(run.steps(attempt))
        self._records = Records(run, attempt) if first and run.objects else None

    @property
    def unwritten(self) -> int:
        """Lines that have found no room so far."""
        return self._ledger.unwritten + self._steps.unwritten

    def event(self, event: str, **fields: Any) -> None:
        """Append a ledger line, durably, and before it the steps that still wait; with a checkpoint these
        durably, too."""
        self._steps.write()
        if event == "checkpoint":
            self._steps.sync()
        self._ledger.append({"event": event, "time": time.time(), "attempt": self._attempt, **fields})
        if self._records is None or event not in EVENTS:
            return
        if event == "first_step":  # all ranks would wait for a store that does not answer
            start_thread(self._records.publish, "records")
        else:
            self._records.publish()

    def steps(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append to steps.jsonl, in one write."""
        self._steps.append(*({"step": line["step"], "time": time.time(), **line} for line in lines))


class _Lines:
    """One file. Several threads of a rank may append."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self._path, self._sync = path, sync
        self._late: deque[bytes] = deque()
        self._in_hand: deque[bytes] = deque()
        """Of those that were late, what is being written."""
        self._lost = 0
        self._torn = self._unsynced = False
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._slow = 0
        self._due: threading.Event | None = None
        """For the thread that writes, once there is one."""

    @property
    def unwritten(self) -> int:
        return self._lost + len(self._late) + len(self._in_hand)

    def append(self, *bodies: dict[str, Any]) -> None:
        """With all that waits."""
        with self._lock:
            self._late.extend(line_of(body) for body in bodies)
            if self._due is not None:
                self._keep_few()
                self._due.set()
                return
        began = time.perf_counter()
        self.write()
        self._slow = self._slow + 1 if time.perf_counter() - began > SLOW_SECONDS else 0
        if self._slow == SLOW_IN_A_ROW and not self._sync:
            due = threading.Event()
            if start_thread(lambda: self._go_on_writing(due), "journal"):
                self._due = due

    def write(self) -> None:
        """What waits, if anything does."""
        with self._writing:
            with self._lock:
                self._in_hand, self._late = self._late, deque()
            try:
                if self._in_hand:
                    self._write()
            except OSError:
                pass
            finally:
                with self._lock:
                    self._late.extendleft(reversed(self._in_hand))
                    self._in_hand = deque()
                    self._keep_few()

    def sync(self) -> None:
        """What has been written. Nobody who appends meanwhile waits for it."""
        if not self._unsynced:
            return
        self._unsynced = False
        try:
            with open(self._path, "r+b") as file:
                os.fsync(file.fileno())
        except OSError:
            self._unsynced = True

    def _go_on_writing(self, due: threading.Event) -> None:
        while True:
            due.wait()
            due.clear()
            self.write()

    def _keep_few(self) -> None:
        while len(self._late) > MOST_LATE:
            self._late.popleft()
            self._lost += 1

    def _write(self) -> None:
        # A line of which only the beginning found room must not spoil the next.
        lead = b"\n" if self._torn else b""
        data = lead + b"".join(self._in_hand)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if self._sync:
                _take_turn(fd)
            self._torn = True
            written = os.write(fd, data) - len(lead)
            if self._sync:
                os.fsync(fd)
            else:
                self._unsynced = True
        finally:
            if self._sync:
                with suppress(OSError):  # a data loader's worker that was forked meanwhile has the file too
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)  # NFS may tell only now that there is no room
        while self._in_hand and written >= len(self._in_hand[0]):
            written -= len(self._in_hand.popleft())
        self._torn = written != 0


def _take_turn(fd: int) -> None:
    """Until it is given back: nobody else appends, and NFS asks for the file's end anew. Where nothing knows
    of locks it is done without."""
    until = time.monotonic() + TURN_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                return
            time.sleep(0.005)
        except OSError:
            return


def useful_seconds(run: RunDir, attempt: int, step: int) -> float | None:
    """What the attempts before `attempt` spent on steps 1 to `step`, each as it was last done.

    As it was told when the checkpoint of `step` was made; where that line is missing, as its attempt told of
    what it began with or saved before, and from the steps since. None where these have gaps.
    """
    numbers, since = run.attempt_numbers()[::-1], 0.0
    told_by = cache(partial(_told_by, run))  # many attempts may have to be summed anew, one before the other
    while step > 0:
        earlier = [number for number in numbers if number < attempt]
        for number in earlier:
            saved, _ = told_by(number)
            if step in saved:
                return saved[step] + since
        for attempt in earlier:
            _, told_of = told_by(attempt)
            if told_of and min(told_of) >= step:
                continue  # it went on from a later one
            known = max((one for one in told_of if one < step), default=0)
            seconds = _seconds_of(run.steps(attempt), known, step)
            if step in seconds:
                break
        else:
            return None  # none came as far
        before = min(seconds) - 1
        if len(seconds) < step - before:
            return None
        since += sum(seconds.values())
        if before in told_of:
            return told_of[before] + since
        step = before
    return since


def _told_by(run: RunDir, attempt: int) -> tuple[dict[int, float], dict[int, float]]:
    """As its attempt told of them: the steps that it saved, and these with the one that it began with."""
    lines = read_lines(run.ledger(attempt))
    saved = _told_of(lines, "checkpoint", "step")
    return saved, _told_of(lines, "attempt_start", "resumed_step") | saved


def _told_of(lines: Sequence[Mapping[str, Any]], event: str, name: str) -> dict[int, float]:
    """By the step that has that `name`."""
    found = [(line.get(name), line.get("useful_seconds")) for line in lines if line.get("event") == event]
    return {step: float(told) for step, told in found if is_count(step) and is_figure(told)}


def _seconds_of(path: Path, after: int, last: int) -> dict[int, float]:
    """Of the steps after `after`, up to `last`: from the end of the file, which has gigabytes after weeks."""
    most = NEWEST_BYTES
    while True:
        lines = [line for line in newest_lines(path, most) if is_figure(line.get("seconds"))]
        seconds = {line["step"]: float(line["seconds"]) for line in lines if is_count(line.get("step"))}
        if min(seconds, default=math.inf) <= after or not exists(path) or most >= path.stat().st_size:
            return {step: told for step, told in seconds.items() if after < step <= last}
        most *= 4


def last_validations(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By step, of an attempt's ledger: losses that no checkpoint has, as none came after them."""
    told = [(line.get("step"), line.get("val_loss")) for line in lines if line.get("event") == "validation"]
    return {step: float(loss) for step, loss in told if is_count(step) and is_figure(loss)}


def trained_before(run: RunDir, attempt: int) -> bool:
    """Whether an attempt before `attempt` did a step."""
    earlier = (number for number in run.attempt_numbers() if number < attempt)
    lines = (line for number in earlier for line in read_lines(run.ledger(number)))
    return any(line.get("event") in ("first_step", "checkpoint") for line in lines)
