"""Lets many trainings take turns on one machine: each does a window of steps when it is told to.

A gate hangs on the end of `optimizer.step()`, the one place that every loop passes once a step, whoever
wrote it. There it says how long the window took and waits for the next word. So programs that take seconds
to start are started once, and their windows alternate closely: what slows the machine down for a while
slows all of them.

On a GPU each gives back what memory it can before it waits, for the others need it; then its next step, which
has to ask for it again, is not measured.
"""

from __future__ import annotations

import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .words import Words


class Gate(Words):
    """Of one rank; the parent says how many steps to do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._left = 1  # the first step comes without being asked for: it tells how long a start takes
        self._steps = 0
        self._began: float | None = None
        self._refills = False

    def install(self) -> None:
        """From now on every step of any optimizer of this process passes here."""
        register_optimizer_step_post_hook(lambda *_: self.step())

    def step(self) -> None:
        if self._refills:
            self._refills = False
            self._began = self._now()
            return
        self._left -= 1
        if self._left:
            return
        now = self._now()
        if self._began is None:
            self.say(first_step_at=time.time())
        else:
            self.say(seconds=now - self._began, steps=self._steps)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            self._refills = True
        self._left = self._steps = self.wait()
        self._began = time.perf_counter()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
