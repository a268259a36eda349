"""What each step did, put together as its parts become known, then told once.

A step's time is known when it ends, and its line is written then: that it was done must not be forgotten
where the next one is cut short. Its loss (a mean over ranks) and what all ranks worked on come with the same
exchange, or with the next step's: on a GPU, where steps are short (see Exchange.early), and for what is told
after the optimizer's turn. Spans on a GPU come with the next step's end. What comes later has a further line.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .contract import ENV_TELEMETRY, Progress
from .epochs import Epoch, Epochs
from .ledger import Journal
from .loading import Loader, Threads
from .redone import Redone
from .sizes import loss_text
from .spans import Spans
from .telemetry import StepFigures, Telemetry
from .tensorboard import TensorBoard
from .utilization import Meter, Use
from .verdict import Judge, Verdict

log = logging.getLogger("holdfast")

TENSORBOARD_SECONDS = 1.0
EPOCH_SECONDS = 1.0
"""An epoch is told in the log at most so often; steps.jsonl has all."""


@dataclass
class _Line:
    """A step that has ended, of which not all is known yet."""

    wall_seconds: float
    judged: bool
    tokens: int
    samples: int
    fields: dict[str, Any]
    """What is known and not written yet."""
    awaits: set[str] = field(default_factory=set)
    """What is still to come: loss, counts, spans."""
    loss: float | None = None
    spans: Mapping[str, float] = field(default_factory=dict)
    written: bool = False
    """As far as it was known at the step's end."""


