"""How long to wait before the next attempt: nothing after a disruption, ever longer after failures."""

from __future__ import annotations

import hashlib

from holdfast_controller.jobs import Verdict

from .budget import FAILURES

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 300.0


def backoff(verdict: Verdict, failures: int, seed: str) -> float:
    """Seconds until the next attempt after an incident; `failures` counts this one too.

    1, 2, 4 ... 300 s after the first, second, third failure, less up to a quarter by the seed: many jobs
    that failed together do not all come back together, and a controller that asks again gets the same
    answer.
    """
    if verdict not in FAILURES:
        return 0.0
    full = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures - 1, 30))
    digest = hashlib.sha256(f"{seed}/{failures}".encode()).digest()
    return full * (1 - 0.25 * int.from_bytes(digest[:4], "big") / 2**32)
