"""When to give up an attempt of which a part runs and a part finds no place.

What runs of it waits at the rendezvous and holds its GPUs for nothing; two gangs that each got half of what
both need would wait for each other. A queue (Kueue) admits whole gangs and keeps that from happening; without
one the attempt gives its places back after a while, and tries again later. An attempt of which nothing runs
holds nothing: it waits as long as it takes, and says why.
"""

from __future__ import annotations

from datetime import datetime

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState

from .classify import Incident

PLACE_SECONDS = 300.0
"""Less than torchrun waits for its peers, whose error would pass for a failure of the job."""


def half_placed(
    observation: AttemptObservation, now: datetime, place_seconds: float = PLACE_SECONDS
) -> Incident | None:
    """The verdict that the attempt is to be ended with; None while it may go on."""
    left, out = seconds_left(observation, now, place_seconds), _left_out(observation)
    if left is None or left > 0 or out is None or out.stuck is None:
        return None
    return Incident(
        out.stuck,
        f"{observation.up} of {len(observation.replicas)} replicas ran for {place_seconds:g} s and "
        f"waited for replica {out.index}: {out.reason}",
        out.index,
    )


def seconds_left(
    observation: AttemptObservation, now: datetime, place_seconds: float = PLACE_SECONDS
) -> float | None:
    """Until the attempt is given up, should nothing change; None where it would not be."""
    began = observation.started_at
    if began is None or observation.stopping or _left_out(observation) is None:
        return None
    return place_seconds - (now - began).total_seconds()


def _left_out(observation: AttemptObservation) -> ReplicaObservation | None:
    """The first replica that finds no place, where others run."""
    replicas = observation.replicas
    if not observation.up:
        return None
    out = (one for one in replicas if one.state is ReplicaState.PENDING and one.stuck is not None)
    return next(out, None)
