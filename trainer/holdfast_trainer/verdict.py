"""Where the time of a step goes and what holds it back: one sentence with the setting to change.

The loop's spans are added up over an interval; what they do not cover is `other`. The causes are looked at
in order: what is no computing at all first (validation, data, saves, gaps), then whether there are cores to
compute on and whether others have the GPU too, then what computing wastes (a slow optimizer, a network), then
how well the rest uses the device.
A wait for data has two causes with two remedies, and the cores tell which it is: what loads computes, or it
waits for a disk or network in its turn (see loading.py). Where NVML tells how busy the GPU is, a GPU that is
given too little is known by that, also of a model whose multiplications nobody counts. Validation is no part
of a step, and an interval has one or has none: it is weighed from the end of the attempt's first one to that
of its newest.
With DDP, what backward waits for the exchange of gradients is a phase of its own. Where nobody measured that,
it is told from the rest: backward costs about twice what forward does (two matrix products for one), and what
goes far beyond that with several ranks is the exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .loading import Crowding, Loading
from .sizes import share_text
from .utilization import Meter

INTERVAL_SECONDS = 30.0
"""A verdict is given at most so often."""
VALIDATION_SHARE = 0.2
"""Of all time, not of a step's."""
DATA_SHARE = 0.05
LOADER_COMPUTES = 0.5
"""Of a core, what loads computes from here on, rather than that it waits for a disk or network."""
QUEUED_SHARE = 0.2
"""What waits for a core for so much of its time would not be helped by another worker beside it."""
SAVE_SHARE = 0.05
OTHER_SHARE = 0.15
OPTIMIZER_SHARE = 0.25
COMMUNICATION_SHARE = 0.1
BACKWARD_TO_FORWARD = 3.5
"""Where the exchange was not measured."""
LOW_MFU = 0.3
JOINED_MFU = 0.45
"""Of a GPU: GPT-2 in bf16 has a third on an H100, and half compiled."""
SHARED_SHARE = 0.5
"""Of all time; what computes on the GPU beside this for less of it may be a look at something."""
GPU_IDLES = 0.5
"""A GPU that has a kernel to run for less of the time is given too little."""
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
    loading: Loading | None = None
    """What the cores did while steps waited for data; None: not known."""
    gpu: float | None = None
    """Share of time in which a kernel ran on the GPU, anybody's; None: there is none, or it is not known."""
    crowding: Crowding | None = None
    """None: the kernel does not tell."""
    shared: float | None = None
    """Share of time in which others computed on the GPU too; None: not known."""

    def share(self, phase: str) -> float:
        """Of the wall time, 0 to 1."""
        return self.spans.get(phase, 0.0) / self.seconds

    def rate(self, device: str = "device") -> str:
        """In words, after what a step takes; empty where it is not known."""
        return "" if self.mfu is None else f" at {share_text(self.mfu)} of what the {device} can multiply"

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
    "validation", "data computing", "data reading", "data", "checkpoint", "other", "no core",
    "shared gpu", "optimizer", "communication", "device idle", "compute", "unknown",
)  # fmt: skip
"""`data`: waits of which nothing more is known."""


def judge(interval: Interval) -> Verdict:
    """The first cause that applies."""
    each = 1e3 * interval.seconds / interval.steps
    took = f"a step takes {each:,.1f} ms"
    if not any(phase in interval.spans for phase in COMPUTING):
        unknown = Verdict("unknown", f"{took}; put its parts into run.span(...) to see what holds it back")
        return _waiting(interval, took) or unknown
    return (
        _waiting(interval, took)
        or _outside(interval, took)
        or _without_cores(interval, took)
        or _shared_gpu(interval, took)
        or _wasted(interval, took)
        or _used(interval, took)
    )


def _waiting(interval: Interval, took: str) -> Verdict | None:
    """What can be told of a loop that names none of its computing, too."""
    data, saves = interval.share("data"), interval.share("checkpoint")
    if interval.validation > VALIDATION_SHARE:
        return Verdict(
            "validation",
            f"{took}, and {interval.validation:.0%} of all time is validation: validate less often "
            "(validation.every), or on less (validation.batches)",
        )
    if data > DATA_SHARE:
        busy = "" if interval.gpu is None else f" (the GPU is {share_text(interval.gpu)} busy)"
        return _data(f"{took}, of which {data:.0%} waits for data{busy}", interval.loading)
    if saves > SAVE_SHARE:
        return Verdict(
            "checkpoint",
            f"{took}, of which {saves:.0%} is held up by saves: raise checkpoint.every (auto weighs what a "
            "save costs), or take a faster disk",
        )
    return None


