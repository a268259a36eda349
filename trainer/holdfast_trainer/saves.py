"""A rank's saves within a run: when one is due, what is in it, and what all ranks call durable.

`checkpoint/` knows how to write a state; `Saves` knows which state, when, and whom to tell. Cadence by
step count is known to every rank; by the clock, rank 0 decides and its wish travels with the step's
agreement. The state is copied while the next step computes, and `settle` is the end of that. A save of the
state at the run's end or on notice is copied at once, and collective (`now`): where one rank could not
write, all write again, and all read the same answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch

from . import contract
from .account import Account
from .alike import SameModels
from .checkpoint import Cadence, CheckpointError, Fenced, Saved, Saver
from .checkpoint.cadence import Toll, again_after, does_not_fit, time_between_interruptions
from .checkpoint.errors import StorageUnavailable, may_pass
from .checkpoint.saver import PART_TIMEOUT_SECONDS
from .config import ConfigError, Snapshots
from .contract import RunDir
from .ending import Standing
from .exactness import Exactness
from .interruption import Notice
from .ledger import last_validations
from .parallel import Gang
from .sizes import size_text
from .training_state import TrainingState
from .watchdog import Watchdog
from .within import within

log = logging.getLogger("holdfast")

FIRST_AGAIN_SECONDS, LAST_AGAIN_SECONDS = 1.0, 30.0
"""Between two tries of the last save, at first and in the end."""
FAILURE_SECONDS = 5.0
"""How long a rank that fails waits for its peers' parts of a save in flight: they may be gone too. And how
long one whose part failed leaves rank 0 to hear of it."""
STILL_SECONDS = 20.0
"""How long it waits for its own disk, where that does not move, whatever is then told of the save."""
STUCK_SECONDS = 1200.0
"""How long any rank does, until it takes that for a disk that hangs: longer than rank 0 waits for parts."""
COMMIT_POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0
"""How long the run directory is waited for when a rank ends, of the reserve that a notice leaves."""
TURN_SECONDS = 0.1
"""How long a rank waits for its save before, until it asks again whether a notice came to another."""


class Saves:
    """Of one rank in one attempt."""

    def __init__(
        self,
        run_dir: RunDir,
        gang: Gang,
        cadence: Cadence,
        notice: Notice,
        watchdog: Watchdog,
        account: Account,
        *,
        attempt: int,
        config_hash: str,
        environment: Mapping[str, Any],
        keep: int,
        keep_every: int,
        keep_best: int,
        snapshot: Snapshots,
        exactness: Exactness,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment` is what is kept with each checkpoint, to which `exactness` adds. `clock` is that of a
        cadence in seconds."""
        self._gang, self._cadence, self._notice, self._watchdog = gang, cadence, notice, watchdog
        self._journal, self._telemetry, self._spans = account.journal, account.telemetry, account.spans
        # Rank 0 alone decides when to save by the clock: the others need not read the past.
        past = run_dir.attempt_numbers() if gang.rank == 0 else []
        ledgers = [contract.read_lines(run_dir.ledger(number)) for number in past if number < attempt]
        self._between_interruptions = time_between_interruptions(ledgers)
        losses: dict[int, float] = {}
        for lines in ledgers:
            losses |= last_validations(lines)
        self._saver = Saver(
            run_dir,
            attempt=attempt,
            rank=gang.rank,
            world_size=gang.world_size,
            config_hash=config_hash,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            losses=losses,
            environment=environment,
            on_saved=self._on_saved,
            on_failed=self._on_failed,
        )
        computed_with = [environment.get(key) for key in ("torch", "device", "precision", "threads")]
        self._same_models = SameModels(gang, computed_with, exactness.lose)
        self._exactness = exactness
        self.state: TrainingState | None = None
        """What is saved, once it is known."""
        self.newest_step = 0
        """Newest step for which a save was begun (or that was loaded)."""
        self._durable: Standing | None = None
        """What all ranks agreed is durable, once they have."""
        if snapshot not in get_args(Snapshots):
            raise ConfigError(f"snapshot {snapshot!r} is none of: {', '.join(get_args(Snapshots))}")
        self._overlapped = snapshot == "overlapped"
        self._toll, self._saving = Toll(), False
        """saving: a save was under way when the newest step ended, or has begun since."""
        self._clock = clock
        self._began = self._step_ended = clock()
        self._failures, self._failed = 0, 0.0
        """How many saves have failed one after another, and when the newest did."""
        self._place = run_dir.objects or run_dir.path
        self._stuck_step: int | None = None
        """Of the newest save that stood still."""
        self._prepared = self._told_too_slow = False
        self._ends = False
        """What is saved is the last of a training that ends, well or not."""

    @property
    def durable_step(self) -> int:
        """The newest committed step; 0 where there is none."""
        return self._saver.durable_step

    def pass_over(self, bad_steps: set[int]) -> None:
        """These checkpoints did not verify at load: they count for nothing."""
        self._saver.bad_steps = bad_steps

    def validated(self, step: int, loss: float) -> None:
        """The validation loss after `step` steps, by which the best checkpoints are kept."""
        self._saver.validated(step, loss)

    def validated_last(self, step: int, loss: float) -> None:
        """Weigh again which checkpoints stay: the last one was validated after it had been saved. The ledger
        has that loss, should the run go on to more steps."""
        if self._gang.rank != 0:
            return

        def weigh() -> None:
            self._journal.event("validation", step=step, val_loss=loss)
            self._saver.prune()

        # All is durable, and nobody watches any more: a disk that hangs or fails holds up no end.
        if fault := within(STUCK_SECONDS, weigh):
            log.warning("what stays was not weighed by the validation of step %d: %s", step, fault)

    def restart_clock(self) -> None:
        """The loop begins: a cadence in seconds counts from here."""
        self._ends = False
        self._began = self._step_ended = self._clock()

    def end_step(self) -> None:
        """A step has ended; what it took tells what saves cost."""
        before, self._step_ended = self._step_ended, self._clock()
        saving, self._saving = self._saving, self._saver.busy
        self._toll.step(self._step_ended - before, saving=saving or self._saving)

    def due_by_clock(self) -> bool:
        """Rank 0's clock decides for all when cadence is in seconds.

        Any rank's does where its part was dropped, or has failed some time ago.
        """
        if self._saver.dropped:
            return True
        if self._saver.busy:
            self._tell_stuck()
            return False
        if self._saver.error is not None and time.monotonic() - self._failed >= again_after(self._failures):
            return True
        if self._gang.rank != 0:
            return False
        since, last = self._clock() - self._began, self._saver.last_saved
        if last is None:
            return self._cadence.due_after(since, None, self._between_interruptions)
        cost = self._toll.of(last.stall_seconds, last.seconds)
        return self._cadence.due_after(since, cost, self._between_interruptions, last.seconds)

    def due_at_step(self, step: int) -> bool:
        """Every rank knows by itself when cadence is in steps."""
        return self._cadence.due_at_step(step)

    def prepare(self, step: int) -> None:
        """Get the memory that saves need now, after the first step, when the optimizer has its state."""
        if self._prepared:
            return
        self._prepared = True
        assert self.state is not None
        with self._watchdog.paused():
            size = self._saver.prepare(*self.state.capture(step))
        if self._gang.rank == 0 and size:
            log.info("checkpoints are staged in %s of memory a rank", size_text(size))

    def settle(self) -> None:
        """To be called before the state changes: what is still being copied of it is waited for."""
        waited, on_gpu = self._saver.settle()
        if waited:
            self._spans.add_apart("checkpoint", waited)
        if on_gpu is not None:
            self._spans.add_apart_on_gpu("checkpoint", *on_gpu)

    def settle_if_copied(self) -> None:
        """Let what is copied become durable, without waiting."""
        self._saver.settle_if_copied()

    def begin_in_turn(self, step: int) -> bool:
        """Begin to save the state after `step` steps, when the save before has ended. Collective.

        False, on all ranks, where a notice came to any of them first: what is to be done with the one save
        and the other is then a matter of the time that is left (`now`). Where that of a rank stands still, as
        its disk hangs, this one is passed over and the training goes on, as where one fails.
        """
        began = time.perf_counter()
        with self._watchdog.paused():
            self.settle()
        while True:
            stuck = self._tell_stuck()
            mine = [self._saver.busy, self._notice.received, self._unheard, stuck]
            told = torch.tensor(mine, dtype=torch.float64, device="cpu")
            busy, noticed, unheard, stuck = self._gang.sum_async(told)().tolist()
            self._watchdog.beat(step=False)  # every rank has answered, however long the save takes
            if noticed:
                return False
            if stuck:
                return True
            if not busy:
                break
            if unheard:
                self._saver.give_up("a rank could neither write its part nor say so; its log tells why")
            self._saver.join(TURN_SECONDS)
        self._begin(step, overlapped=self._overlapped, waited=time.perf_counter() - began)
        return True

    def _tell_stuck(self) -> bool:
        """Whether this rank's save stands still; told once of each."""
        if not self._saver.stands_still(STUCK_SECONDS):
            return False
        if self._stuck_step != self.newest_step:
            self._stuck_step, fault = self.newest_step, self._stuck_fault()
            log.warning("%s. Training goes on", fault)
            self._telemetry.save_failed(self.newest_step, str(fault))
        return True

    def _stuck_fault(self) -> StorageUnavailable:
        what = f"step {self.newest_step} could not be saved"
        if self._is_saved(self.newest_step):
            what = f"step {self.newest_step} is saved, but old checkpoints could not be removed"
        return StorageUnavailable(
            f"{what}: {self._place} has taken nothing of rank {self._gang.rank} for "
            f"{STUCK_SECONDS / 60:.0f} minutes: see whether its server answers"
        )

    def _is_saved(self, step: int) -> bool:
        """Whether rank 0 has made it durable; as far as this rank knows by itself."""
        last = self._saver.last_saved
        return last is not None and last.step == step

    @property
    def _unheard(self) -> bool:
        """Whether this rank's part failed, so long ago that rank 0 has not heard of it if it still waits."""
        return self._saver.error is not None and time.monotonic() - self._failed > FAILURE_SECONDS

    def _begin(
        self,
        step: int,
        timeout: float = PART_TIMEOUT_SECONDS,
        random: dict[str, Any] | None = None,
        *,
        overlapped: bool = False,
        waited: float = 0.0,
    ) -> None:
        """Stage the state after `step` steps; threads write it. `random` as `TrainingState.capture`'s.

        Collective. Raises RanksDiffer or Strayed where models are not the same on all ranks.
        """
        assert self.state is not None
        self._prepared = True
        self._exactness.keep(self.state)
        if self._gang.world_size > 1:
            self._same_models.require(step, self.state.samples(step), self._look)
        self._began = self._clock()
        self._saving = True
        self._toll.begin()
        if self._saver.error is None:
            self._failures = 0
        self._telemetry.saving(step)
        with self._watchdog.paused():
            shared, own, rank_0_only = self.state.capture(step, random)
            stall = self._saver.save(
                step,
                shared,
                own,
                timeout=timeout,
                rank_0_only=rank_0_only,
                lasting=self.state.lasting() if overlapped else None,
                waited=waited,
                patience=STUCK_SECONDS,
            )
        self._spans.add("checkpoint", stall)
        self.newest_step = step

    def now(
        self, step: int, left: float | None = None, random: dict[str, Any] | None = None
    ) -> CheckpointError | None:
        """Save this step unless that was done, and wait until it is durable. Collective.

        `left`: the seconds that a notice leaves, of which ranks may know different numbers; None, on all
        ranks, where none presses. A save in flight is finished first, unless what is left is enough for the
        newer one alone.
        Returns why it is not durable, on every rank; None where it is. StorageUnavailable: that may pass.
        """
        self._ends = True
        if step != self.newest_step and left is not None:
            self._make_way(step, left)
        timeout = PART_TIMEOUT_SECONDS if left is None else left
        self._saver.hurry(timeout)
        stuck, fault = self._await_saves(step)
        mine = step != self.newest_step or self._saver.error is not None
        if not stuck and any(self._gang.gather(mine)):  # where one rank failed, all write again
            self._begin(step, timeout, random)
            stuck, fault = self._await_saves(step)
        if fault is None and (error := self._saver.error) is not None:
            fault = (StorageUnavailable if may_pass(error) else CheckpointError)(str(error))
        self._durable = None  # what an earlier try had to say of this step
        told = self._gang.gather((fault, self.standing(step)))
        self._durable = told[0][1]  # rank 0 committed; others may see the directory later
        faults = [fault for fault, _ in told if fault is not None]
        cause = (fault for fault in faults if isinstance(fault, StorageUnavailable))
        return next(cause, faults[0] if faults else None)  # others may just have waited in vain for that one

    def _await_saves(self, step: int) -> tuple[bool, CheckpointError | None]:
        """Wait until no rank has a save in flight, or that of one stands still: whether that is so, and why
        where it is this rank's. What is durable by then may stand still in the removal of old ones.

        Collective, again and again: a rank that waits long for another's disk is not to take it for gone. Of
        one that is gone the part may be there, so what is in flight is waited for all the same.
        """
        while True:
            still = self._saver.stands_still(STUCK_SECONDS)
            done = still and step == self.newest_step and self._is_saved(step)
            try:
                told = self._gang.gather((self._saver.busy and not done, still and not done))
            except RuntimeError:
                self._saver.join_while_it_moves(STUCK_SECONDS)
                raise
            if any(stuck for _, stuck in told):
                return True, self._stuck_fault() if still and not done else None
            if not any(busy for busy, _ in told):
                return False, None
            self._saver.join(TURN_SECONDS)

    def now_or_later(self, step: int, worth: float) -> CheckpointError | None:
        """As `now`; where what is in the way may pass, again and again for `worth` seconds. Collective.

        A notice ends that too: what is then to be done with the time that is left is the caller's to say.
        """
        deadline, pause = time.monotonic() + worth, FIRST_AGAIN_SECONDS
        while isinstance(fault := self.now(step), StorageUnavailable):
            left = self._gang.broadcast(deadline - time.monotonic() if self._gang.rank == 0 else None)
            if left <= 0:
                break
            if self._gang.rank == 0:
                log.warning("not durable yet; tried again for %.0f s, as long as it took: %s", left, fault)
            if self._noticed_within(min(pause, left)):
                break
            pause = min(2 * pause, LAST_AGAIN_SECONDS)
        return fault

    def now_in_time(
        self, step: int, left: float, random: dict[str, Any] | None = None
    ) -> CheckpointError | None:
        """As `now`; where what is in the way may pass, again while enough is left of the notice's seconds.
        Collective."""
        deadline, pause = time.monotonic() + left, FIRST_AGAIN_SECONDS
        while isinstance(fault := self.now(step, left, random), StorageUnavailable):
            left = max(0.0, deadline - time.monotonic())
            least = min(self._gang.gather(left))
            if least < 2 * pause:
                break
            if self._gang.rank == 0:
                log.warning("not durable yet; tried again while the notice leaves %.0f s: %s", least, fault)
            time.sleep(pause)
            pause, left = 2 * pause, left - pause
        return fault

    def _noticed_within(self, seconds: float) -> bool:
        """Wait; whether a notice came to any rank meanwhile. Collective."""
        until = time.monotonic() + seconds
        while True:
            waiting = self._gang.rank == 0 and time.monotonic() < until
            told = self._gang.gather((self._notice.received, waiting))
            if any(noticed for noticed, _ in told):
                return True
            if not told[0][1]:
                return False
            time.sleep(min(1.0, seconds))

    def _make_way(self, step: int, seconds: float) -> None:
        """Give up the save in flight where that of `step` alone can be done in time. Collective: rank 0
        decides, by what it knows to be left."""
        if self._gang.broadcast(self._gang.rank == 0 and self._saver.makes_way(seconds)):
            log.info("giving up the save of step %d for that of step %d", self.newest_step, step)
            self._saver.give_up("given up for a newer step, as the notice left time for one of them")

    def standing(self, step: int) -> Standing:
        """What can be said of this rank's work after `step` steps.

        Where the run directory does not answer, it is what was known of it before.
        """
        if self._durable is not None and self._durable.step == step:
            return self._durable
        within(LOOK_SECONDS, lambda: self._saver.newest)
        newest = self._saver.known
        return Standing(step) if newest is None else Standing(step, newest.step, newest.digest)

    def await_commit(self) -> None:
        """Give a save in flight its last chance, so that what is told to be durable is the truth."""
        if self._durable is not None and self._durable.step == self.newest_step:
            return  # all ranks know what became of it
        self._ends = True
        bound = min(FAILURE_SECONDS, self._notice.remaining())
        deadline = time.monotonic() + bound
        self._saver.hurry(bound)
        self._saver.join_while_it_moves(STILL_SECONDS)
        if self._gang.rank == 0 or self._saver.error is not None:
            return

        def committed() -> None:  # by rank 0
            while self._saver.durable_step < self.newest_step and time.monotonic() < deadline:
                time.sleep(COMMIT_POLL_SECONDS)

        within(bound + LOOK_SECONDS, committed)

    def settled_step(self) -> int:
        """`durable_step`, once the save in flight has ended, however it ends, or stands still."""
        self._saver.join_while_it_moves(STILL_SECONDS)
        return self._look()

    def _look(self) -> int:
        """`durable_step`; where the run directory does not answer, what was known of it before."""
        within(LOOK_SECONDS, lambda: self._saver.newest)
        return 0 if self._saver.known is None else self._saver.known.step

    def check_fence(self) -> None:
        """Raises Fenced where a newer attempt was admitted, CheckpointError where nobody can say."""
        self._saver.check_fence()

    def raise_if_fenced(self) -> None:
        """Raises Fenced where the newest save met a newer attempt."""
        if isinstance(self._saver.error, Fenced):
            raise self._saver.error

    def _on_saved(self, saved: Saved) -> None:
        room = None if self._notice.received else self._notice.remaining()
        problem = None if room is None else does_not_fit(saved.seconds, room)
        if problem and not self._told_too_slow:
            log.warning("%s", problem)
            self._told_too_slow = True
        self._telemetry.saved(saved, room)
        self._journal.event(
            "checkpoint",
            step=saved.step,
            bytes=saved.bytes,
            seconds=saved.seconds,
            stall_seconds=saved.stall_seconds,
            digest=saved.digest,
            useful_seconds=self._telemetry.progress.durable_seconds,
        )

    def _on_failed(self, step: int, error: CheckpointError) -> None:
        self._telemetry.save_failed(step, str(error))
        self._failures, self._failed = self._failures + 1, time.monotonic()
        # A newer attempt has taken over: this one ends at its next step.
        ends = self._ends or isinstance(error, Fenced)
        log.warning("checkpoint of step %d failed%s: %s", step, "" if ends else ", training goes on", error)
        if self._gang.rank == 0:
            self._journal.event("checkpoint_failed", step=step, error=str(error))
