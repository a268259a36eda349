"""What a resume of this run does not repeat to the bit: found while it trains, and told.

Each such thing is told once in the log, and kept with each checkpoint from then on, so that a resume from one
tells it too (environment.py). What only the first step after a resume shows goes into the ledger at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from .environment import NOT_DETERMINISTIC
from .ledger import Journal
from .parallel import Gang, not_repeated
from .resume import Resumed
from .training_state import TrainingState

log = logging.getLogger("holdfast")

NAMED = 4
"""How many parameters and buffers of a model are named."""


class Exactness:
    """Of one rank in one attempt."""

    def __init__(self, environment: dict[str, Any], gang: Gang) -> None:
        """`environment` is what is kept with each checkpoint; what is found is added to it."""
        self._environment, self._gang = environment, gang
        self._saved_with: Mapping[str, Any] = {}
        """The environment of the checkpoint that was loaded; empty once a step was done from there."""
        self._told_at_resume = False
        self._began_with: dict[str, int] = {}
        """How many parameters were trained as the loop began."""
        self._at_rest: dict[str, Any] | None = None
        """What parts had counted when the newest step was loaded or saved; None once another step is done."""
        self._looked_for_scaler = False

    def lose(self, what: str, why: str = "is not deterministic on this device") -> None:
        """From here on a resume does not repeat that."""
        told = self._environment.get(NOT_DETERMINISTIC)
        if told and what in told.split(", "):
            return
        self._environment[NOT_DETERMINISTIC] = f"{told}, {what}" if told else what
        log.warning("%s %s: a resume may not be bit-exact", what, why)

    def track(self, state: TrainingState, resumed: Resumed) -> None:
        """The state that is saved is known, and what it was resumed from."""
        for name in state.unsaved:
            self.lose(f"parameters of {name} that no tracked part has", "are not saved")
        self._saved_with, self._told_at_resume = resumed.environment, bool(resumed.differences)
        self.rest(state)

    def rest(self, state: TrainingState) -> None:
        """This state was loaded, or saved as the last of a loop."""
        self._at_rest = state.counted()

    def begin(self, state: TrainingState) -> None:
        """A loop begins. Tells what was changed since the newest step was saved, or loaded, such as a
        scheduler that is stepped after the loop of each epoch: a resume has it not, or twice."""
        self._look_at_sums(state)
        self._began_with = state.trained()
        state.find_untracked_schedulers()
        now = state.counted()
        for name in [name for name, counted in (self._at_rest or {}).items() if counted != now[name]]:
            self.lose(
                f"changes of {name} between two loops over run.steps",
                "are left out or made twice by an attempt that goes on there (make them in the last step)",
            )

    def _look_at_sums(self, state: TrainingState) -> None:
        """Tell where a resume gets other sums of gradients than a run that goes on."""
        for name, model in state.replicated.items():
            why = not_repeated(model, state.parts)
            if why and self._environment["deterministic"]:
                self.lose(f"sums of the gradients of {name}", f"cannot be repeated: {why}")

    def look_at_optimizer(self, state: TrainingState, optimizer: torch.optim.Optimizer) -> None:
        """To be called by its step."""
        if state.found_untracked(optimizer):
            self.lose(f"steps of an untracked {type(optimizer).__name__}", "keep what is not saved")
        name, more = state.resized_optimizer(optimizer)
        if more > 0:
            log.warning(
                "%s was given parameters after run.track: a resume is refused, as it loads %s where the "
                "script has given it fewer. Give it all before run.track, frozen: it passes those over",
                name,
                name,
            )
        elif more < 0:
            log.warning(
                "parameters were taken from %s after run.track: a resume is refused, as it loads %s where "
                "the script has given it more. Leave them there and freeze them: it passes those over",
                name,
                name,
            )
        if not self._looked_for_scaler and not torch.compiler.is_compiling():  # which has no frames
            self._looked_for_scaler = True
            if state.scaled_by_untracked():
                self.lose("scales of an untracked GradScaler", "are not saved")

    def end_step(self, state: TrainingState, step: int, journal: Journal) -> None:
        """Step number `step` has ended. Tells, of the first one after a checkpoint, where other parameters
        are trained than were then, and the loop has left it at that: what it unfreezes in one step alone is
        frozen again. And where a scheduler that is not tracked is behind where it was."""
        self._at_rest = None
        saved, self._saved_with = self._saved_with, {}
        if not saved:
            return
        found: dict[str, str] = {}
        for name, now in state.trained().items():
            if now == self._began_with[name] and saved.get(name, now) != now:
                found[name] = f"are {now}, and were {saved[name]}: freeze by the step, not in one alone"
        for name, now in state.untracked_counts().items():
            if now < saved.get(name, now):
                found[f"the {name}"] = f"is {now}, and was {saved[name]}: have it tracked"
        for name, why in found.items():
            self.lose(name, why)
        if found and self._gang.rank == 0 and not self._told_at_resume:
            told = "; ".join(f"{name} {why}" for name, why in found.items())
            journal.event("differs", step=step, difference=told)

    def keep(self, state: TrainingState) -> None:
        """With the checkpoint that is begun: what the first step after a resume from it is compared with."""
        self._environment.update(state.trained() | state.untracked_counts())

    def before_save(self, state: TrainingState) -> None:
        """A save of the state follows."""
        for name in state.whole_gradients():
            why = "(set_requires_gradient_sync(False)) are not saved; have each pass reduce them"
            self.lose(f"gradients that {name} adds up whole", why)
        for name in state.amid_scaling():
            why = (
                "before the step ended in which it is updated, it does again: have all in one step of the run"
            )
            self.lose(f"what {name} has done to gradients", why)
        for what in state.resized():
            log.warning(
                "the %s, has another shape than at run.track: a resume is refused, as torch loads it "
                "into one of the same shape alone. Give it all its room before run.track",
                what,
            )
        for name, others in state.rebuilt().items():
            more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
            log.warning(
                "%s is not built as it was at run.track (%s%s): a resume is refused, for which the script "
                "builds it as it was. Change it after the last step, such as where adapters are merged into "
                "it",
                name,
                ", ".join(others[:NAMED]),
                more,
            )
