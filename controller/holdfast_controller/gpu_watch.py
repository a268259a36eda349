"""Looks at the GPUs of all jobs every so often, and keeps what policy/idle.py needs to judge them.

Nothing of it is stored: a controller that starts anew has seen nothing yet, and judges only what it then
sees for long enough. Where it looks is the composition root's business: at this machine's NVML, or at the
exporters of a cluster's nodes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

import structlog

from .cluster import GpuUse, HoldfastError
from .jobs import TrainingJob, utcnow
from .policy.idle import GpuVerdict, Stretch, current, follow, judge

MISSED_LOOKS = 3
"""After which what a GPU did in between is not known."""

Look = Callable[[], Awaitable[Sequence[GpuUse]]]
"""What every job does with every GPU now. Raises HoldfastError where nobody can tell."""

log = structlog.get_logger(__name__)


class GpuWatch:
    """Belongs to one event loop; `look` is called every `every_seconds` by the reconciler."""

    def __init__(self, look: Look, every_seconds: float, clock: Callable[[], datetime] = utcnow):
        self.every_seconds = every_seconds
        self._look = look
        self._clock = clock
        self._gap = timedelta(seconds=MISSED_LOOKS * every_seconds)
        self._began: datetime | None = None
        self._known: dict[tuple[str, int], dict[str, Stretch]] = {}
        self._blind = ""

    def forget(self) -> None:
        """All that was seen: nobody looks until `look` is called again."""
        self._began = None
        self._known.clear()

    async def look(self) -> set[str]:
        """One look; the keys of the jobs of which it says another thing than the one before."""
        now = self._clock()
        self._began = self._began or now
        try:
            uses = await self._look()
            if self._blind:
                log.info("GPUs of jobs are seen again")
            self._blind = ""
        except Exception as error:  # what nobody has foreseen of a GPU must not end the jobs' controller
            if str(error) != self._blind:
                told = not isinstance(error, HoldfastError)
                log.warning("GPUs of jobs are not seen", error=str(error), exc_info=told)
            uses, self._blind = (), str(error)
        before = self._said()
        seen: dict[tuple[str, int], dict[str, GpuUse]] = {}
        for use in uses:
            seen.setdefault((use.key, use.attempt), {})[f"{use.replica} {use.gpu}"] = use
        self._known = {
            attempt: stretches
            for attempt in self._known.keys() | seen.keys()
            if (stretches := self._followed(attempt, seen.get(attempt, {}), now))
        }
        after = self._said()
        return {key for key, _ in before.keys() | after.keys() if before.get((key, _)) != after.get((key, _))}

    def _followed(
        self, attempt: tuple[str, int], uses: dict[str, GpuUse], now: datetime
    ) -> dict[str, Stretch]:
        """What is known of an attempt's GPUs after this look; of a GPU without a figure for as long as it
        is not too old."""
        known = self._known.get(attempt, {})
        found = {gpu: follow(known.get(gpu), use, now, self._gap) for gpu, use in uses.items()}
        found |= {
            gpu: stretch
            for gpu, stretch in known.items()
            if gpu not in uses and stretch.is_recent(now, self._gap)
        }
        return {gpu: stretch for gpu, stretch in found.items() if stretch is not None}

    def _said(self) -> dict[tuple[str, int], frozenset[tuple[str, datetime | None]]]:
        return {
            attempt: frozenset((gpu, stretch.since) for gpu, stretch in stretches.items())
            for attempt, stretches in self._known.items()
        }

    def verdict(self, job: TrainingJob, attempt: int) -> GpuVerdict | None:
        """On an attempt of a job; None where it has no GPUs, or nobody has looked for long enough to miss
        its figures."""
        spec = job.as_of(attempt).spec
        if spec.gpus == "0" or self._began is None:
            return None
        now = self._clock()
        record = job.status.record(attempt)
        opened_at = record.opened_at if record is not None else None
        stretches = current(self._known.get((job.key, attempt), {}), opened_at, now, self._gap)
        if not stretches and now - self._began <= self._gap:
            return None
        return judge(stretches, spec, now)
