"""What the attempts of a job, seen together, say that no single one does.

**The same failure again.** Training is a function of its step: an attempt that fails at the step where the
one before failed, with the same words, will fail there for ever (a poison batch, a NaN, a model that does
not fit). Before the first step it is another matter: a service that was down may be back. So it is where a
GPU is broken: the next attempt may have another one.

**Standstill.** Disruptions are free, however many there are. A job that is disrupted again and again before
a new step is durable would run for ever and get nowhere, at full price: that is said.

**Cut short.** Of what is killed within a minute of each start, before a step, nothing comes, and on one
machine nothing of the younger jobs in line either, for an older one goes first: such attempts come back ever
later, as failures do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from itertools import takewhile

from holdfast_controller.jobs import AttemptRecord, Capacity, Verdict

from .budget import DISRUPTIONS, FAILURES, NO_PLACE

REPEATABLE = (Verdict.FAILED, Verdict.OUT_OF_MEMORY)
STANDSTILL_ATTEMPTS = 3
SHORT = timedelta(minutes=1)
_BROKEN_GPU = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|device\(s\) is/are busy or unavailable|CUDA error: unknown error"
    r"|no CUDA-capable device is detected|peer GPU memory over nvlink or a hardware error"
)
"""How CUDA tells of one; an illegal access or a failed launch may be the program's."""
SAVE_MORE = "save more often (checkpoint.every)"


def same_failure(attempts: Sequence[AttemptRecord], total_steps: int | None) -> str:
    """Why another try is of no use, after the newest attempt; empty where it may be of use.

    `attempts` are the records in order, each with its verdict. Disruptions between two failures do not
    part them.
    """
    apart = {*DISRUPTIONS, *NO_PLACE, Verdict.SUSPENDED}
    judged = [record for record in attempts if record.verdict not in apart]
    if len(judged) < 2:
        return ""
    before, newest = judged[-2:]
    if newest is not attempts[-1] or newest.verdict not in REPEATABLE or not newest.last_step:
        return ""
    if _failure(newest) != _failure(before) or _BROKEN_GPU.search(newest.reason):
        return ""
    if total_steps is not None and newest.last_step >= total_steps:
        look = "all steps were done: look at what comes after them, such as the last save"
    else:
        look = f"look at what step {newest.last_step + 1} computes, and at its batch"
    return (
        f"attempt {before.number} ended after step {newest.last_step} in the same way: "
        f"no retry gets past it; {look}"
    )


def _failure(record: AttemptRecord) -> tuple[Verdict | None, int | None, str]:
    """What is the same where it comes again: of replicas that fail alike any may be the first."""
    return record.verdict, record.last_step, re.sub(r"^replica \d+: ", "", record.reason)


def as_it_trained(newest: AttemptRecord, attempts: Sequence[AttemptRecord]) -> bool:
    """Whether an attempt before has trained with what the newest one's spec asks for: then that is no mistake
    for good. Another GPU may lack what it needs, or its machine a volume."""
    earlier = (one for one in attempts if one.number < newest.number)
    return any(one.trained and one.made_of == newest.made_of for one in earlier)


def times_in_a_row(attempts: Sequence[AttemptRecord], verdict: Verdict) -> int:
    """How often this has happened by now, for the back-off after the newest attempt, which ended in it."""
    if verdict in NO_PLACE:
        return len(list(takewhile(lambda record: record.verdict in NO_PLACE, reversed(attempts))))
    if verdict in DISRUPTIONS:
        return len(list(takewhile(_cut_short, reversed(attempts))))
    return failures_in_a_row(attempts)


def _cut_short(record: AttemptRecord) -> bool:
    """Whether it was disrupted soon after its start, before a step of its own."""
    if record.verdict not in DISRUPTIONS or record.first_step_at is not None or record.ended_at is None:
        return False
    return record.started_at is None or record.ended_at - record.started_at < SHORT


def failures_in_a_row(attempts: Sequence[AttemptRecord]) -> int:
    """How many of the newest attempts failed, since one made a step durable; at least 1 after a failure."""
    failed = 0
    for record in reversed(attempts):
        failed += record.verdict in FAILURES
        if record.checkpoints:
            break
    return max(1, failed)


def standstill(attempts: Sequence[AttemptRecord]) -> str:
    """That disruptions came faster than durable steps; empty where they did not."""
    taken: list[AttemptRecord] = []
    for record in reversed(attempts):
        if record.verdict not in DISRUPTIONS:
            break
        taken.append(record)
    durable = {record.durable_step for record in taken[:STANDSTILL_ATTEMPTS]}
    if len(taken) < STANDSTILL_ATTEMPTS or len(durable) > 1 or durable == {None}:
        return ""  # None: nobody knows, as of a command that is not Holdfast's trainer
    (step,) = durable
    same = next((n for n, record in enumerate(taken) if record.durable_step != step), len(taken))
    before = taken[0].number - same
    known = before == 0 or any(record.number == before for record in attempts[: len(attempts) - same])
    at_least = "" if known else "at least "
    return f"disrupted {at_least}{same} times in a row with no step after {step} made durable"


def remedy(asked: Capacity) -> str:
    """What helps, or is done, where `standstill` holds."""
    if asked is Capacity.SPOT_FIRST:
        return (
            f"the next attempt goes to other than spot nodes, where there are any with room; else {SAVE_MORE}"
        )
    if asked is Capacity.ON_DEMAND:
        return SAVE_MORE
    return f"{SAVE_MORE}, or take capacity that stays longer (capacity: OnDemand)"


def next_capacity(asked: Capacity, attempts: Sequence[AttemptRecord]) -> Capacity | None:
    """What the next attempt may have, where that is not what the job asks for."""
    if asked is Capacity.SPOT_FIRST and standstill(attempts):
        # Not OnDemand: a cluster may have no such nodes, and it would wait for ever.
        return Capacity.ON_DEMAND_FIRST
    return None
