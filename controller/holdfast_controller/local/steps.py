"""The steps of a job in its run directory: a line for every step of every attempt, gigabytes after weeks.

Parsed, lines take eight times the memory of their text, and a million of them ten seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast_controller.cluster import NotReady
from holdfast_trainer.contract import RunDir, parse_lines, read_lines

LIMIT = 128 * 1024 * 1024
"""Bytes that are read for one answer, some 800,000 lines."""
FIRST_BYTES, LAST_BYTES = 4 * 1024, 32 * 1024
"""Of an attempt's beginning and its end: some twenty lines, and two hundred, among which are the first step,
the newest loss, and mostly the newest validation."""


def all_steps(run: RunDir) -> list[dict[str, Any]]:
    """All lines of all attempts, each with its "attempt". Raises NotReady of more than `LIMIT`."""
    if sum(_size(run.steps(attempt)) for attempt in run.attempt_numbers()) > LIMIT:
        where = f"{run.attempts}/*/steps.jsonl"
        raise NotReady(f"there are more than {LIMIT >> 20} MiB of steps, too many for an answer: see {where}")
    return of_attempts(run, lambda attempt: read_lines(run.steps(attempt)))


def ends_of_steps(run: RunDir) -> list[dict[str, Any]]:
    """Of each attempt the first lines and the last."""
    return of_attempts(run, lambda attempt: parse_lines(_ends(run.steps(attempt)).decode(errors="replace")))


def of_attempts(run: RunDir, lines: Callable[[int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """`lines` of all attempts, each with its "attempt"."""
    return [{**line, "attempt": attempt} for attempt in run.attempt_numbers() for line in lines(attempt)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _ends(path: Path) -> bytes:
    """Of a long file whole lines alone."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size <= FIRST_BYTES + LAST_BYTES:
                return file.read()
            first = file.read(FIRST_BYTES)
            file.seek(size - LAST_BYTES)
            last = file.read()
    except OSError:
        return b""
    return first[: first.rfind(b"\n") + 1] + last[last.find(b"\n") + 1 :]
