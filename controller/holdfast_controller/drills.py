"""Drills: a disruption on purpose, and the report of what it cost.

The report is computed from what the run itself wrote. Its proof compares the steps that were done again
with what they were the first time, bit by bit: equal losses at every one of them are what an exact resume
gives, and an inexact one does not. Pure; imports nothing, so that the command line may start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Line = Mapping[str, Any]
LAST = ("Finished", "ConfigError")
"""Verdicts that no attempt follows."""


class DrillKind(StrEnum):
    """What a drill does to a replica."""

    KILL = "kill"
    """SIGKILL of every process at once: a lost machine, no notice."""
    NOTICE = "notice"
    """SIGTERM, then SIGKILL after the grace: a spot reclaim."""
    EVICT = "evict"
    """As a drained node does it: Kubernetes' eviction API, which heeds disruption budgets; else a notice."""
    NODE = "node"
    """As `kubectl drain`: its node is cordoned, until somebody uncordons it, and each replica there evicted.
    Where the chart's `jobs.drillNodes` allows it."""
    FREEZE = "freeze"
    """SIGSTOP of its last rank: a hang, which its peers find. On a cluster where the chart's
    `jobs.execInPods` allows it."""
    OOM = "oom"
    """Its ranks run into the memory limit of the job (resources.memory). On a cluster as `freeze`."""


KINDS = (
    "kill: a lost machine. notice: a spot reclaim, SIGTERM first. evict: a drained node's eviction. "
    "node: its whole node is drained; on a cluster alone, where the chart's jobs.drillNodes allows it. "
    "freeze, oom: a rank that hangs, or runs out of memory, and each costs one of retries.failures; on a "
    "cluster where the chart's jobs.execInPods allows it."
)
"""The kinds as users of the API and the command line read of them."""


@dataclass(frozen=True)
class DrillReport:
    """What a drill cost, as far as it is known; None is not known, never zero."""

    attempt: int
    """The one that was disrupted."""
    verdict: str | None
    reason: str
    last_step: int | None
    durable_step: int | None
    resumed_step: int | None
    """Where the next attempt went on."""
    lost_steps: int | None
    recovery_seconds: float | None
    """From the last sign of life before to the end of the first step after it."""
    again: int
    """Steps of the next attempt that had been done before, with a loss on record both times."""
    different: tuple[int, ...]
    """Those of them whose loss had other bits."""
    resume_differences: tuple[str, ...] = ()
    """What the next attempt told of that was not as it was before."""

    @property
    def heard(self) -> bool:
        """Whether the program tells of its steps at all."""
        return self.last_step is not None or self.resumed_step is not None

    @property
    def proof(self) -> str:
        """What the steps done twice say of the resume, and it of itself, in a sentence."""
        told = f"; the resume told: {'; '.join(self.resume_differences)}" if self.resume_differences else ""
        return self._of_steps() + told

    def _of_steps(self) -> str:
        if self.different:
            shown = ", ".join(str(step) for step in self.different[:5])
            return f"NOT exact: of {self.again} steps done twice {len(self.different)} differ, from {shown}"
        if self.again:
            untold = max(0, (self.lost_steps or 0) - self.again)
            rest = f"; the loss of {untold} more was not told before" if untold else ""
            return f"exact: all {self.again} steps done twice gave the same loss to the last bit{rest}"
        if not self.heard:
            return "not known: its program tells nothing of its steps"
        if self.lost_steps == 0 and self.resumed_step is not None:
            return "no step was done twice: it went on from the very state that was saved"
        return "not known: no step has a loss on record from both attempts"


def drill_report(
    attempt: int, phase: str, accounts: Sequence[Line], steps: Sequence[Line]
) -> DrillReport | None:
    """Of the drill that hit `attempt`; None until the attempts after it have done again what was lost.

    `phase` is the job's, `accounts` are the ledger's attempts and `steps` its step lines, as the API gives
    them. A job that ended with the drilled attempt has its report at once: its verdict says so. A program
    that tells nothing of its steps has it once an attempt after that one is taken to run.
    """
    by_number = {int(account["attempt"]): account for account in accounts}
    hit = by_number.get(attempt)
    later = [by_number[number] for number in sorted(by_number) if number > attempt]
    after = next((account for account in later if account.get("firstStepAt")), None)
    if hit is None or hit.get("verdict") is None:
        return None
    unheard = later and all(account.get("lastStep") is None for account in accounts)
    if unheard and after is None:
        there = phase in ("Running", "Succeeded")
    else:
        there = after is not None and not _behind(later, hit.get("lastStep"))
    if hit["verdict"] not in LAST and not there:
        return None
    before = {int(line["step"]): line["loss_hex"] for line in steps if _of(line, 1, attempt)}
    since = {int(line["step"]): line["loss_hex"] for line in steps if _of(line, attempt + 1, None)}
    both = sorted(before.keys() & since.keys())
    return DrillReport(
        attempt=attempt,
        verdict=hit["verdict"],
        reason=hit.get("reason") or "",
        last_step=hit.get("lastStep"),
        durable_step=hit.get("durableStep"),
        resumed_step=None if after is None else after.get("resumedStep"),
        lost_steps=hit.get("lostSteps"),
        recovery_seconds=None if after is None else after.get("recoverySeconds"),
        again=len(both),
        different=tuple(step for step in both if before[step] != since[step]),
        resume_differences=() if after is None else tuple(after.get("resumeDifferences") or ()),
    )


def _behind(later: Sequence[Line], step: int | None) -> bool:
    """Whether the attempts after it have not come beyond `step` yet."""
    return step is not None and max((account.get("lastStep") or 0 for account in later), default=0) <= step


def _of(line: Line, first: int, last: int | None) -> bool:
    attempt = int(line["attempt"])
    return "loss_hex" in line and first <= attempt and (last is None or attempt <= last)
