"""Whether an attempt hangs though none of its own ranks says so.

Ranks watch themselves and each other (the trainer's watchdog.py); whoever stops all of them at once, or
stops the clocks of their watchdogs, is seen from here alone. The engine must say that every replica runs:
what has lost a member is no hang, and one that is being stopped or saved is left to its grace.
"""

from __future__ import annotations

from holdfast_controller.cluster import AttemptObservation, ReplicaState


def hangs(observation: AttemptObservation) -> str:
    """Why the attempt is to be ended, in a sentence; empty where it is not known to hang."""
    silence = observation.silence
    if silence is None or not silence.over or observation.stopping or observation.waiting:
        return ""
    if any(r.state is not ReplicaState.RUNNING or r.ranks or r.disrupted for r in observation.replicas):
        return ""
    if silence.answers:
        how = "rank 0 answers, and its own watchdog did not end it"
    else:
        how = "rank 0 takes connections and answers none: all its threads stand still"
    return f"no step for {silence.seconds:.0f} s, of {silence.limit:.0f} s that may be: {how}"
