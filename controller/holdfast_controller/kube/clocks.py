"""The clocks of other machines, put right: whatever a rank 0 tells is told in the controller's time.

Nodes' clocks differ, by minutes where nobody sets them, and a figure made of two of them would be wrong by as
much. Rank 0 says with each answer what time it has; what it has told is moved by the difference as soon as it
arrives. A difference that the answer's way may explain counts as none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from holdfast_controller.cluster import AttemptObservation
from holdfast_trainer.contract import Progress, is_time

from .pieces import Attempt

TOLERANCE_SECONDS = 1.0

Key = tuple[str, Attempt]
"""Namespace; the job's uid and the attempt's number."""


class Clocks:
    """By how many seconds the clock of each attempt's rank 0 is ahead of ours."""

    def __init__(self) -> None:
        self._ahead: dict[tuple[str, str], dict[int, float]] = {}
        """By namespace and the job's uid, then by attempt: a ledger has lines of all of them."""

    def heard(self, key: Key, progress: Progress, now: float) -> Progress:
        """What was heard at `now`, in seconds since the epoch, by our clock."""
        if progress.asked is not None:
            ahead, known = progress.asked - now, self._of(key)
            # Kept while it holds: the same answer is not to differ from the last by the way that it took.
            if abs(ahead - known) > TOLERANCE_SECONDS:
                namespace, (uid, attempt) = key
                self._ahead.setdefault((namespace, uid), {})[attempt] = ahead
        return _moved(progress, self._of(key))

    def lines(self, namespace: str, uid: str, ledger: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lines of a job's ledger, each by our clock; those of attempts never heard stay as they are."""
        known = self._ahead.get((namespace, uid), {})
        found = []
        for line in ledger:
            number, told = line.get("attempt"), line.get("time")
            ahead = known.get(number, 0.0) if isinstance(number, int) else 0.0
            if ahead and isinstance(told, int | float) and is_time(told):
                line = {**line, "time": max(0.0, told - ahead)}
            found.append(line)
        return found

    def seen(self, key: Key, observation: AttemptObservation) -> AttemptObservation:
        """With the last words of its replicas by our clock."""
        ahead = self._of(key)
        if not ahead:
            return observation
        replicas = tuple(
            replace(one, termination=replace(said, progress=_moved(said.progress, ahead)))
            if (said := one.termination) is not None and said.progress is not None
            else one
            for one in observation.replicas
        )
        return replace(observation, replicas=replicas)

    def forget(self, namespace: str, uid: str) -> None:
        """All attempts of a job."""
        self._ahead.pop((namespace, uid), None)

    def _of(self, key: Key) -> float:
        namespace, (uid, attempt) = key
        return self._ahead.get((namespace, uid), {}).get(attempt, 0.0)


def _moved(progress: Progress, ahead: float) -> Progress:
    if not ahead:
        return progress

    def ours(time: float | None) -> float | None:
        return None if time is None else max(0.0, time - ahead)

    return replace(
        progress,
        updated=ours(progress.updated or None) or 0.0,
        first_step_time=ours(progress.first_step_time),
        process_time=ours(progress.process_time),
    )
