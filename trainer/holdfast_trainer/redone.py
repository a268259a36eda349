"""Steps that are done again: an exact resume gives each of them the loss that it had, to the last bit.

A killed attempt has done steps beyond the checkpoint that the next one goes on from, and told their losses.
Where one differs now, the loop has something that no checkpoint holds, and whoever trusts the resume is told.
"""

from __future__ import annotations

import logging

from .contract import RunDir, is_count, newest_lines, read_lines

log = logging.getLogger("holdfast")

TAIL_BYTES = 1 << 20
"""Of the last attempt's steps: they are in order, and the newest are those that are done again."""


class Redone:
    """The losses that the newest attempt before which told any has of steps after `step`: one that ended as
    it started told none. One that went on with something else than it had been saved with, such as another
    number of ranks, has other bits; but for what it saved itself, as attempt `saved_by` did."""

    def __init__(self, run: RunDir, attempt: int, step: int, saved_by: int) -> None:
        since = (number for number in run.attempt_numbers() if saved_by <= number < attempt)
        alike = (n for n in sorted(since, reverse=True) if n == saved_by or _went_on_alike(run, n))
        told = next(filter(None, (_told(run, number) for number in alike)), {})
        self._losses = {done: loss for done, loss in told.items() if done > step}

    def compare(self, step: int, loss: float) -> str:
        """In what the step differs, where it had another loss before; once, and with a warning."""
        before = self._losses.pop(step, loss)
        if before.hex() == loss.hex():  # NaN equals NaN here
            return ""
        self._losses.clear()
        log.warning(
            "step %d was done before with a loss of %r, and has %r now: the resume is not exact. Its "
            "batch is no function of the step, or random numbers are drawn more often after a resume, "
            "as by a DataLoader that is iterated once more (give it generator=torch.Generator())",
            step,
            before,
            loss,
        )
        return f"loss of step {step}, done again: {before!r} -> {loss!r}"


def _went_on_alike(run: RunDir, attempt: int) -> bool:
    lines = read_lines(run.ledger(attempt))
    return any(line.get("event") == "attempt_start" and not line.get("differences") for line in lines)


def _told(run: RunDir, attempt: int) -> dict[int, float]:
    """By step."""
    try:
        lines = newest_lines(run.steps(attempt), TAIL_BYTES)
    except OSError:
        return {}
    found = [(line.get("step"), _number(line.get("loss_hex"))) for line in lines]
    return {step: loss for step, loss in found if is_count(step) and loss is not None}


def _number(text: object) -> float | None:
    try:
        return float.fromhex(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None
