"""Whether a job's run directory knows of newer attempts than the job does.

Where a cluster's etcd is restored from a backup, jobs are as they were then, while their run directories are
as they are: the fence there shuts out every attempt up to the newest that ever was. To go through all of
these numbers would cost a failure each, and end the job for good; the next attempt is the one after them.
"""

from __future__ import annotations

import re

from holdfast_controller.cluster import AttemptObservation

_FENCED = re.compile(r"attempt (\d+) was superseded by attempt (\d{1,6}): it may no longer write to ")
"""As any rank of it says (checkpoint/directory.py, object_fence.py of the trainer)."""


def superseded_by(observation: AttemptObservation) -> tuple[int, int] | None:
    """The replica that says that its attempt was superseded, and by which; None: none says so.

    It is of the newest attempt on record: nothing that was opened since then is.
    """
    for replica in observation.replicas:
        said = _FENCED.match(replica.termination.error) if replica.termination is not None else None
        if said is not None and int(said[1]) == observation.attempt < int(said[2]):
            return replica.index, int(said[2])
    return None


def why_superseded(attempt: int, newer: int) -> str:
    return (
        f"attempt {attempt} was superseded by attempt {newer}, of which nothing is on record: the cluster "
        "was restored from a backup, or somebody else trains in its run directory"
    )
