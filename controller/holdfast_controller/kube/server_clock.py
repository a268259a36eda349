"""The apiserver's clock beside ours, as the `Date` of its answers tells it.

When a pod's grace is over, and since when it has its node, is by the clock of the control plane; what is done
about it goes by ours. Where the machine of the controller is minutes ahead, a pod that has just been given
notice would pass for one of a lost node, and be deleted by force while it saves.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation


class ServerClock:
    """Of one apiserver, or of several that have one time."""

    def __init__(self) -> None:
        self.ahead = 0.0
        """By how many seconds it is ahead of ours; 0 where the way of an answer may explain all of it."""

    def answered(self, date: str | None, sent: float, received: float) -> None:
        """It was `date`, in whole seconds, at some time between these two, in seconds since the epoch."""
        if date is None:
            return
        with suppress(ValueError):
            told = parsedate_to_datetime(date).timestamp()
            least, most = told - received, told + 1 - sent
            if not least <= self.ahead <= most:  # else one that took long would undo what a quick one told
                self.ahead = min(max(0.0, least), most)

    def by_ours(self, seen: AttemptObservation) -> AttemptObservation:
        """What was seen of an attempt, with the control plane's times as we would have told them."""
        if not self.ahead:
            return seen
        replicas = tuple(self._replica(one) for one in seen.replicas)
        return replace(seen, replicas=replicas, placed_at=self._moment(seen.placed_at))

    def _replica(self, one: ReplicaObservation) -> ReplicaObservation:
        due = None if one.due is None else one.due - self.ahead
        return replace(one, due=due, placed_at=self._moment(one.placed_at))

    def _moment(self, told: datetime | None) -> datetime | None:
        return None if told is None else told - timedelta(seconds=self.ahead)
