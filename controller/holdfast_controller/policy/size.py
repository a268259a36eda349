"""How many replicas the next attempt has, of a job that may have fewer than it asks for (`minReplicas`).

An attempt of which a part found no place is given up (half_placed.py); the next one takes the places that
there were. Sizes are divisors of `replicas`: a batch that all ranks share evenly is shared evenly by fewer.

Fewer replicas stay as many for a while when their attempt ends: to find out that there still is no room for
all costs another wait. After that, or when the job was suspended and resumed, all are asked for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from holdfast_controller.jobs import AttemptRecord, Verdict
from holdfast_controller.spec import Spec

AGAIN = timedelta(minutes=30)
"""After all replicas were asked for in vain."""


def next_replicas(spec: Spec, attempts: Sequence[AttemptRecord], now: datetime) -> int | None:
    """How many, where they are fewer than the job asks for; None for all of them.

    `attempts` are the records in order, each with its verdict.
    """
    if spec.min_replicas is None or not attempts:
        return None
    fewer = [
        size for size in range(spec.replicas - 1, spec.min_replicas - 1, -1) if spec.replicas % size == 0
    ]
    newest = attempts[-1]
    if newest.placed is not None and newest.placed < spec.replicas:
        return next((size for size in fewer if size <= newest.placed), None)
    if newest.replicas not in fewer or newest.verdict is Verdict.SUSPENDED:
        return None
    in_vain = (one.ended_at for one in reversed(attempts) if one.placed is not None and one.ended_at)
    tried = next(in_vain, None)
    return newest.replicas if tried is not None and now - tried < AGAIN else None
