"""One tuning from beginning to end: search, table, choice. What was measured survives an interrupt."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from ..footprint import warm_up
from ..memory import ranks_here
from ..model_config import divisors
from ..optim import FUSED_DEVICES
from ..parallel import Gang
from ..precision import bf16_of, choose_precision, has_tf32, least
from ..samples import workers_by_rule
from ..schema import ConfigError
from .measure import Build, Effort, Outcome, measure
from .plan import ALL_ON, AS_IT_IS, Candidate, Measured, Switch, candidates, choose
from .search import ROOM_SHARE, Size, best_size, doubling, scaled_rate, sizes_to_try
from .settings import Settings

RECOMPUTING, NOT_RECOMPUTING = f"{ALL_ON}, recomputing", f"{ALL_ON}, not recomputing"
LARGEST_GROWTH = 64
"""A step takes at most so many times the samples of today."""


@dataclass(frozen=True)
class Subject:
    """What is tuned: how to build it, how it is today, and what about it can be changed."""

    build: Build
    settings: Settings
    unit: str
    per_sample: float | None
    """Units in a sample; None where they differ."""
    learning_rate: float
    rule: Literal["sqrt", "linear"]
    has_workers: bool
    can_recompute: bool
    samples: int
    """In the data."""
    repeats: Literal[True, "strict"] = True
    """What its run asks for where bits are to repeat (see Settings.deterministic)."""


@dataclass(frozen=True)
class Options:
    effort: Effort
    rounds: int = 3
    compile: bool = True
    grow: bool = False
    """A step may take more samples than today: another training, with another learning rate."""


@dataclass
class Findings:
    """What is known so far."""

    sizes: list[Size] = field(default_factory=list)
    """Of the batch search; speed in units a second, of all ranks."""
    workers: dict[int, float] = field(default_factory=dict)
    threads: dict[int, float] = field(default_factory=dict)
    rows: list[Measured] = field(default_factory=list)
    room: int = 0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def chosen(self) -> Candidate | None:
        measured = any(row.holds and not row.candidate.only_shown for row in self.rows)
        return choose(self.rows) if measured else None


class Session:
    """Of one rank; all ranks go through the same calls."""

    def __init__(
        self,
        subject: Subject,
        gang: Gang,
        options: Options,
        heard: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check`, before each measurement, raises KeyboardInterrupt where there is to be none."""
        self._check = check
        self._subject, self._gang, self._options, self._heard = subject, gang, options, heard
        self.findings = Findings()
        if subject.settings.compile and not options.compile:
            self._subject = replace(subject, settings=replace(subject.settings, compile=False))
            self._note("compile: on until now, and left out here as asked: no figure is with it")

    def run(self) -> Findings:
        """Raises ConfigError where not even today's settings can be measured."""
        warm_up(self._gang.device)  # else what is measured first would take that, too
        try:
            switches = self._search()
            self._table(switches)
        except KeyboardInterrupt:
            self.findings.interrupted = True
        return self.findings

    # ------------------------------------------------------------------ search

    def _search(self) -> list[Switch]:
        today = self._subject.settings
        device = self._gang.device.type
        best = choose_precision("auto", device, least(self._gang.gather(bf16_of(self._gang.device))))
        slow = today.precision if best == "fp32" else "fp32"
        if best == "fp32":
            what = "which stays" if slow == best else f"which is tried in the place of {slow}"
            self._note(f"precision: this device multiplies neither bf16 nor fp16 faster than fp32, {what}")
        fused = device in FUSED_DEVICES
        tf32 = all(self._gang.gather(has_tf32(self._gang.device)))
        fast = replace(today, precision=cast(Any, best), fused=fused, tf32=tf32 or today.tf32)
        today_as_found = self._measure("today's settings", today)
        if today_as_found.fault:
            raise ConfigError(f"today's settings ({today.told()}) cannot be measured: {today_as_found.fault}")
        self.findings.room = today_as_found.room
        fast = self._search_threads(self._search_workers(self._search_batch(fast)))
        pairs = [
            Switch("batch", *_pair(fast, today, "batch", "accumulate", "learning_rate")),
            Switch("precision", {"precision": best}, {"precision": slow}),
            Switch("fused optimizer", {"fused": fused}, {"fused": False}),
            Switch("threads", *_pair(fast, today, "threads")),
            Switch("workers", *_pair(fast, today, "workers")),
        ]
        if tf32:
            pairs.append(Switch("TF32", {"tf32": True}, {"tf32": False}))
        if self._options.compile:
            pairs.append(Switch("compile", {"compile": True}, {"compile": False}))
        return pairs

    def _search_batch(self, settings: Settings) -> Settings:
        today = self._subject.settings
        allowed = divisors(today.samples)
        if self._options.grow:
            last = min(today.samples * LARGEST_GROWTH, self._subject.samples // self._gang.world_size)
            allowed = sorted({*allowed, *doubling(today.samples, max(last, today.samples))})
        at_least_today = [size for size in allowed if size >= today.batch]
        if len(at_least_today) == 1:
            self._note("batch: a pass holds a whole step already; --grow tries larger steps")
            return settings
        search = sizes_to_try(at_least_today, int(ROOM_SHARE * self.findings.room))
        try:
            batch = next(search)
            while True:
                tried = self._with_batch(settings, batch)
                outcome = self._measure(f"batch {batch}", tried)
                size = None if outcome.fault else Size(batch, outcome.speed, outcome.memory)
                if size:
                    self.findings.sizes.append(size)
                batch = search.send(size)
        except StopIteration as end:
            best = best_size(end.value)
        return settings if best is None else self._with_batch(settings, best.batch)

    def _with_batch(self, settings: Settings, batch: int) -> Settings:
        today = self._subject.settings
        passes = max(1, today.samples // batch)
        growth = batch * passes / today.samples
        rate = today.learning_rate
        if growth > 1:
            rate = scaled_rate(self._subject.learning_rate, growth, self._subject.rule)
        return replace(settings, batch=batch, accumulate=passes, learning_rate=rate)

    def _search_workers(self, settings: Settings) -> Settings:
        if not self._subject.has_workers:
            return settings
        cores = len(os.sched_getaffinity(0))
        usual = workers_by_rule(cores, ranks_here(), gpu=self._gang.device.type == "cuda")
        tries = sorted({0, 1, 2, usual, self._subject.settings.workers})
        found = self.findings.workers
        for count in tries:
            outcome = self._measure(f"{count} workers", replace(settings, workers=count))
            if not outcome.fault:
                found[count] = outcome.speed
        return replace(settings, workers=_fewest_of_fastest(found, settings.workers))

    def _search_threads(self, settings: Settings) -> Settings:
        if self._gang.device.type != "cpu":
            return settings
        mine = max(1, len(os.sched_getaffinity(0)) // ranks_here())
        found = self.findings.threads
        for count in sorted({1, max(1, mine // 2), mine}):
            outcome = self._measure(f"{count} threads", replace(settings, threads=count))
            if not outcome.fault:
                found[count] = outcome.speed
        if not found:
            return settings
        return replace(settings, threads=_fewest_of_fastest(found, settings.threads or mine))

    # ------------------------------------------------------------------- table

    def _table(self, switches: list[Switch]) -> None:
        for switch in switches:
            if not switch.does_anything:
                self._note(f"{switch.name}: nothing to change here")
        plan = candidates(self._subject.settings, switches)
        on = next(row.settings for row in plan if row.name == ALL_ON)
        plan.append(self._with_other_kernels(on))
        if self._subject.can_recompute:
            name = NOT_RECOMPUTING if on.recompute else RECOMPUTING
            plan.append(Candidate(name, replace(on, recompute=not on.recompute)))
        rows = self.findings.rows = [Measured(candidate) for candidate in plan]
        for turn in range(self._options.rounds):
            first = turn % len(rows)
            for row in rows[first:] + rows[:first]:
                alike = [other for other in rows if other.candidate.settings == row.candidate.settings]
                if row.fault or row is not alike[0]:  # as it is may be all on: one combination has one figure
                    continue
                title = f"round {turn + 1} of {self._options.rounds}: {row.candidate.name}"
                outcome = self._measure(title, row.candidate.settings)
                for one in alike:
                    if outcome.fault:
                        one.fault = outcome.fault
                    else:
                        one.speeds.append(outcome.speed)
                        one.memory = max(one.memory, outcome.memory)

    def _with_other_kernels(self, on: Settings) -> Candidate:
        """What it costs that a resume is exact to the bit, or would, is measured and left to the user."""
        if on.deterministic:
            name, other = f"{ALL_ON} but deterministic kernels", replace(on, deterministic=False)
            self._note(
                "deterministic kernels: what they cost is shown, and they stay: resumes are exact by them"
            )
        else:
            other = replace(on, deterministic=self._subject.repeats)
            name = f"{ALL_ON} but any kernels"
            self._note("deterministic kernels: off, and they stay so; what they would cost is shown")
        return Candidate(name, other, only_shown=True)

    def _measure(self, title: str, settings: Settings) -> Outcome:
        self._check()
        outcome = measure(self._subject.build, settings, self._gang, self._options.effort)
        figures = outcome.fault or (
            f"{outcome.speed:,.1f} {self._subject.unit}/s, {outcome.memory / 1e6:,.0f} MB"
        )
        self._heard(f"{title} ({settings.told()}): {figures}")
        return outcome

    def _note(self, text: str) -> None:
        self.findings.notes.append(text)
        self._heard(text)


def _pair(on: Settings, off: Settings, *names: str) -> tuple[dict[str, object], dict[str, object]]:
    return {n: getattr(on, n) for n in names}, {n: getattr(off, n) for n in names}


def _fewest_of_fastest(found: dict[int, float], otherwise: int) -> int:
    if not found:
        return otherwise
    fastest = max(found.values())
    return min(count for count, speed in found.items() if speed * 1.03 >= fastest)


__all__ = ["AS_IT_IS", "Findings", "Options", "Session", "Subject"]
