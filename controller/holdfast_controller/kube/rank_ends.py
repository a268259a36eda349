"""How a rank of a pod ended, where its supervisor alone could tell. Pure.

A rank that a signal ended has said nothing, and torchrun exits 1 whatever ended it. Then the container's
termination message is the supervisor's (holdfast_trainer/supervise.py, `--tell-exit`). Whoever runs in the
pod can write there: what is not whole counts for nothing.
"""

from __future__ import annotations

import json

from holdfast_controller.cluster import RankExit
from holdfast_trainer.contract import is_count, is_time


def rank_ends(message: str) -> tuple[RankExit, ...]:
    """The rank that the message tells of; empty where it is the trainer's own, or anything else."""
    try:
        told = json.loads(message)
        end = RankExit.from_document(told["rank"], told)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    how = [number for number in (end.code, end.signal) if number is not None]
    whole = all(is_count(number) for number in (end.rank, *how, end.peak_bytes or 0))
    known = is_time(end.ended)
    return (end,) if whole and known and len(how) == 1 else ()
