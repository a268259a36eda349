"""Ask NVML with a deadline: a reader in a process of its own (reader.py), and what to do when it is silent.

- An answer that comes after its deadline is thrown away: its figures are of another moment. Its Xid
  events are kept, for they happened.
- While an answer is overdue nothing new is asked and nobody waits again: NVML is `hung` until it speaks.
- A reader that stays silent for `patience` seconds is killed and followed by another. One that cannot
  be killed (stuck in the kernel) is not followed: a second would only get stuck beside it.
- A reader that dies is followed by another, at most one every `RESTART_SECONDS`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .readings import Fault, Reading, Reason, XidEvent, reading_from

DEADLINE_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
RESTART_SECONDS = 5.0
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Sample:
    """One attempt to read NVML: figures, or why there are none. Xids may come with either."""

    reading: Reading | None
    fault: Fault | None
    xids: tuple[XidEvent, ...] = ()
    seconds: float = 0.0


class Sampler:
    """Reads NVML through a reader process. Safe to call from several threads; they take turns."""

    def __init__(self, deadline: float = DEADLINE_SECONDS, patience: float = PATIENCE_SECONDS):
        self.deadline = deadline
        self.patience = patience
        self._lock = threading.Lock()
        self._reader: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._asked = 0
        self._overdue_since: float | None = None
        self._started = float("-inf")
        self._last_words = Fault(Reason.ERROR, "NVML has not been read yet")
        self._at: int | None = None

    def sample(self) -> Sample:
        """At most one deadline later: what NVML says now, or why it says nothing."""
        began = time.monotonic()
        if not self._lock.acquire(timeout=self.deadline):
            return Sample(None, Fault(Reason.HUNG, "other scrapes wait for NVML already"))
        try:
            xids: list[XidEvent] = []
            reading, fault = self._sample(began + self.deadline, xids)
            return Sample(reading, fault, tuple(xids), time.monotonic() - began)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the reader. One that is stuck in the kernel is left to it."""
        with self._lock:
            self._kill()

    # ------------------------------------------------------------------ inside the lock

    def _sample(self, end: float, xids: list[XidEvent]) -> tuple[Reading | None, Fault | None]:
        if self._overdue_since is not None:
            late = self._answer(time.monotonic(), xids)
            if isinstance(late, Fault) and late.reason == Reason.HUNG:
                return None, self._still_silent()
            self._overdue_since = None
        if not self._ready():
            return None, self._last_words
        self._asked += 1
        asked = time.monotonic()
        if not self._ask():
            return None, self._died()
        answer = self._answer(end, xids)
        if isinstance(answer, Reading):
            if time.monotonic() <= end:
                return answer, None
            # It was there when this thread at last had its turn: nobody knows since when.
            return None, Fault(Reason.HUNG, "NVML answered, and this process was too busy to hear it in time")
        if answer.reason == Reason.HUNG:
            self._overdue_since = asked
        self._last_words = answer
        return None, answer

    def _ready(self) -> bool:
        """True with a reader to ask; starts one where there is none and it is time."""
        if self._reader is not None and self._reader.poll() is None:
            return True
        self._kill()
        if time.monotonic() - self._started < RESTART_SECONDS:
            return False
        self._buffer, self._at = b"", None
        self._started = time.monotonic()
        try:
            self._reader = subprocess.Popen(
                [sys.executable, "-m", "holdfast_controller.exporter.reader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C is for the exporter, which then ends it
            )
        except OSError as error:
            self._last_words = Fault(Reason.ERROR, f"the reader of NVML does not start: {error}")
            return False
        return True

    def _ask(self) -> bool:
        assert self._reader is not None
        assert self._reader.stdin is not None
        try:
            self._reader.stdin.write(json.dumps({"id": self._asked}).encode() + b"\n")
        except OSError:
            return False
        return True

    def _answer(self, end: float, xids: list[XidEvent]) -> Reading | Fault:
        """The answer to what was asked last, or a fault: HUNG where `end` passes first."""
        assert self._reader is not None
        assert self._reader.stdout is not None
        handle = self._reader.stdout.fileno()
        readable = select.poll()  # select() takes no number from 1024 on
        readable.register(handle, select.POLLIN)
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                try:
                    if (answer := self._heard(json.loads(line), xids)) is not None:
                        return answer
                except (KeyError, TypeError, ValueError) as error:
                    return Fault(
                        Reason.ERROR,
                        f"the reader of NVML is of another version ({error}), as where Holdfast was "
                        "installed anew meanwhile: start this process again",
                    )
            left = max(0.0, end - time.monotonic())
            if not readable.poll(left * 1000):
                return Fault(Reason.HUNG, f"{self._where()} has not answered within {self.deadline:g} s")
            chunk = os.read(handle, _CHUNK)
            if not chunk:
                return self._died()
            self._buffer += chunk

    def _heard(self, document: dict[str, Any], xids: list[XidEvent]) -> Reading | Fault | None:
        """A line of the reader's; None where it is no answer to what was asked last. Raises KeyError,
        TypeError, ValueError for one of another version's."""
        if "at" in document:
            self._at = document["at"]
            return None
        xids += [XidEvent(uuid, code) for uuid, code in document.get("xids", ())]
        return _parsed(document) if document["id"] == self._asked else None

    def _died(self) -> Fault:
        assert self._reader is not None
        code = self._reader.wait()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        self._last_words = Fault(Reason.CRASHED, f"{self._where()} ended its process {how}")
        return self._last_words

    def _still_silent(self) -> Fault:
        assert self._overdue_since is not None
        silent = time.monotonic() - self._overdue_since
        self._last_words = Fault(Reason.HUNG, f"{self._where()} has not answered for {silent:.0f} s")
        if silent > self.patience and self._kill():
            self._overdue_since = None
        return self._last_words

    def _kill(self) -> bool:
        """True where there is no reader any more."""
        if self._reader is None:
            return True
        self._reader.kill()
        try:
            self._reader.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return False
        for pipe in (self._reader.stdin, self._reader.stdout):
            if pipe is not None:
                pipe.close()
        self._reader = None
        return True

    def _where(self) -> str:
        return "NVML" if self._at is None else f"NVML, asked about GPU {self._at},"


def _parsed(document: dict[str, Any]) -> Reading | Fault:
    if "fault" in document:
        return Fault(Reason(document["fault"]["reason"]), document["fault"]["message"])
    return reading_from(document["reading"])


Sampled = Callable[[], Sample]
"""What a collector needs of a Sampler."""
