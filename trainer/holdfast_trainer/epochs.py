"""What a pass through the data was like, told when it ends. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .sizes import loss_text, rate_text, share_text

TINY = 1e-9
"""Of a step: what a float that should be a whole number may be off."""


@dataclass(frozen=True)
class Epoch:
    """A pass through the data; a step that belongs to two is of the first."""

    number: int
    """1 is the first."""
    steps: int
    """Of those that this attempt did: all that follows is of them."""
    whole: bool
    """Whether these are all."""
    seconds: float
    """From the end of the step before: what saves and validations held up included."""
    tokens: int
    """Of all ranks together, as samples; 0 where the loop tells none."""
    samples: int
    loss: float | None
    """Mean over its steps; None where none told any."""
    busy: tuple[Literal["cpu", "gpu"], float] | None = None
    """The utilisation of what rank 0 computes on, 0 to 1; None where it is not known."""

    @property
    def fields(self) -> dict[str, float]:
        """For steps.jsonl, beside what the last step has."""
        told = {
            "epoch": self.number,
            "epoch_steps": self.steps,
            "epoch_seconds": self.seconds,
            "epoch_tokens": self.tokens,
            "epoch_samples": self.samples,
            "epoch_loss": self.loss,
        }
        if self.busy is not None:
            told[f"epoch_{self.busy[0]}_utilization"] = self.busy[1]
        return {name: value for name, value in told.items() if value is not None}

    def sentence(
        self, val_loss: float | None = None, mfu: float | None = None, memory_bytes: int | None = None
    ) -> str:
        """The report in a line, with what else is known."""
        of = f"its {self.steps}" if self.whole else f"{self.steps} of its"
        parts = [] if self.loss is None else [f"loss {loss_text(self.loss)}"]
        if val_loss is not None:
            parts.append(f"validation loss {loss_text(val_loss)}")
        parts.append(f"{self.seconds:.1f} s")
        if self.tokens:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s")
        if self.samples:
            parts.append(f"{rate_text(self.samples / self.seconds)} samples/s")
        if mfu is not None:
            parts.append(f"MFU {share_text(mfu)}")
        if self.busy is not None:
            parts.append(f"{self.busy[0].upper()} {share_text(self.busy[1])} busy")
        if memory_bytes is not None:
            parts.append(f"{memory_bytes / 1e9:.2f} GB")
        since = "" if self.whole else " (the others were done by attempts before)"
        return f"epoch {self.number}, {of} steps{since}: {', '.join(parts)}"


class Epochs:
    """Adds up the steps of one attempt; told in order."""

    def __init__(self, steps_an_epoch: float, done: int) -> None:
        """`steps_an_epoch`, over 0, need not be whole; `done` steps came before this attempt. Raises
        ValueError where it is no number of steps."""
        if not 0 < steps_an_epoch < math.inf:
            raise ValueError(f"run.steps_an_epoch is {steps_an_epoch}: give a number above 0, or None")
        self._length = steps_an_epoch
        self._begin(whole=self._ended_by(done) > self._ended_by(done - 1) or done == 0)

    def _begin(self, *, whole: bool) -> None:
        self._whole = whole
        self._steps = self._tokens = self._samples = self._told = 0
        self._seconds = self._loss = 0.0

    def _ended_by(self, step: int) -> int:
        """How many epochs have ended with that step."""
        return int(step / self._length + TINY)

    def add(self, step: int, seconds: float, tokens: int, samples: int, loss: float | None) -> Epoch | None:
        """Step number `step` (1 is the first) and what it took; the epoch that it ended, the last of several
        that are shorter than a step."""
        self._steps += 1
        self._seconds += seconds
        self._tokens += tokens
        self._samples += samples
        if loss is not None:
            self._told += 1
            self._loss += loss
        if (number := self._ended_by(step)) == self._ended_by(step - 1):
            return None
        mean = self._loss / self._told if self._told else None
        epoch = Epoch(number, self._steps, self._whole, self._seconds, self._tokens, self._samples, mean)
        self._begin(whole=True)
        return epoch
