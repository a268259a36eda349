"""What holds a workload of one's own back: findings from facts, the costliest first.

Pure: `WorkloadFacts` are measured by a few steps (see `probing.py`); each finding has the share of a step's
time that it explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..rehearsal import StepTimes
from ..run_facts import RunFacts
from ..samples import workers_by_rule
from ..verdict import DATA_SHARE, OPTIMIZER_SHARE
from .census import Line
from .settings import Settings

Cause = Literal[
    "data",
    "workers",
    "python",
    "precision",
    "optimizer",
    "batch",
    "network",
    "no core",
    "compute",
    "checkpoint",
]
OPERATIONS_A_SAMPLE = 10
"""From these on a forward pass goes through its samples, or their parts, in Python: however deep a network
is, one more sample in the batch adds no operation to it."""


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts(RunFacts):
    """Measured with the settings as they are. Times in seconds."""

    settings: Settings
    times: StepTimes
    """A mean step."""
    samples_per_second: float
    operations: int
    """Tensor operations of one forward pass."""
    lines: Sequence[Line]
    """That issue them, busiest first."""
    operations_of_one: int
    """What one more sample in the batch adds to them."""
    cores: int
    fast_bf16: bool
    device_type: str
    ranks_here: int = 1
    """That share the cores."""
    attention: str = ""
    """The kernel that attention took (see attention_kernels); empty where there is none."""
    memory: int = 0
    """Bytes that the steps took, of the rank that took most."""
    room: int = 0
    """Bytes that the rank with least could have taken."""
    not_deterministic: Sequence[str] = ()
    """Operations that torch has no deterministic kernel for, where such were asked for."""
    steps: int | None = None
    """Of the whole training; None where that is not said."""

    @property
    def estimated_seconds(self) -> float | None:
        """From start to end of a run; None where it is not said how long that is."""
        return None if self.steps is None else self.seconds_of(self.steps, self.times.seconds)


@dataclass(frozen=True)
class Explained:
    """`share` is the part of a step's time that this is about: none, of a save beside the steps."""

    cause: Cause
    share: float
    message: str


def explain(facts: WorkloadFacts) -> list[Explained]:
    """All that applies, the largest share first."""
    found = [*_data(facts), *_workers(facts), *_python(facts), *_optimizer(facts)]
    found += [*_batch(facts), *_precision(facts)]  # of the same share; small operations gain little by bf16
    found += [*_network(facts), *_without_cores(facts)]
    if not found:
        message = "nothing stands out: forward and backward take the time; try torch.compile"
        found.append(Explained("compute", 1.0, message))
    found += _checkpoint(facts)
    return sorted(found, key=lambda one: -one.share)


def _data(facts: WorkloadFacts) -> list[Explained]:
    share = facts.times.data / facts.times.seconds
    if share <= DATA_SHARE:
        return []
    remedy = "do what it does beforehand, once (tokenise with prepare, decode, resize), and keep the result"
    workers = _usual_workers(facts)
    if workers and not facts.settings.workers:
        remedy = f"no worker prepares batches while the model computes: try workers={workers}; or {remedy}"
    return [Explained("data", share, f"{share:.0%} of a step waits for data: {remedy}")]


def _workers(facts: WorkloadFacts) -> list[Explained]:
    started = facts.settings.workers * facts.ranks_here
    if started <= facts.cores:
        return []
    message = (
        f"{started} workers of {facts.ranks_here} rank(s) on {facts.cores} cores wait for each other, and "
        f"training waits for them: try workers={_usual_workers(facts)}"
    )
    return [Explained("workers", facts.times.data / facts.times.seconds, message)]


def _usual_workers(facts: WorkloadFacts) -> int:
    return workers_by_rule(facts.cores, facts.ranks_here, gpu=facts.device_type == "cuda")


def _python(facts: WorkloadFacts) -> list[Explained]:
    if facts.operations_of_one < OPERATIONS_A_SAMPLE or not facts.lines:
        return []
    share = (facts.times.forward + facts.times.backward) / facts.times.seconds
    top = facts.lines[0]
    made = sum(line.made for line in facts.lines)
    worst = max(facts.lines, key=lambda line: line.made)
    making = (
        f", {made:,} of them making a tensor from Python's values (most at {worst.place})" if made else ""
    )
    message = (
        f"a forward pass issues {facts.operations:,} tensor operations{making}, and every sample adds "
        f"{facts.operations_of_one:,}: a loop in Python, busiest at {top.place} with "
        f"{top.operations / facts.operations:.0%} of them. Pad or pack the samples into one batch where they "
        "are collated, make what does not change once, and let each operation work on the whole batch"
    )
    return [Explained("python", share, message)]


def _optimizer(facts: WorkloadFacts) -> list[Explained]:
    share = facts.times.optimizer / facts.times.seconds
    if share <= OPTIMIZER_SHARE and (facts.settings.fused or share <= DATA_SHARE):
        return []
    remedies = [] if facts.settings.fused else ["give it fused=True, one kernel for all parameters"]
    if facts.settings.samples < 8:
        remedies.append(f"do more work between two of its steps than {facts.settings.samples} samples")
    elif facts.settings.accumulate == 1 or not remedies:
        passes = "several" if facts.settings.accumulate == 1 else "more"
        remedies.append(f"accumulate {passes} passes a step")
    return [Explained("optimizer", share, f"{share:.0%} of a step is the optimizer: {'; '.join(remedies)}")]


def _precision(facts: WorkloadFacts) -> list[Explained]:
    if facts.settings.precision != "fp32" or not facts.fast_bf16:
        return []
    share = (facts.times.forward + facts.times.backward) / facts.times.seconds
    message = f"fp32, in {share:.0%} of a step: this device multiplies bf16 faster"
    return [Explained("precision", share, message)]


def _batch(facts: WorkloadFacts) -> list[Explained]:
    if facts.settings.batch > 1:
        return []
    share = (facts.times.forward + facts.times.backward) / facts.times.seconds
    message = "a pass holds one sample: operations are small and memory idle; let tune --grow it"
    return [Explained("batch", share, message)]


def _network(facts: WorkloadFacts) -> list[Explained]:
    """Gradients are exchanged within the backward pass."""
    if (slow := facts.slow_network()) is None:
        return []
    return [Explained("network", facts.times.backward / facts.times.seconds, ": ".join(slow))]


def _without_cores(facts: WorkloadFacts) -> list[Explained]:
    if facts.device_type != "cpu" or _workers(facts) or (message := facts.short_of_cores()) is None:
        return []
    return [Explained("no core", 0.0, message)]  # of how it was measured, not of the training


def _checkpoint(facts: WorkloadFacts) -> list[Explained]:
    problem = facts.outlasts_notice()
    return [] if problem is None else [Explained("checkpoint", 0.0, problem)]