def _outside(interval: Interval, took: str) -> Verdict | None:
    if interval.other <= OTHER_SHARE:
        return None
    return Verdict(
        "other",
        f"{took}, of which {interval.other:.0%} is outside of every span: Python between the parts, a metric "
        "read back from the device in each step, or a peer that is waited for",
    )


def _data(waits: str, loading: Loading | None) -> Verdict:
    """By what the cores do meanwhile."""
    if loading is None or (loading.own < LOADER_COMPUTES and loading.workers and loading.wanted is None):
        return Verdict(
            "data",
            f"{waits}: do beforehand what makes it (prepare tokenises), {NEARER}, or give the loader more "
            "workers",
        )
    if loading.wanted is not None and loading.wanted >= LOADER_COMPUTES:
        which = "its worker" if loading.workers == 1 else f"the busiest of its {loading.workers} workers"
        does = _computes(which, loading.wanted, loading.queued, "the time")
        more = _helpers(loading, loading.queued)
        return Verdict("data computing", f"{waits}; {does}: {BEFOREHAND}, or {more}")
    own = _computes("this process", min(1.0, loading.own), loading.own_queued, "that")
    if loading.own >= LOADER_COMPUTES:
        has_workers = loading.workers and loading.own_queued < QUEUED_SHARE
        moved = "have the loader's workers do it" if has_workers else _helpers(loading, loading.own_queued)
        return Verdict("data computing", f"{waits}; {own}: {BEFOREHAND}, or {moved}")
    if loading.wanted is not None:
        own += f", and no worker of its loader for more than {loading.wanted:.0%} of the time"
    return Verdict(
        "data reading",
        f"{waits}; {own}: the loader waits for a disk or network itself: {NEARER}, or have it read further "
        "ahead (more workers, more that each prefetches)",
    )


BEFOREHAND = "do that beforehand, once (prepare tokenises)"
NEARER = "put the data on a local or a faster disk (data.path)"


def _number_of_cores(cores: float, ranks: int) -> str:
    number = f"{cores:g} core{'' if cores == 1 else 's'}"
    return number if ranks == 1 else f"{number} of {ranks} ranks"


def _computes(who: str, share: float, queued: float, of: str) -> str:
    """`share` and `queued` as shares of `of`."""
    if queued < QUEUED_SHARE:
        return f"{who} computes for {share:.0%} of {of}"
    return f"{who} would compute for {share:.0%} of {of}, and has no core for {min(1.0, queued):.0%}"


def _helpers(loading: Loading, queued: float) -> str:
    """More workers, where they would have cores."""
    cores = _number_of_cores(loading.cores, loading.ranks)
    if queued >= QUEUED_SHARE or loading.cores <= loading.ranks * max(1, loading.workers):
        return f"give the job more cores (resources.cpu; it has {cores})"
    return f"give the loader more workers ({cores})"


def _without_cores(interval: Interval, took: str) -> Verdict | None:
    crowding = interval.crowding
    gpu_works = interval.gpu is not None and interval.gpu >= GPU_IDLES
    if crowding is None or crowding.queued < QUEUED_SHARE or gpu_works:
        return None
    loading, workers = interval.loading, ""
    if loading is not None and loading.workers * (loading.wanted or 0.0) >= LOADER_COMPUTES:
        workers = f" (its loader has {loading.workers} worker{'s' if loading.workers > 1 else ''})"
    return Verdict(
        "no core",
        f"{took}, and {crowding.queued:.0%} of the time that this process would compute it waits for a core: "
        f"let less run beside it{workers}, have it take no more threads than there are cores "
        "(train.threads), or give the job more of them (resources.cpu; it has "
        f"{_number_of_cores(crowding.cores, crowding.ranks)})",
    )


