"""The manifests of attempts that are about to start, made once: to see whether an attempt could start they
have to be made, its start needs the same, and of what a job costs the controller they are a good part.
"""

from __future__ import annotations

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.manifests import Manifests, attempt_manifests
from holdfast_controller.pod_settings import PodSettings

from .observation import with_evidence

KEPT = 64
"""Attempts: between a plan and its start there is one write, so a few more than are decided on at once."""

_MadeOf = tuple[str, dict[str, str], int | None]
"""A digest of what the spec asks of the attempt, the job's labels, and what was saved before it."""


class Prepared:
    """Of the newest `KEPT` attempts that were asked for. What comes out is shared: not to be changed."""

    def __init__(self, settings: PodSettings):
        self._settings = settings
        self._made: dict[tuple[str, str, int], tuple[_MadeOf, Manifests]] = {}

    def manifests(self, job: TrainingJob, attempt: int) -> Manifests:
        """Made anew where the spec that the attempt was opened with is another one, or the job's labels are,
        or what attempts before it have saved.

        Raises Invalid, as `attempt_manifests`.
        """
        which = (job.key, job.metadata.uid, attempt)
        known = self._made.get(which)
        # Not the spec itself: in a config 1, 1.0 and true are equal to Python.
        spec, labels = job.as_of(attempt).spec.of_attempt, dict(job.metadata.labels)
        made_of = (spec, labels, job.status.saved_before(attempt))
        if known is not None and known[0] == made_of:
            return known[1]
        made = with_evidence(attempt_manifests(job, attempt, self._settings))
        self._made[which] = (made_of, made)
        if len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        return made
