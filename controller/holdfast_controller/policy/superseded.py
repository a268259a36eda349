"""Whether a job's run directory knows of newer attempts than the job does.

Where a cluster's etcd is restored from a backup, jobs are as they were then, while their run directories are
as they are: the fence there shuts out every attempt up to the newest that ever was. To go through all of
these numbers would cost a failure each, and end the job for good; the next attempt is the one after them.
Once: who is shut out again shares its run directory with somebody who trains in it now, as where the cluster
that was backed up still runs, and to overtake each other would never end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.jobs import AttemptRecord

_FENCED = re.compile(r"attempt (\d+) was superseded by attempt (\d{1,4}): it may no longer write to ")
"""As any rank of it says (checkpoint/directory.py, object_fence.py of the trainer). No job comes to more:
what programs write themselves is not to have everybody look for a million attempts."""
_SHUT_OUT = "of which nothing is on record"


def superseded_by(
    observation: AttemptObservation, attempts: Sequence[AttemptRecord]
) -> tuple[int, int] | None:
    """The replica that says that its attempt was superseded, and by which; None: none says so, or it was said
    of one of the `attempts` before it.

    It is of the newest attempt on record: nothing that was opened since then is.
    """
    if any(_SHUT_OUT in record.reason for record in attempts if record.number < observation.attempt):
        return None
    for replica in observation.replicas:
        said = _FENCED.match(replica.termination.error) if replica.termination is not None else None
        if said is not None and int(said[1]) == observation.attempt < int(said[2]):
            return replica.index, int(said[2])
    return None


def why_superseded(attempt: int, newer: int) -> str:
    return (
        f"attempt {attempt} was superseded by attempt {newer}, {_SHUT_OUT}: the cluster "
        "was restored from a backup, or somebody else trains in its run directory"
    )
