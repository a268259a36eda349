"""How long to wait before the next attempt: nothing after a disruption, ever longer after failures, after
attempts for which there was no place, and after a third that was taken right after its start."""

from __future__ import annotations

import hashlib

from holdfast_controller.jobs import Verdict

from .budget import DISRUPTIONS, FAILURES, NO_PLACE

FIRST_SECONDS = 1.0
FIRST_WITHOUT_PLACE_SECONDS = 15.0
LONGEST_SECONDS = 300.0
CUT_SHORT_AT_ONCE = 2
"""Attempts disrupted right after their start that are followed at once; bad luck comes that often."""


def backoff(verdict: Verdict, times: int, seed: str) -> float:
    """Seconds until the next attempt after an incident that is the `times`-th of its kind in a row; of
    disruptions those count that came right after a start (repeats.py).

    1, 2, 4 ... 300 s after the first, second, third failure in a row without progress, less up to a quarter
    by the seed: many jobs that failed together do not all come back together, and a controller that asks
    again gets the same answer. A gang that found no place for all of it begins with 15 s: two that each hold
    half of what both need must not come back at once. Nor need one that found its disk full, which
    somebody has to clear.
    """
    if verdict in DISRUPTIONS:
        times -= CUT_SHORT_AT_ONCE
    if verdict not in DISRUPTIONS | FAILURES | NO_PLACE or times < 1:
        return 0.0
    first = FIRST_WITHOUT_PLACE_SECONDS if verdict in NO_PLACE else FIRST_SECONDS
    full = min(LONGEST_SECONDS, first * 2.0 ** min(times - 1, 30))
    digest = hashlib.sha256(f"{seed}/{times}".encode()).digest()
    return full * (1 - 0.25 * int.from_bytes(digest[:4], "big") / 2**32)
