"""Passes over a job that failed one after the other, and of which of them the log tells. Pure.

A job wakes its pass with each step that it tells of: while a database's disk fails, each of fifty jobs would
tell of the same error every second.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Row:
    passes: int = 0
    error: str = ""


class FailedPasses:
    """By the job's key."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def add(self, key: str, error: str) -> bool:
        """One more; whether to tell of it: of another error than before, and else of the first, the second,
        the fourth, the eighth ..."""
        row = self._rows.setdefault(key, _Row())
        another = row.error != error
        row.passes, row.error = row.passes + 1, error
        return another or row.passes & (row.passes - 1) == 0

    def count(self, key: str) -> int:
        """In a row."""
        return self._rows[key].passes if key in self._rows else 0

    def end(self, key: str) -> None:
        """A pass did not fail."""
        self._rows.pop(key, None)

    def clear(self) -> None:
        """Of all jobs."""
        self._rows.clear()