class StepLog:
    """Between the loop and its two listeners, telemetry and (on rank 0) the journal."""

    def __init__(
        self,
        spans: Spans,
        telemetry: Telemetry,
        journal: Journal | None,
        world_size: int,
        judge: Judge | None = None,
    ) -> None:
        self._spans, self._telemetry, self._journal = spans, telemetry, journal
        self._tokens = self._samples = 0
        """Of all ranks, in the step that is under way."""
        self._awaits_loss = False
        self._lines: dict[int, _Line] = {}
        self._untimed: int | None = None
        """The step whose spans are still to be told."""
        self._began = self._previous_end = self._left = 0.0
        self._any = False
        self._judge = judge or Judge(
            world_size, mfu=telemetry.mfu, loading=Loader(spans.waits).look, crowding=Threads().look
        )
        self._cause = ""
        self.tensorboard: TensorBoard | None = None
        """Gets the figures too, at most once in `TENSORBOARD_SECONDS`."""
        self._drawn = 0.0
        self.redone: Redone | None = None
        """Where an attempt before may have done the same steps."""
        self.epochs: Epochs | None = None
        """Where it is known how many steps one is."""
        self._epoch_meter: Meter | None = None
        """Of the time between the ends of two epochs, to within a step."""
        self._epoch_told = float("-inf")
        self._off = os.environ.get(ENV_TELEMETRY) == "off"

    def watch(self, use: Use) -> None:
        """Of what this rank computes on."""
        self._epoch_meter = Meter(use)
        if use.of == "gpu":
            self._judge.gpu = Meter(use)

    def restart_clock(self) -> None:
        """A loop begins: what was done before it, since the loop before, is no step's."""
        self._time_last()
        self._spans.end_step()
        self._spans.off = self._off and self._any
        self._previous_end = 0.0

    def begin(self) -> None:
        """A step begins now."""
        self._left = 0.0
        self._began = time.perf_counter()
        self._previous_end = self._previous_end or self._began

    def leave(self) -> None:
        """The loop is left, maybe in a step that will be told to have ended: what comes now is not of it."""
        self._left = time.perf_counter()
        self._spans.off = True

    def count(self, step: int, tokens: int, samples: int) -> None:
        """What all ranks worked on in step number `step`, which may have ended."""
        line = self._lines.get(step)
        if line is None or "counts" not in line.awaits:
            self._tokens += tokens
            self._samples += samples
            return
        line.tokens += tokens
        line.samples += samples
        line.awaits.discard("counts")
        self._worked(line)

    def _worked(self, line: _Line) -> None:
        line.fields["tokens"] = line.tokens
        self._telemetry.worked(StepFigures(line.wall_seconds, line.tokens, line.samples))

    def expect_loss(self) -> None:
        """A loss of this step was offered to the exchange."""
        self._awaits_loss = True

    def end(self, step: int, *, owes_counts: bool = False) -> None:
        """Step number `step` (1 is the first) is done; `owes_counts`: `count` will be called for it again."""
        if self._off and self._any:
            self._telemetry.count(step)
            return
        self._spans.off = self._off
        now = self._left or time.perf_counter()
        seconds, wall_seconds = now - self._began, now - self._previous_end
        self._previous_end = now
        self._time_last()
        self._spans.end_step()
        self._telemetry.step(step, seconds, wall_seconds)
        # The first step compiles and allocates: it says nothing of the others.
        line = _Line(wall_seconds, self._any, self._tokens, self._samples, fields={"seconds": seconds})
        self._lines[step] = line
        awaited = {"loss": self._awaits_loss, "counts": owes_counts, "spans": True}
        line.awaits = {part for part, awaits in awaited.items() if awaits}
        if not owes_counts:
            self._worked(line)
        self._untimed = step
        if not self._spans.late:
            self._time_last()
        if not self._any and self._journal is not None:
            first = self._telemetry.progress.first_step_time
            self._journal.event("first_step", time=first, step=step, seconds=seconds)
        if not self._any:
            self._judge.begin()
        self._any = True
        self._tokens = self._samples = 0
        self._awaits_loss = False

    def flush(self) -> None:
        """No step may come after the last one: wait for the spans of that."""
        self._time_last()
        self.tell()

    def _time_last(self) -> None:
        """Tell the spans of the step that ended last, with the time that they were a part of."""
        step, self._untimed = self._untimed, None
        if step is None:
            return
        spans, line = self._spans.collect(), self._lines[step]
        self._telemetry.timed(line.wall_seconds, spans)
        line.spans = spans
        line.fields["data_seconds"] = spans.get("data")
        line.awaits.discard("spans")

    def _hear(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        self._telemetry.verdict(verdict)
        if self._journal is not None and verdict.cause != self._cause:
            log.info("%s", verdict.sentence)
        self._cause = verdict.cause

    def loss(self, step: int, value: float) -> None:
        """The mean loss of a step that has ended."""
        if self._off and self._any:
            return
        self._telemetry.loss(value, step)
        difference = self.redone.compare(step, float(value)) if self.redone is not None else ""
        if difference and self._journal is not None:
            self._journal.event("differs", step=step, difference=difference)
        if step in self._lines:
            line = self._lines[step]
            line.loss = value
            line.fields |= {"loss": value, "loss_hex": float(value).hex()}
            line.awaits.discard("loss")

    def val_loss(self, step: int, value: float) -> None:
        """A validation of the state after `step` steps."""
        self._telemetry.val_loss(value)
        if self.tensorboard is not None:
            self.tensorboard.scalars(step, {"validation loss": value})
        if self._journal is not None:
            log.info("step %d: validation loss %s", step, loss_text(value))
            self._journal.steps([{"step": step, "val_loss": value, "val_loss_hex": float(value).hex()}])

    def tell(self) -> None:
        """Write what is known of the steps that have ended; of one that was written, what came since, once
        that is all."""
        ready = {step: line for step, line in self._lines.items() if not (line.written and line.awaits)}
        if not ready:
            return
        for step, line in ready.items():
            if not line.awaits and line.judged:
                self._hear(self._judge.step(line.wall_seconds, line.spans, line.tokens))
            if not line.awaits and self.epochs is not None:
                ended = self.epochs.add(step, line.wall_seconds, line.tokens, line.samples, line.loss)
                if ended is not None:
                    ended = self._metered(ended)
                    line.fields |= ended.fields
                    self._report(ended)
        if self._journal is not None:
            self._journal.steps([{"step": step, **line.fields} for step, line in ready.items()])
        for step, line in ready.items():
            line.written, line.fields = True, {}
            if not line.awaits:
                del self._lines[step]
                self._draw(step)

    def _metered(self, epoch: Epoch) -> Epoch:
        share = None if self._epoch_meter is None else self._epoch_meter.share()
        if self._epoch_meter is None or share is None:
            return epoch
        return replace(epoch, busy=(self._epoch_meter.of, share))

    def _report(self, epoch: Epoch) -> None:
        now = time.monotonic()
        if self._journal is None or now - self._epoch_told < EPOCH_SECONDS:
            return
        self._epoch_told = now
        mfu, known = self._telemetry.mfu(epoch.tokens / epoch.seconds), self._telemetry.progress
        log.info("%s", epoch.sentence(known.val_loss, mfu, known.memory_bytes))

    def _draw(self, step: int) -> None:
        now = time.monotonic()
        if self.tensorboard is not None and now - self._drawn >= TENSORBOARD_SECONDS:
            self._drawn = now
            self.tensorboard.scalars(step, figures_of(self._telemetry.progress))


def figures_of(progress: Progress) -> dict[str, float]:
    """What is known of a step, by the name that a chart gets."""
    figures = {
        "loss": progress.loss,
        "loss, smoothed": progress.loss_ema,
        "gradient norm": progress.grad_norm,
        "tokens per second": progress.tokens_per_second,
        "samples per second": progress.samples_per_second,
        "step seconds": progress.step_seconds,
        "share of time waiting for data": progress.data_wait_fraction,
        "MFU": progress.mfu,
        "GPU utilisation": progress.gpu_utilization,
        "CPU utilisation": progress.cpu_utilization,
        "memory, at most": progress.memory_bytes,
        "epoch": progress.epoch,
    }
    return {name: value for name, value in figures.items() if value is not None}
