"""When to give up an attempt of which a part runs and a part finds no place.

What runs of it waits at the rendezvous and holds its GPUs for nothing; two gangs that each got half of what
both need would wait for each other. A queue (Kueue) admits whole gangs and keeps that from happening; without
one the attempt gives its places back after a while, and tries again later. An attempt of which nothing runs
holds nothing: it waits as long as it takes, and says why.
"""

from __future__ import annotations

from datetime import datetime

from holdfast_controller.cluster import AttemptObservation, ReplicaState

from .classify import Incident

WAIT_SECONDS = 300.0
"""Less than torchrun waits for its peers, whose error would pass for a failure of the job."""


def half_placed(observation: AttemptObservation, now: datetime) -> Incident | None:
    """The verdict that the attempt is to be ended with; None while it may go on."""
    began = observation.started_at
    if began is None or (now - began).total_seconds() < WAIT_SECONDS or observation.stopping:
        return None
    up = sum(replica.state is ReplicaState.RUNNING for replica in observation.replicas)
    out = [r for r in observation.replicas if r.state is ReplicaState.PENDING and r.stuck is not None]
    if not up or not out or out[0].stuck is None:
        return None
    return Incident(
        out[0].stuck,
        f"{up} of {len(observation.replicas)} replicas ran for {WAIT_SECONDS:g} s and waited for "
        f"replica {out[0].index}: {out[0].reason}",
        out[0].index,
    )