def _shared_gpu(interval: Interval, took: str) -> Verdict | None:
    idles = interval.gpu is None or interval.gpu < GPU_IDLES
    if interval.shared is None or interval.shared < SHARED_SHARE or idles:
        return None
    return Verdict(
        "shared gpu",
        f"{took}{interval.rate('GPU')}, and for {interval.shared:.0%} of the time other processes compute on "
        "this GPU too, which take turns with it: let less run beside it, or give the job a GPU of its own "
        "(spec.gpus)",
    )


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


MORE_AT_ONCE = (
    "raise train.micro_batch while memory lasts (with train.global_batch, where it is all of a rank's share "
    "of that), then try train.compile=true where it is off"
)


def _used(interval: Interval, took: str) -> Verdict:
    if interval.gpu is not None and interval.gpu < GPU_IDLES:
        return Verdict(
            "device idle",
            f"{took}, and the GPU has work for {share_text(interval.gpu)} of the time: Python gives it too "
            f"little at once: {MORE_AT_ONCE}",
        )
    if interval.mfu is not None and interval.mfu < LOW_MFU:
        return Verdict("device idle", f"{took}{interval.rate()}: {MORE_AT_ONCE}")
    share = sum(map(interval.share, COMPUTING))
    told = f"{took}, of which {share:.0%} computes{interval.rate()}"
    if interval.gpu is not None and interval.mfu is not None and interval.mfu < JOINED_MFU:
        return Verdict(
            "compute",
            f"{told}, and the GPU is kept busy: what it does beside that is joined by train.compile=true, "
            "where it is off (tune measures what it gains)",
        )
    return Verdict("compute", f"{told}: nothing holds it back")


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
        loading: Callable[[], Loading | None] = lambda: None,
        crowding: Callable[[], Crowding | None] = lambda: None,
    ) -> None:
        """`mfu`: at so many tokens a second; `loading` and `crowding`: since they were asked last; None where
        that is not known."""
        self._world_size, self._every, self._mfu = world_size, interval_seconds, mfu
        self._loading, self._crowding = loading, crowding
        self.gpu: Meter | None = None
        """Where the device is one."""
        self._since = time.monotonic()
        self._steps, self._seconds, self._tokens = 0, 0.0, 0
        self._told = self._untold = 0.0
        """Seconds in which those tokens were worked on, and since they were told of: a loop may do so once in
        some steps, which an interval has a part of."""
        self._spans: dict[str, float] = {}
        self._cycles: _Cycles | None = None

    def begin(self) -> None:
        """What is measured since the beginning or the last verdict counts from now on."""
        self._since = time.monotonic()
        self._meanwhile()

    def _meanwhile(self) -> tuple[Loading | None, float | None, Crowding | None, float | None]:
        busy, shared = (None, None) if self.gpu is None else self.gpu.shares()
        return self._loading(), busy, self._crowding(), shared

    def step(self, seconds: float, spans: Mapping[str, float], tokens: int = 0) -> Verdict | None:
        """A step took `seconds` of wall time for the `tokens` of all ranks; a verdict where the interval is
        over. Validation is left out of it: it is no part of a step.
        """
        spans = dict(spans)
        validation = spans.pop("validation", 0.0)
        self._steps += 1
        self._seconds += max(0.0, seconds - validation)
        self._untold += max(0.0, seconds - validation)
        if tokens:
            self._tokens += tokens
            self._told, self._untold = self._told + self._untold, 0.0
        if self._cycles is not None:
            self._cycles.add(seconds, validation)
        elif validation:
            self._cycles = _Cycles()
        for phase, took in spans.items():
            self._spans[phase] = self._spans.get(phase, 0.0) + took
        now = time.monotonic()
        if now - self._since < self._every or not self._seconds:
            return None
        mfu = self._mfu(self._tokens / self._told) if self._told else None
        share = self._cycles.share if self._cycles is not None else 0.0
        meanwhile = self._meanwhile()
        verdict = judge(
            Interval(self._steps, self._seconds, self._spans, mfu, self._world_size, share, *meanwhile)
        )
        self._since, self._steps, self._seconds, self._spans = now, 0, 0.0, {}
        self._tokens, self._told = 0, 0.0
        return verdict
