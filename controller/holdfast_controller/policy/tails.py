"""Which last lines of ranks stay in a job's status.

An apiserver takes no object above 1.5 MiB, and the job's own configuration may be a third of that: a status
that outgrew it could not be written any more, and the job would stand still. So the newest attempts keep
theirs; of older ones the whole logs are in the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from holdfast_controller.jobs import AttemptRecord

TAIL_BYTES = 128 * 1024
"""Of all attempts together, as they are written: four gangs of eight ranks with plain text."""


def bound_tails(attempts: Sequence[AttemptRecord], limit: int = TAIL_BYTES) -> None:
    """Leave out, in place, what does not fit: the oldest attempts first, and of one its last ranks."""
    left = limit
    for record in reversed(attempts):
        kept = {}
        for rank, text in record.log_tail.items():
            left -= len(json.dumps(text, ensure_ascii=False).encode())
            if left < 0:
                break
            kept[rank] = text
        record.log_tail = kept
