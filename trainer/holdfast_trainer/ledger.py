"""The attempt's journal: ledger.jsonl (what happened) and steps.jsonl (one line a step).

Lines are appended whole with O_APPEND, so ranks do not tear each other's. The ledger is synced line by
line; steps are not, as a step that no checkpoint covers is lost anyway. The formats are in contract.py.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from .contract import RunDir, read_lines
from .records import EVENTS, Records


class Journal:
    """Writes what one attempt has to tell. A full disk makes it silent, never the training fail."""

    def __init__(self, run: RunDir, attempt: int, *, first: bool = True) -> None:
        """`first`: of rank 0, which copies it where the run's checkpoints are objects."""
        run.attempt(attempt).mkdir(parents=True, exist_ok=True)
        self._attempt = attempt
        self._ledger, self._steps = run.ledger(attempt), run.steps(attempt)
        self._records = Records(run, attempt) if first and run.objects else None
        self._torn: set[Path] = set()
        self.dropped = 0
        """Lines that could not be written."""

    def event(self, event: str, **fields: Any) -> None:
        """Append a ledger line, durably."""
        line = {"event": event, "time": time.time(), "attempt": self._attempt, **fields}
        self._append(self._ledger, line, sync=True)
        if self._records is not None and event in EVENTS:
            self._records.publish()

    def step(self, step: int, **fields: Any) -> None:
        """Append a line to steps.jsonl."""
        self._append(self._steps, {"step": step, "time": time.time(), **fields}, sync=False)

    def _append(self, path: Path, body: dict[str, Any], *, sync: bool) -> None:
        data = (json.dumps(body) + "\n").encode()
        if path in self._torn:  # a line of which only the beginning found room must not spoil this one
            data = b"\n" + data
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                if os.write(fd, data) < len(data):
                    self._torn.add(path)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._torn.discard(path)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            self.dropped += 1


def useful_seconds(run: RunDir, attempt: int, step: int) -> float | None:
    """What the attempts before `attempt` spent on steps 1 to `step`, each as it was last done.

    As it was told when the checkpoint of `step` was made; where that line is missing, from the steps
    themselves. None where these have gaps.
    """
    if step == 0:
        return 0.0
    earlier = [number for number in run.attempt_numbers() if number < attempt]
    for number in reversed(earlier):
        for line in reversed(read_lines(run.ledger(number))):
            if line.get("event") == "checkpoint" and line.get("step") == step:
                told = line.get("useful_seconds")
                if isinstance(told, int | float):
                    return float(told)
    seconds: dict[int, float] = {}
    for number in earlier:
        for line in read_lines(run.steps(number)):
            if isinstance(line.get("seconds"), int | float) and line.get("step", 0) <= step:
                seconds[line["step"]] = line["seconds"]
    return sum(seconds.values()) if len(seconds) == step else None
