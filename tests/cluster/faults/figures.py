"""What a job's status says of an attempt and of time, held against this machine's clock."""

from __future__ import annotations

import time
from datetime import datetime

from tests.cluster.faults.world import Document, Job

TOLERANCE = 5.0
"""Seconds: Kubernetes' times are whole ones, and a clock is put right to one."""


def hold(job: Job, attempt: int, hit: float) -> None:
    """Of the attempt that goes on after a hit at that time, and of the one before. Raises AssertionError."""
    told = job.until("recovery to be told", lambda now: _record(now, attempt).get("recoverySeconds"))
    document, now = job.document(), time.time()
    for record in told["attempts"]:
        opened = _seconds(record["openedAt"])
        for name in ("startedAt", "firstStepAt", "lastSignAt", "endedAt"):
            if record.get(name) is not None:
                at = _seconds(record[name])
                assert opened - TOLERANCE < at < now + TOLERANCE, f"{name} of {record}"
    before, after = _record(told, attempt - 1), _record(told, attempt)
    assert _seconds(before["firstStepAt"]) < _seconds(before["lastSignAt"]) + TOLERANCE, before
    assert abs(_seconds(before["lastSignAt"]) - hit) < now - hit + TOLERANCE, before
    assert 0 < after["recoverySeconds"] < now - hit + TOLERANCE, after
    stages = after["breakdown"]
    assert all(seconds >= 0 for seconds in stages.values() if seconds is not None), stages
    assert abs(_seconds(told["progress"]["updatedAt"]) - now) < now - hit + TOLERANCE, told["progress"]
    # The job was there a while before it ran: its goodput is no less than by that longer time.
    wall = now - _seconds(document["metadata"]["creationTimestamp"])
    least = told["usefulSeconds"] / (wall + TOLERANCE)
    assert least * 0.9 < told["goodput"] <= 1, (least, told["goodput"])


def _record(status: Document, attempt: int) -> Document:
    return next((one for one in status["attempts"] if one["number"] == attempt), {})


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
