"""When to give up an attempt that holds places and cannot start as a whole.

What runs of it waits at the rendezvous for what finds no place, and holds its GPUs for nothing; two gangs
that each got half of what both need would wait for each other. A queue (Kueue) admits whole gangs and keeps
that from happening; without one the attempt gives its places back after a while, and tries again later. Where
nothing runs, a replica that has its node and cannot start there (a mistyped image) holds that node's GPUs,
queue or not. An attempt without any node holds nothing: it waits as long as it takes, and says why.

Since when, the record says by our clock: a node's may be minutes from it, and by that alone a gang would be
given up at once, or much later. A replica whose start goes well for long and then fails, as the pull of a
large image may, counts from then: Kubernetes tries that again, and it may be mended in seconds.
"""

from __future__ import annotations

from datetime import datetime

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.jobs import AttemptRecord, Verdict

from .classify import Incident

PLACE_SECONDS = 300.0
"""Less than torchrun waits for its peers, whose error would pass for a failure of the job."""


def half_placed(
    record: AttemptRecord,
    observation: AttemptObservation,
    now: datetime,
    place_seconds: float = PLACE_SECONDS,
) -> Incident | None:
    """The verdict that the attempt is to be ended with; None while it may go on."""
    left, stuck = seconds_left(record, observation, now, place_seconds), _stuck(record, observation)
    if left is None or left > 0 or stuck is None:
        return None
    _, index, verdict, reason = stuck
    waited = f"for {place_seconds:g} s and waited for replica {index}: {reason}"
    who = (
        f"{observation.up} of {len(observation.replicas)} replicas ran"
        if observation.up
        else "it held places"
    )
    return Incident(verdict, f"{who} {waited}", index)


def seconds_left(
    record: AttemptRecord,
    observation: AttemptObservation,
    now: datetime,
    place_seconds: float = PLACE_SECONDS,
) -> float | None:
    """Until the attempt is given up, should nothing change; None where it would not be."""
    stuck = _stuck(record, observation)
    if stuck is None or observation.stopping:
        return None
    return place_seconds - (now - stuck[0]).total_seconds()


def held_up_at(record: AttemptRecord, observation: AttemptObservation, now: datetime) -> datetime | None:
    """Since when a replica that has its node is known to be unable to start there; None: none is."""
    held = any(_is_stuck(one) and one.placed_at is not None for one in observation.replicas)
    return (record.held_up_at or now) if held else None


def _is_stuck(one: ReplicaObservation) -> bool:
    return one.state is ReplicaState.PENDING and one.stuck is not None


def _stuck(
    record: AttemptRecord, observation: AttemptObservation
) -> tuple[datetime, int, Verdict, str] | None:
    """Since when places are held for nothing; the replica, what it lacks, and why.

    The first that finds no place where others run; else that which has been in its place for longest.
    """
    found = []
    for one in observation.replicas:
        since = record.started_at if observation.up else _placed(record, one)
        if not _is_stuck(one) or since is None:
            continue
        if one.placed_at is not None and record.held_up_at is not None:
            since = max(since, record.held_up_at)
        assert one.stuck is not None
        found.append((since, one.index, one.stuck, one.reason))
    return min(found, key=lambda it: it[:2], default=None)


def _placed(record: AttemptRecord, one: ReplicaObservation) -> datetime | None:
    """When it got its node: not before the attempt was opened."""
    at, opened = one.placed_at, record.opened_at
    return at if at is None or opened is None else max(at, opened)
