"""Whether a job may start again. Failures and disruptions are counted apart; what is the platform's
fault never uses up what the user allowed for the job's own faults."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_controller.jobs import Retries, Verdict

FAILURES = frozenset((Verdict.FAILED, Verdict.OUT_OF_MEMORY, Verdict.HUNG))
DISRUPTIONS = frozenset((Verdict.DISRUPTED, Verdict.LOST_NODE))
NO_PLACE = frozenset((Verdict.UNSCHEDULABLE, Verdict.IMAGE_PULL, Verdict.STORAGE_UNAVAILABLE))
"""Nothing of the job's ran, and nothing was taken from it: it waits for a node, an image or its storage, and
its budgets stay."""


@dataclass(frozen=True)
class Spending:
    """The counts after an incident, and whether another attempt may follow it."""

    failures: int
    disruptions: int
    again: bool
    reason: str = ""
    """Why not again, in a sentence with the remedy."""


def spend(verdict: Verdict, failures: int, disruptions: int, allowed: Retries) -> Spending:
    """Book one incident. `failures` and `disruptions` are the counts before it.

    A configuration error counts as a failure and is never tried again. A finished or suspended attempt
    costs nothing, nor does one that found no place.
    """
    if verdict is Verdict.CONFIG_ERROR:
        return Spending(
            failures + 1,
            disruptions,
            False,
            "no retry can mend its configuration; correct it and submit again",
        )
    if verdict in FAILURES:
        if failures >= allowed.failures:
            return Spending(
                failures + 1,
                disruptions,
                False,
                f"no retry for failures is left (retries.failures: {allowed.failures})",
            )
        return Spending(failures + 1, disruptions, True)
    if verdict in DISRUPTIONS:
        if allowed.disruptions is not None and disruptions >= allowed.disruptions:
            return Spending(
                failures,
                disruptions + 1,
                False,
                f"no restart for disruptions is left (retries.disruptions: {allowed.disruptions})",
            )
        return Spending(failures, disruptions + 1, True)
    return Spending(failures, disruptions, verdict is Verdict.SUSPENDED or verdict in NO_PLACE)
