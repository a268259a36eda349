"""Where the time of a step goes and what holds it back: one sentence with the setting to change.

The loop's spans are added up over an interval; what they do not cover is `other`. The causes are looked at
in order: what is no computing at all first (validation, data, saves, gaps), then what computing wastes (a
slow optimizer, a network), then how well the rest uses the device. Validation is no part of a step, and an
interval has one or has none: it is weighed from the end of the attempt's first one to that of its newest.
With DDP, what backward waits for the exchange of gradients is a phase of its own. Where nobody measured that,
it is told from the rest: backward costs about twice what forward does (two matrix products for one), and what
goes far beyond that with several ranks is the exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

INTERVAL_SECONDS = 30.0
"""A verdict is given at most so often."""
VALIDATION_SHARE = 0.2
"""Of all time, not of a step's."""
DATA_SHARE = 0.05
SAVE_SHARE = 0.05
OTHER_SHARE = 0.15
OPTIMIZER_SHARE = 0.25
COMMUNICATION_SHARE = 0.1
BACKWARD_TO_FORWARD = 3.5
"""Where the exchange was not measured."""
LOW_MFU = 0.3
COMPUTING = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Interval:
    """What the steps of an interval took on this rank."""

    steps: int
    seconds: float
    """Wall time from the end of the step before the first to the end of the last, without validation."""
    spans: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    world_size: int = 1
    validation: float = 0.0
    """Its share of all time, of this interval and those before, 0 to 1."""

    def share(self, phase: str) -> float:
        """Of the wall time, 0 to 1."""
        return self.spans.get(phase, 0.0) / self.seconds

    @property
    def other(self) -> float:
        """Share of the time that no span covers."""
        return max(0.0, 1.0 - sum(self.spans.values()) / self.seconds)


@dataclass(frozen=True)
class Verdict:
    """`cause` is one of `CAUSES`; `sentence` says it with figures and what to change."""

    cause: str
    sentence: str


CAUSES = (
    "validation", "data", "checkpoint", "other", "optimizer", "communication", "device idle", "compute",
    "unknown",
)  # fmt: skip


def judge(interval: Interval) -> Verdict:
    """The first cause that applies."""
    each = 1e3 * interval.seconds / interval.steps
    took = f"a step takes {each:,.1f} ms"
    if not any(phase in interval.spans for phase in COMPUTING):
        return Verdict("unknown", f"{took}; put its parts into run.span(...) to see what holds it back")
    return _not_computing(interval, took) or _wasted(interval, took) or _used(interval, took)


def _not_computing(interval: Interval, took: str) -> Verdict | None:
    data, saves, other = interval.share("data"), interval.share("checkpoint"), interval.other
    if interval.validation > VALIDATION_SHARE:
        return Verdict(
            "validation",
            f"{took}, and {interval.validation:.0%} of all time is validation: validate less often "
            "(validation.every), or on less (validation.batches)",
        )
    if data > DATA_SHARE:
        return Verdict(
            "data",
            f"{took}, of which {data:.0%} waits for data: tokenise beforehand (prepare), put data.path on a "
            "local disk, or give the loader more workers, pinned memory and prefetching",
        )
    if saves > SAVE_SHARE:
        return Verdict(
            "checkpoint",
            f"{took}, of which {saves:.0%} is held up by saves: raise checkpoint.every (auto weighs what a "
            "save costs), or take a faster disk",
        )
    if other > OTHER_SHARE:
        return Verdict(
            "other",
            f"{took}, of which {other:.0%} is outside of every span: Python between the parts, a metric read "
            "back from the device in each step, or a peer that is waited for",
        )
    return None


def _wasted(interval: Interval, took: str) -> Verdict | None:
    forward, backward = interval.share("forward"), interval.share("backward")
    optimizer = interval.share("optimizer")
    if optimizer > OPTIMIZER_SHARE:
        return Verdict(
            "optimizer",
            f"{took}, of which {optimizer:.0%} is the optimizer: do more work between two of its steps "
            "(a larger train.global_batch), with its fused kernels (fused=True)",
        )
    measured = "communication" in interval.spans
    waits = interval.share("communication")
    if waits > COMMUNICATION_SHARE:
        return Verdict(
            "communication",
            f"{took}, of which {waits:.0%} waits for the exchange of gradients, or for a rank that is "
            "slower: accumulate (a larger train.global_batch at the same train.micro_batch), take a faster "
            "network, or look at what the other ranks do meanwhile",
        )
    if not measured and interval.world_size > 1 and backward > BACKWARD_TO_FORWARD * forward > 0:
        return Verdict(
            "communication",
            f"{took}; backward takes {backward / forward:.1f} times as long as forward where 2 is usual, so "
            "the exchange of gradients holds it back: accumulate (a larger train.global_batch at the same "
            "train.micro_batch; with train.parallel=fsdp, which exchanges in each pass, a larger "
            "train.micro_batch), or take a faster network",
        )
    return None


def _used(interval: Interval, took: str) -> Verdict:
    if interval.mfu is not None and interval.mfu < LOW_MFU:
        return Verdict(
            "device idle",
            f"{took} at {interval.mfu:.0%} of what the device can multiply: raise train.micro_batch while "
            "memory lasts, then try train.compile=true where it is off",
        )
    share = sum(map(interval.share, COMPUTING))
    rate = "" if interval.mfu is None else f" at {interval.mfu:.0%} of what the device can multiply"
    return Verdict("compute", f"{took}, of which {share:.0%} computes{rate}: nothing holds it back")


@dataclass
class _Cycles:
    """Whole ones, each from the end of a validation to that of the next: the first has no beginning."""

    seconds: float = 0.0
    validation: float = 0.0
    share: float = 0.0

    def add(self, seconds: float, validation: float) -> None:
        self.seconds += seconds
        self.validation += validation
        if validation:
            self.share = self.validation / self.seconds


class Judge:
    """Adds up steps and judges them, at most once an interval."""

    def __init__(
        self,
        world_size: int,
        interval_seconds: float = INTERVAL_SECONDS,
        mfu: Callable[[float], float | None] = lambda _: None,
    ) -> None:
        """`mfu`: at so many tokens a second; None where that is not known."""
        self._world_size, self._every, self._mfu = world_size, interval_seconds, mfu
        self._since = time.monotonic()
        self._steps, self._seconds, self._tokens = 0, 0.0, 0
        self._spans: dict[str, float] = {}
        self._cycles: _Cycles | None = None

    def step(self, seconds: float, spans: Mapping[str, float], tokens: int = 0) -> Verdict | None:
        """A step took `seconds` of wall time for the `tokens` of all ranks; a verdict where the interval is
        over. Validation is left out of it: it is no part of a step.
        """
        spans = dict(spans)
        validation = spans.pop("validation", 0.0)
        self._steps += 1
        self._tokens += tokens
        self._seconds += max(0.0, seconds - validation)
        if self._cycles is not None:
            self._cycles.add(seconds, validation)
        elif validation:
            self._cycles = _Cycles()
        for phase, took in spans.items():
            self._spans[phase] = self._spans.get(phase, 0.0) + took
        now = time.monotonic()
        if now - self._since < self._every or not self._seconds:
            return None
        mfu = self._mfu(self._tokens / self._seconds)
        share = self._cycles.share if self._cycles is not None else 0.0
        verdict = judge(Interval(self._steps, self._seconds, self._spans, mfu, self._world_size, share))
        self._since, self._steps, self._seconds, self._tokens, self._spans = now, 0, 0.0, 0, {}
        return verdict
