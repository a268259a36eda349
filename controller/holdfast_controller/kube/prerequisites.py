"""What a cluster must have before jobs can run, and what of it this one lacks.

The controller stays up without either: it goes on asking, and carries jobs on when the last is there.
"""

from __future__ import annotations

import asyncio

from holdfast_controller.attempt_kind import AttemptKind

from .pieces import Pieces
from .reflector import Reflector, key_of

LOOK_SECONDS = 1.0

NO_DEFINITION = (
    "the CRD trainingjobs.holdfast.dev: no job can be submitted; install the chart, which brings it"
)
NO_OPERATOR = (
    "{operator}: the CRD {crd} is not there; jobs are taken and wait; "
    "install the operator (k8s/README.md), nothing has to be restarted"
)


def missing(jobs: Reflector, pieces: Pieces, kind: AttemptKind) -> tuple[str, ...]:
    """A sentence for each kind that the apiserver does not serve; `kind` is that of the attempts to come."""
    no_operator = NO_OPERATOR.format(operator=kind.operator, crd=kind.resource.crd)
    lacks = ((jobs.missing, NO_DEFINITION), (pieces.lacks(kind), no_operator))
    return tuple(sentence for gone, sentence in lacks if gone)


async def wake_when_complete(jobs: Reflector, pieces: Pieces, kind: AttemptKind) -> None:
    """Have all jobs looked at when the operator comes: nothing else tells of it. Until cancelled."""
    lacked = False
    while True:
        lacks = pieces.lacks(kind)
        if lacked and not lacks:
            for job in jobs.all():
                pieces.wake(key_of(job))
        lacked = lacks
        await asyncio.sleep(LOOK_SECONDS)
