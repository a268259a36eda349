"""How much work an attempt lost, and how much of a job's time went into work that counts.

**Lost steps** of an attempt: its last step done less the step the job went on from. While the next
attempt has not told where it resumed, that is the newest step known to be durable; once it has, the
figure is corrected, for a checkpoint may have become durable in the last instant, or turn out damaged.
An attempt that finished the job loses nothing: no step of it is done again.

**Goodput**: time on steps that count / wall time since the job's first attempt started. A step counts
in the last attempt that did it; earlier runs of the same step were lost and count for nothing. Its time
is the `seconds` the trainer measured for it. Wall time is all of it: starting, saving, waiting for room,
backing off, being suspended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.jobs import Verdict

Line = Mapping[str, Any]
"""A line of ledger.jsonl or steps.jsonl with its "attempt" (contract.py)."""


@dataclass(frozen=True)
class Work:
    """What one attempt did; None where nobody said."""

    resumed_step: int | None
    last_step: int | None
    durable_step: int | None
    first_step_at: float | None
    """Seconds since the epoch."""


def work_of(
    attempt: int, ledger: Iterable[Line], steps: Iterable[Line], observation: AttemptObservation | None = None
) -> Work:
    """Gather an attempt's steps from everything that tells of them; the highest figure is the true one."""
    resumed = first_step_at = None
    last: list[int] = []
    durable: list[int] = []
    for line in ledger:
        if line.get("attempt") != attempt:
            continue
        event = line.get("event")
        if event == "attempt_start":
            resumed = _int(line, "resumed_step") or 0
            durable.append(resumed)
            last.append(resumed)
        elif event == "first_step":
            first_step_at = float(line["time"]) if "time" in line else None
        elif event == "checkpoint":
            durable.append(_int(line, "step") or 0)
        elif event == "stop":
            durable.append(_int(line, "durable_step") or 0)
            last.append(_int(line, "step") or 0)
    last.extend(_int(line, "step") or 0 for line in steps if line.get("attempt") == attempt)
    if observation is not None:
        messages = [replica.termination for replica in observation.replicas if replica.termination]
        last.extend(message.step for message in messages)
        durable.extend(message.durable_step for message in messages)
        if observation.progress is not None:
            last.append(observation.progress.step)
            durable.append(observation.progress.durable_step)
    return Work(
        resumed,
        max(last, default=None),
        min(max(durable), max(last)) if durable and last else None,
        first_step_at,
    )


def lost_steps(work: Work, verdict: Verdict, next_resumed: int | None = None) -> int | None:
    """Steps that were done and have to be done again; None where no step is on record."""
    if verdict is Verdict.FINISHED:
        return 0
    if work.last_step is None:
        return None
    kept = next_resumed if next_resumed is not None else (work.durable_step or 0)
    return max(0, work.last_step - kept)


def goodput(steps: Iterable[Line], wall_seconds: float) -> float | None:
    """Between 0 and 1; None before the first step. `steps` are of all attempts, in order."""
    seconds: dict[int, float] = {}
    newest: dict[int, int] = {}
    for line in steps:
        step, attempt, took = _int(line, "step"), _int(line, "attempt"), line.get("seconds")
        if step is None or attempt is None or not isinstance(took, int | float):
            continue
        if attempt >= newest.get(step, 0):
            newest[step] = attempt
            seconds[step] = float(took)
    if not seconds or wall_seconds <= 0:
        return None
    return min(1.0, sum(seconds.values()) / wall_seconds)


def _int(line: Line, name: str) -> int | None:
    value = line.get(name)
    return value if isinstance(value, int) else None
