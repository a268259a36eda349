"""What all ranks tell of a step: losses, averaged by the exchange and checked, and counts, added up by it.

A loss or a gradient norm that is no finite number ends the run on every rank at the same step, as all read
the same sum. On a GPU, and where steps are short, a loss is known a step late, so before a state is
saved the late ones are heard first: what is saved was never told to be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from .account import Account
from .faults import Offered, always_overflowing, non_finite_step
from .interruption import Agreed, Exchange
from .parallel import Gang


class Losses:
    """Of one rank."""

    def __init__(
        self,
        exchange: Exchange,
        gang: Gang,
        account: Account,
        *,
        settled_step: Callable[[], int],
        deterministic: bool,
    ) -> None:
        self._exchange, self._gang = exchange, gang
        self._steps, self._telemetry = account.steps, account.telemetry
        self._settled_step, self._deterministic = settled_step, deterministic
        self.describe_batch: Callable[[int], str] = lambda step: f"its batch of step {step}"

    def offer(self, step: int, loss: torch.Tensor | float, grad_norm: torch.Tensor | float | None) -> None:
        """This rank's loss of step number `step` (1 is the first), a scalar. Raises TypeError."""
        norm = None if grad_norm is None else number("grad_norm", grad_norm)
        self._exchange.offer_loss(step, number("loss", loss), norm)
        self._steps.expect_loss()

    def norm(self, step: int, grad_norm: torch.Tensor | float) -> None:
        """This rank's gradient norm of step number `step`, told in a call of its own. Raises TypeError."""
        self._exchange.offer_norm(step, number("grad_norm", grad_norm))

    def count(self, step: int, tokens: int, samples: int) -> None:
        """What this rank worked on in step number `step`; parts of a step add up. Raises TypeError,
        ValueError where it is less than nothing."""
        self._exchange.count(step, _count("tokens", tokens), _count("samples", samples))

    def take_back(self, step: int) -> None:
        """What was told of step number `step` counts for nothing: that is done anew."""
        self._exchange.take_back(step)

    def hear_counts(self, agreed: Agreed) -> None:
        """Pass on what all ranks worked on."""
        if agreed.counts is not None:
            self._steps.count(*agreed.counts)

    def owes_counts(self, step: int) -> bool:
        """Whether this rank has counts of a step that no exchange has taken along."""
        return self._exchange.owes_counts(step)

    def hear(self, agreed: Agreed) -> None:
        """Pass on the loss that is known now, and have all that is known written. Raises NonFiniteStep on all
        ranks where one told no number, or none can be had."""
        if agreed.loss is not None:
            self._steps.loss(*agreed.loss)
        if agreed.grad_norm is not None:
            self._telemetry.grad_norm(agreed.grad_norm)
        self._steps.tell()
        if agreed.overflows:
            durable_step = max(self._gang.gather(self._settled_step()))
            raise always_overflowing(durable_step, deterministic=self._deterministic)
        if agreed.broken is None:
            return
        mine = self._exchange.offered or Offered(None, None)
        mine = replace(mine, batch=self._described(agreed.broken - 1))
        told = self._gang.gather((mine, self._settled_step()))
        ranks, durable_step = [offered for offered, _ in told], max(step for _, step in told)
        raise non_finite_step(agreed.broken, ranks, durable_step, deterministic=self._deterministic)

    def _described(self, step: int) -> str:
        """As `describe_batch` has it, which may be a script's own: what that raises is not the fault."""
        try:
            return self.describe_batch(step)
        except Exception as error:
            return f"its batch of step {step}, which nobody can describe ({type(error).__name__}: {error})"

    def flush(self, step: int) -> None:
        """Hear of those still to come after `step` steps, so that all lines are written. Collective."""
        for agreed in self._exchange.drain(step):
            self.hear_counts(agreed)
            self.hear(agreed)
        self._steps.flush()


def number(name: str, value: torch.Tensor | float) -> torch.Tensor | float:
    """What `run.log` was given by that name; a tensor's value is not waited for. Raises TypeError that shows
    what it is where it is no number, or several."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value
        shown = f"a tensor of {value.dtype} with shape {list(value.shape)}"
    else:
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
        shown = f"{value!r:.100}"
    raise TypeError(f"run.log({name}=...) was given {shown}: tell one number")


def _count(name: str, value: torch.Tensor | float) -> Any:
    """As it is now: a tensor may be written to before it is told. Parts of ranks may add up to whole ones."""
    told = float(number(name, value))
    if not 0 <= told < math.inf:
        raise ValueError(f"run.log({name}={told:g}): tell on how many this step has worked, 0 or more")
    return int(told) if told.is_integer() else told
