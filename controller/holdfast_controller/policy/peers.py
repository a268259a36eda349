"""When to end the rest of an attempt that has lost a member.

It cannot go on, and every second it lingers delays the next attempt. Peers mostly crash by themselves
on the broken connection, and get a moment for that: a first cause is easier to read when nobody killed
the witnesses. Ranks that agreed to stop on a notice are saving, and have the whole grace: from when we knew
of it, for a node's clock may be behind ours, and by that alone their grace would be over.

A replica whose grace is long over and of which nobody says that it has ended is on a lost node. It may even
train on, where the node is cut off from Kubernetes alone: it is given up all the same, for nobody can tell.
"""

from __future__ import annotations

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState

from .classify import bad, finished

SETTLE_SECONDS = 1.0
LOST_SECONDS = 60.0
"""After its grace a replica whose node says nothing is given up: the fence keeps it from writing."""
OVER_SECONDS = 0.3
"""For torchrun to end by itself once every rank has ended."""


def kill_at(
    observation: AttemptObservation,
    processes_per_replica: int,
    grace_seconds: float,
    known_at: float,
    settle_seconds: float = SETTLE_SECONDS,
) -> float | None:
    """Seconds since the epoch from which on what is left should be killed; None: it is in order.

    `known_at`: when it was first seen that it is not. No later than the grace after that: what a replica
    tells of its end may be of a clock that was ahead.
    """
    at = _by_ends(observation, processes_per_replica, grace_seconds, known_at, settle_seconds)
    return None if at is None else min(at, known_at + max(grace_seconds, settle_seconds))


def _by_ends(
    observation: AttemptObservation,
    processes_per_replica: int,
    grace_seconds: float,
    known_at: float,
    settle_seconds: float,
) -> float | None:
    if not observation.replicas:
        return None  # nothing of it could be made yet
    ends = [end for replica in observation.replicas if (end := trouble_at(replica)) is not None]
    running = [replica for replica in observation.replicas if replica.state is ReplicaState.RUNNING]
    if not running and all(replica.state is not ReplicaState.PENDING for replica in observation.replicas):
        known = [replica.ended_at for replica in observation.replicas if replica.ended_at is not None]
        return max(known, default=0.0) + settle_seconds
    if not ends:
        return None
    if running and all(len(replica.ranks) >= processes_per_replica for replica in running):
        last = max(rank.ended for replica in running for rank in replica.ranks)
        return max(last, min(ends)) + min(OVER_SECONDS, settle_seconds)
    if any(_noticed(replica) for replica in observation.replicas):
        return known_at + max(grace_seconds, settle_seconds)
    return min(ends) + settle_seconds


def lost_at(observation: AttemptObservation) -> float | None:
    """Seconds since the epoch from which on a replica is given up that does not end; None: none is to end."""
    due = [replica.due for replica in observation.replicas if replica.due is not None]
    return min(due) + LOST_SECONDS if due else None


def trouble_at(replica: ReplicaObservation) -> float | None:
    """When it, or a rank of it, was first known to have ended before its work was done."""
    ends = [rank.ended for rank in replica.ranks if bad(rank)]
    if replica.state in (ReplicaState.FAILED, ReplicaState.SUCCEEDED) and not finished(replica):
        ends.append(replica.ended_at or 0.0)
    elif _noticed(replica):
        ends.extend(rank.ended for rank in replica.ranks)
    return min(ends, default=None)


def _noticed(replica: ReplicaObservation) -> bool:
    return replica.termination is not None and replica.termination.outcome == "interrupted"
