"""From what two runs wrote to the figures of the report, and to the verdict. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_controller.jobs import TrainingJob

Line = dict[str, Any]


NOTICE = "given notice"
"""What an attempt's reason says of it, be it that its ranks said nothing any more."""


class Differs(Exception):
    """The proof does not hold, or the demo did not show what it is there to show."""


@dataclass
class Evidence:
    """What both runs left; documents as REST serves them."""

    submitted: float
    """Seconds since the epoch."""
    job: TrainingJob
    ledger: dict[str, Any]
    steps: list[Line]
    twin_ledger: dict[str, Any]
    twin_steps: list[Line]
    wall_seconds: float = 0.0


def figures(evidence: Evidence) -> dict[str, Any]:
    """What build/demo.json holds."""
    totals = evidence.ledger["totals"]
    trained = [line for line in evidence.steps if "seconds" in line]
    digest, twin_digest = _digest(evidence.ledger), _digest(evidence.twin_ledger)
    fault = differences(evidence)
    return {
        "steps": max(line["step"] for line in trained),
        "attempts": totals["attempts"],
        "disruptions": totals["disruptions"],
        "failures": totals["failures"],
        "lost_steps": totals["lostSteps"],
        "goodput": totals["goodput"],
        "recovery_seconds": totals["recoverySeconds"],
        "notice_lost_steps": notice_lost_steps(evidence.ledger),
        "proof": fault or "identical",
        "digest": digest,
        "twin_digest": twin_digest,
        "tokens_per_second": _per_second(trained, "tokens"),
        "data_wait_fraction": _per_second(trained, "data_seconds"),
        "wall_seconds": evidence.wall_seconds,
        "first_step_seconds": startup(evidence)["total"],
    }


def _per_second(steps: list[Line], of: str) -> float:
    """Over the steps that tell of it: a kill leaves some whose counts were to come a step later."""
    told = [line for line in steps if of in line]
    return float(sum(line[of] for line in told) / sum(line["seconds"] for line in told))


def differences(evidence: Evidence) -> str:
    """Why the runs are not the same to the bit; empty where they are.

    Compared are the digests (every byte of every rank's state at the end) and the loss of every step,
    also of those that were done twice.
    """
    digests = {_digest(evidence.ledger), _digest(evidence.twin_ledger)}
    if None in digests:
        return "the ledger has no digest of a final state"
    if len(digests) > 1:
        return "the digests of the final states differ"
    twin = {(line["step"], kind): line[kind] for line in evidence.twin_steps for kind in _kinds(line)}
    seen = set()
    for line in evidence.steps:
        for kind in _kinds(line):
            key = (line["step"], kind)
            seen.add(key)
            if twin.get(key) != line[kind]:
                return f"{kind} of step {line['step']} is {line[kind]}, the twin's is {twin.get(key)}"
    if missing := sorted(twin.keys() - seen):
        return f"step {missing[0][0]} of the twin is missing in the run"
    return ""


def _kinds(line: Line) -> list[str]:
    return [kind for kind in ("loss_hex", "val_loss_hex") if kind in line]


def _digest(ledger: dict[str, Any]) -> str | None:
    """Of the state at the end of the last attempt; None where that could not tell."""
    digest: str | None = ledger["attempts"][-1]["digest"]
    return digest


def notice_lost_steps(ledger: dict[str, Any]) -> int:
    """Steps lost by attempts that were given notice, whether they could save in time or not."""
    attempts = ledger["attempts"]
    return sum(a["lostSteps"] for a in attempts if a["outcome"] == "interrupted" or NOTICE in a["reason"])


def startup(evidence: Evidence) -> dict[str, float]:
    """Seconds from the submission to the end of the first step, and where they went."""
    lines = [line for line in evidence.ledger["lines"] if line["attempt"] == 1]
    start = next(line for line in lines if line["event"] == "attempt_start")
    first = next(line for line in lines if line["event"] == "first_step")
    parts = dict(start["startup"])
    process_start = start["time"] - sum(parts.values())
    return {
        "controller and torchrun": process_start - evidence.submitted,
        **parts,
        "first step": first["time"] - start["time"],
        "total": first["time"] - evidence.submitted,
    }


def check(result: dict[str, Any], evidence: Evidence) -> None:
    """Raises Differs unless the run was preempted twice, failed never, and is the twin to the bit."""
    wanted = {"disruptions": 2, "failures": 0, "notice_lost_steps": 0, "proof": "identical"}
    for name, value in wanted.items():
        if result[name] != value:
            raise Differs(f"{name} is {result[name]!r}, not {value!r}")
    if result["attempts"] < 3:
        raise Differs(f"{result['attempts']} attempts where two disruptions need three")
    if evidence.twin_ledger["totals"]["attempts"] != 1:
        raise Differs("the twin was touched: it took more than one attempt")
