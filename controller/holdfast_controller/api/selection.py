"""Which jobs a list or a watch shows: by phase, by label, a page at a time. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..cluster import Change, Invalid
from ..jobs import Phase, TrainingJob

_REQUIREMENT = re.compile(r"(!?)([A-Za-z0-9][-A-Za-z0-9_./]*)(?:(==?|!=)([-A-Za-z0-9_.]*))?")


@dataclass(frozen=True)
class Requirement:
    """One term of a label selector. `value` None asks whether the label is there at all."""

    label: str
    value: str | None
    negated: bool

    def holds(self, job: TrainingJob) -> bool:
        labels = job.metadata.labels
        found = self.label in labels if self.value is None else labels.get(self.label) == self.value
        return found != self.negated


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """`a=b,c!=d,e,!f` as Kubernetes means it; nothing at all selects all. Raises Invalid, naming the term:
    also one that is empty, as what a shell makes of `$A,$B` where neither is set."""
    requirements = []
    for term in (part.strip() for part in text.split(",")) if text else ():
        match = _REQUIREMENT.fullmatch(term)
        if match is None or (match[1] and match[3]):
            said = repr(term) if term else f"an empty term in {text!r}"
            raise Invalid(f"labelSelector: {said} is none of: key=value, key!=value, key, !key")
        requirements.append(Requirement(match[2], match[4], bool(match[1]) or match[3] == "!="))
    return tuple(requirements)


@dataclass(frozen=True)
class Selection:
    """Jobs of a namespace (None: all) in one of some phases (none given: any) with some labels."""

    namespace: str | None = None
    phases: frozenset[Phase] = frozenset()
    labels: tuple[Requirement, ...] = ()
    name: str | None = None

    def holds(self, job: TrainingJob) -> bool:
        return (
            self.namespace in (None, job.metadata.namespace)
            and self.name in (None, job.metadata.name)
            and (not self.phases or job.status.phase in self.phases)
            and all(requirement.holds(job) for requirement in self.labels)
        )


@dataclass(frozen=True)
class Page:
    items: tuple[TrainingJob, ...]
    next_token: str
    """Where the next page starts; empty: this was the last."""
    remaining: int


def page(jobs: Iterable[TrainingJob], limit: int, token: str = "") -> Page:
    """The next `limit` jobs, oldest first.

    The token names the last job seen, not a count: jobs that come and go between two pages make no
    job appear twice or be left out. Raises Invalid for a token that is none of ours.
    """
    ordered = sorted(jobs, key=_position)
    if token:
        seen = _decode(token)
        ordered = [job for job in ordered if _position(job) > seen]
    items, rest = ordered[:limit], ordered[limit:]
    return Page(tuple(items), _encode(items[-1]) if rest else "", len(rest))


def _position(job: TrainingJob) -> tuple[datetime, str]:
    return job.metadata.creation_timestamp, job.metadata.uid


def _encode(job: TrainingJob) -> str:
    created, uid = _position(job)
    return base64.urlsafe_b64encode(f"{created.isoformat()} {uid}".encode()).decode()


def _decode(token: str) -> tuple[datetime, str]:
    try:
        created, uid = base64.urlsafe_b64decode(token).decode().split(" ")
        moment = datetime.fromisoformat(created)
        if moment.tzinfo is None:
            raise ValueError("no time zone")
    except (ValueError, binascii.Error):
        raise Invalid(f"continue: {token[:40]!r} is no token of a list; start again without it") from None
    return moment, uid


class WatchFilter:
    """Turns the changes of all jobs into the changes of a selection.

    A job that stops being selected is DELETED to the watcher, one that starts being selected ADDED, as
    in Kubernetes: whoever applies the changes in order always holds exactly the selected jobs.
    """

    def __init__(self, selection: Selection):
        self._selection = selection
        self._shown: set[str] = set()

    def apply(self, change: Change) -> Change | None:
        """What to tell the watcher, or None where this change is not for him."""
        uid = change.job.metadata.uid
        shown = uid in self._shown
        if change.type == "DELETED" or not self._selection.holds(change.job):
            self._shown.discard(uid)
            return Change("DELETED", change.job) if shown else None
        self._shown.add(uid)
        return Change("MODIFIED" if shown else "ADDED", change.job)


def select(jobs: Sequence[TrainingJob], selection: Selection) -> list[TrainingJob]:
    return [job for job in jobs if selection.holds(job)]
