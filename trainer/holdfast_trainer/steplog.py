"""What each step did, put together as its parts become known, then told once.

A step's time is known when it ends; its loss (a mean over ranks) and its spans come with that end on a CPU
and with the next one's on a GPU. What all ranks worked on is known then, or with the next step's exchange
where it is told after the optimizer's turn. A line is written when nothing more is to come.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from .contract import ENV_TELEMETRY, Progress
from .ledger import Journal
from .spans import Spans
from .telemetry import StepFigures, Telemetry
from .tensorboard import TensorBoard
from .verdict import Judge, Verdict

log = logging.getLogger("holdfast")

TENSORBOARD_SECONDS = 1.0


@dataclass
class _Line:
    """A step that has ended, of which not all is known yet."""

    wall_seconds: float
    judged: bool
    fields: dict[str, Any]
    awaits: set[str] = field(default_factory=set)
    """What is still to come: loss, counts, spans."""


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
        """Of all ranks, told since the last step's end."""
        self._tokens_of_next = 0
        self._awaits_loss = False
        self._lines: dict[int, _Line] = {}
        self._untimed: int | None = None
        """The step whose spans are still to be told."""
        self._began = self._previous_end = 0.0
        self._any = False
        self._judge = judge or Judge(world_size)
        self._cause = ""
        self.tensorboard: TensorBoard | None = None
        """Gets the figures too, at most once in `TENSORBOARD_SECONDS`."""
        self._drawn = 0.0
        self._off = os.environ.get(ENV_TELEMETRY) == "off"

    def begin(self) -> None:
        """A step begins now."""
        self._began = time.perf_counter()
        self._previous_end = self._previous_end or self._began

    def count(self, step: int, tokens: int, samples: int) -> None:
        """What all ranks worked on in step number `step`, which may have ended."""
        self._tokens += tokens
        self._samples += samples
        if step in self._lines:
            self._lines[step].fields["tokens"] += tokens
            self._tell(step, "counts")
        else:
            self._tokens_of_next += tokens

    def expect_loss(self) -> None:
        """A loss of this step was offered to the exchange."""
        self._awaits_loss = True

    def end(self, step: int, *, owes_counts: bool = False) -> None:
        """Step number `step` (1 is the first) is done; `owes_counts`: `count` will be called for it again."""
        if self._off and self._any:
            self._telemetry.count(step)
            return
        self._spans.off = self._off
        now = time.perf_counter()
        seconds, wall_seconds = now - self._began, now - self._previous_end
        self._previous_end = now
        self._time_last()
        self._spans.end_step()
        self._telemetry.step(step, StepFigures(seconds, wall_seconds, self._tokens, self._samples))
        # The first step compiles and allocates: it says nothing of the others.
        line = self._lines[step] = _Line(wall_seconds, judged=self._any, fields={"seconds": seconds})
        line.fields |= {"data_seconds": None, "tokens": self._tokens_of_next}
        awaited = {"loss": self._awaits_loss, "counts": owes_counts, "spans": True}
        line.awaits = {part for part, awaits in awaited.items() if awaits}
        self._untimed = step
        if not self._spans.late:
            self._time_last()
        if not self._any and self._journal is not None:
            first = self._telemetry.progress.first_step_time
            self._journal.event("first_step", time=first, step=step, seconds=seconds)
        self._any = True
        self._tokens = self._samples = self._tokens_of_next = 0
        self._awaits_loss = False

    def flush(self) -> None:
        """No step may come after the last one: wait for the spans of that."""
        self._time_last()

    def _time_last(self) -> None:
        """Tell the spans of the step that ended last, with the time that they were a part of."""
        step, self._untimed = self._untimed, None
        if step is None:
            return
        spans, line = self._spans.collect(), self._lines[step]
        self._telemetry.timed(line.wall_seconds, spans)
        if line.judged:
            self._hear(self._judge.step(line.wall_seconds, spans, self._telemetry.progress.mfu))
        line.fields["data_seconds"] = spans.get("data")
        self._tell(step, "spans")

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
        self._telemetry.loss(value)
        if step in self._lines:
            self._lines[step].fields |= {"loss": value, "loss_hex": float(value).hex()}
            self._tell(step, "loss")

    def val_loss(self, step: int, value: float) -> None:
        """A validation of the state after `step` steps."""
        self._telemetry.val_loss(value)
        if self.tensorboard is not None:
            self.tensorboard.scalars(step, {"validation loss": value})
        if self._journal is not None:
            self._journal.step(step, val_loss=value, val_loss_hex=float(value).hex())

    def _tell(self, step: int, part: str) -> None:
        """A part of a step came; where it was the last, write the line."""
        line = self._lines[step]
        line.awaits.discard(part)
        if line.awaits:
            return
        del self._lines[step]
        now = time.monotonic()
        if self.tensorboard is not None and now - self._drawn >= TENSORBOARD_SECONDS:
            self._drawn = now
            self.tensorboard.scalars(step, figures_of(self._telemetry.progress))
        if self._journal is not None:
            self._journal.step(step, **line.fields)


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
        "memory, at most": progress.memory_bytes,
        "epoch": progress.epoch,
    }
    return {name: value for name, value in figures.items() if value is not None}
