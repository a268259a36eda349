"""`Run`: any training loop gets resume, checkpoints, an agreed stop and metrics.

::

    run = Run()
    model = run.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(1000):
        images, labels = (part.to(run.device) for part in batch(step, run.rank))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, samples=len(images))

Resume is exact where the batch is a function of `step` and the rank: the position in the data is then one
integer. A stop is made between steps, on all ranks at the same one: the state is saved, the termination
message written, and the process exits 0 from inside the `for`. Without Holdfast's environment the same
script runs alone and keeps its run directory in `./holdfast-run`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import contract
from .account import Account
from .alike import announced, depended_on, require_alike
from .checkpoint import Cadence, has_checkpoint, rng
from .code_digests import own_code, programs_code
from .config import ConfigError, Snapshots
from .deferred import defer_compiler
from .determinism import choose_kernels, hear_of_operations
from .ending import Ending
from .environment import describe_environment, require_plain
from .exactness import Exactness
from .faults import data_ended, dead_worker, is_out_of_memory, not_deterministic, out_of_memory
from .interruption import Exchange, Notice
from .lingering import tell_of_lingering
from .losses import Losses, number
from .output import outlast_readers
from .overflow import Overflow
from .parallel import Gang, divide_alike, hear_waiting, join_gang, shard, wrap
from .place import Place
from .prefetch import Prefetch
from .redone import Redone
from .resume import Marks, record_start, resume
from .saves import Saves
from .steps_left import StepsLeft
from .training_state import TrainingState
from .watchdog import HangAfter, Watchdog
from .workers import fork_unless_chosen, require_no_worker

log = logging.getLogger("holdfast")
T = TypeVar("T")


class Run:
    """One rank's view of one attempt."""

    def __init__(
        self,
        *,
        run_dir: str | Path | None = None,
        config_hash: str = "",
        seed: int = 1337,
        deterministic: bool | Literal["strict"] = True,
        checkpoint_every: str | int = "auto",
        keep: int = 3,
        keep_every: int = 0,
        keep_best: int = 0,
        validate_every: int = 0,
        snapshot: Snapshots = "overlapped",
        flops_per_token: float | None = None,
        compute_dtype: torch.dtype | Callable[[Gang], torch.dtype] = torch.float32,
        alike: Mapping[str, object] | None = None,
        profile: range = range(0),
        tensorboard: bool = False,
    ) -> None:
        """Join the gang, in the main thread. Collective.

        `run_dir` and the cadence give way to HOLDFAST_RUN_DIR and HOLDFAST_CHECKPOINT_EVERY where these are
        set. `deterministic` has torch take kernels that repeat their bits, and an operation without one is
        told, at the next resume too: attention on a GPU is one. "strict" has attention repeat its bits, and
        ends the run at what cannot; False has cuDNN measure its kernels for each shape, and take the fastest.
        `config_hash` guards a run directory against another configuration. The newest `keep` checkpoints
        stay, those of every `keep_every`-th step, which are saved whatever the
        cadence, and the `keep_best` ones of lowest validation loss that `log` was told of exactly their step
        (0: none for that reason); with `validate_every` each such step is saved. `snapshot="synchronous"`
        copies the whole state before the next step begins; by itself parameters and optimizer state are
        copied while it computes, and nothing but a tracked optimizer's step may write to them.
        `flops_per_token` and `compute_dtype`, in which matrix products are (or what agrees on it with the
        gang), make MFU known. `alike` names settings that ranks are to have in common, besides seed and
        hash. `profile` are steps to trace (0 is the first); `tensorboard` writes figures for it. Raises
        RanksDiffer where they have not, ConfigError on a setting that cannot be used, CheckpointError on such
        a run directory, Fenced where a newer attempt was admitted.
        """
        require_no_worker()
        fork_unless_chosen()
        self._marks = Marks()
        defer_compiler()
        outlast_readers()
        faulthandler.enable()
        faulthandler.register(contract.STACK_SIGNAL, all_threads=False)
        self._ending = Ending()
        self._ending.install()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "make Run in the main thread, which alone hears of a notice; the loop may be in another one"
            )
        if not isinstance(config_hash, str):
            raise ConfigError(f"config_hash={config_hash!r} is no text: give one, such as a hexdigest()")
        if deterministic not in (True, False, "strict"):
            raise ConfigError(f"deterministic={deterministic!r} is none of: True, 'strict', False")
        if not hasattr(seed, "__index__"):
            raise ConfigError(f"seed={seed!r} is no whole number")
        if not (isinstance(compute_dtype, torch.dtype) or callable(compute_dtype)):
            raise ConfigError(f"compute_dtype={compute_dtype!r} is none: give one, such as torch.bfloat16")
        self._flops_per_token = _flops(flops_per_token)
        if not isinstance(profile, range):
            raise ConfigError(f"profile={profile!r} is no range of steps: give one, such as range(20, 25)")
        place = Place.read(run_dir)
        self._ahead = Prefetch(place.run_dir)
        hang_after = HangAfter.parse(os.environ.get(contract.ENV_HANG_SECONDS) or "auto")
        cadence = replace(
            Cadence.parse(os.environ.get(contract.ENV_CHECKPOINT_EVERY) or checkpoint_every),
            besides=(keep_every, validate_every if keep_best else 0),
        )
        with self._ending.outermost():
            self.gang = join_gang()
        self.rank, self.world_size, self.device = self.gang.rank, self.gang.world_size, self.gang.device
        self._marks.rendezvous = time.monotonic()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # Its encoding may have no characters for a path that the log names.
            sys.stdout.reconfigure(errors="backslashreplace")
        logging.basicConfig(
            level=logging.INFO, format=f"{contract.rank_mark(self.rank)}%(message)s", stream=sys.stdout
        )
        self._seed, self._config_hash = seed, config_hash
        self.compute_dtype = (
            compute_dtype if isinstance(compute_dtype, torch.dtype) else compute_dtype(self.gang)
        )
        """In which matrix products are computed."""
        self.environment = describe_environment(self.device, self.compute_dtype)
        """What bits depend on besides configuration and state: kept with each checkpoint, and a resume with
        something else says so. Name more before `track`: words, numbers, true or false."""
        self._exactness = Exactness(self.environment, self.gang)
        self.environment["deterministic"] = deterministic
        if self.rank == 0:  # which alone keeps it, and compares
            self.environment["Holdfast's code"] = own_code()
            if own := programs_code():
                self.environment["the program's code"] = own
        choose_kernels(deterministic, self.device)
        if deterministic:
            hear_of_operations(self._exactness.lose)
        require_alike(self.gang, {**(alike or {}), "the seed": seed, "the configuration's hash": config_hash})
        rng.seed_all(seed, self.rank)
        self.run_dir = place.run_dir
        self.attempt, self._trained_before = place.admit(self.gang)
        self._account = account = Account(
            self.run_dir, self.attempt, self.gang, place, profile=profile, tensorboard=tensorboard
        )
        self._ending.journal = account.journal
        self._notice = Notice(place.grace_seconds, self._ending.out_of_time)
        self._notice.install()
        self._exchange = Exchange(self.gang, self._notice)
        self._watchdog = Watchdog(self.run_dir, self.attempt, self.gang, hang_after, self._ending.hung)
        account.quiet = self._watchdog.quiet
        self._saves = Saves(
            self.run_dir,
            self.gang,
            cadence,
            self._notice,
            self._watchdog,
            account,
            attempt=self.attempt,
            config_hash=config_hash,
            environment=self.environment,
            keep=place.keep or keep,
            keep_every=keep_every,
            keep_best=keep_best,
            snapshot=snapshot,
            exactness=self._exactness,
        )
        self._step = 0
        """Steps done, without the one in which the loop was left."""
        self.total_steps: int | None = None
        self._resumed_rng: dict[str, Any] | None = None
        self._seeded = self._changed = False
        """changed: an optimizer has taken the step that is under way, and the state is not that of `step`."""
        self._overflow = Overflow()
        self._left = self._looping = False
        """left: the loop has been left, by itself or by `break`; looping: one is under way."""
        self._save_agreed = self._completed = self._strayed = self._told_of_total = False
        """strayed: an optimizer has taken a step before any loop began; told_of_total: that a loop asks for
        the steps of one before it."""
        self._ending.progress = lambda: account.telemetry.progress
        self._ending.standing = lambda: self._saves.standing(self._step)
        self._heard_of_notice = False
        """The script was told of one, and has begun no loop since."""
        self._fault: Exception | None = None
        """What the loop itself has raised, if no step has ended since."""
        self._started_at = 0
        self._step_began = self._step_seconds = 0.0
        """When this step began, and what the one before took."""
        self._losses = Losses(
            self._exchange,
            self.gang,
            account,
            settled_step=self._saves.settled_step,
            deterministic=bool(deterministic),
        )
        self.memory_remedy = "Give a forward pass a smaller batch"
        """What to change where a step does not fit the memory."""
        self.attention = ""
        """The kernel that it takes (see attention_kernels); set before `track`, it is told."""
        self.steps_an_epoch: float | None = None
        """How many go through the data once; None where that is not known."""
        self._ending.check_fence = self._saves.check_fence
        self._ending.explain = self._explain
        self._ending.hanging = lambda: self._watchdog.telling
        self._ending.noticed = self._notice.look
        self._ending.in_step = lambda: self._looping
        self._ending.before_failure = self._saves.await_commit
        self._ending.at_exit = self._at_exit

    @property
    def step(self) -> int:
        """Steps done; that in which the loop was left by `break` is one, once an optimizer has changed the
        state."""
        return self._step + (self._left and self._changed)

    # ------------------------------------------------------------------ start

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """`model` on this rank's device, under DDP where there are several ranks (see parallel.wrap)."""
        wrapped = wrap(model, self.gang, **options)
        self.hear_waiting(wrapped)
        return wrapped

    def hear_waiting(self, model: nn.Module) -> None:
        """Tell apart what the span `backward` waits for the exchange of gradients, as `communication`, where
        `model` is DDP's. What `wrap` gives is heard already."""
        hear_waiting(model, partial(self._account.spans.turn, "communication"))

    def shard(self, model: nn.Module, regions: Sequence[nn.Module]) -> nn.Module:
        """`model` cut over the ranks, FSDP2, region by region, and gathered in `compute_dtype` (see
        parallel.shard); instead of `wrap`."""
        return shard(model, self.gang, regions, self.compute_dtype)

    def has_checkpoint(self) -> bool:
        """Whether there is one to go on from, so that how the state begins does not matter. Collective."""
        return has_checkpoint(self.run_dir, self.attempt, self.gang)

    def track(self, **parts: Any) -> int:
        """Name the state to save (anything with `state_dict`), and resume it. Collective.

        What is neither a model nor an optimizer may differ by rank; those two may not (buffers may).
        Returns the number of steps done so far. Raises CheckpointError where no checkpoint can be used,
        UnsupportedState where a part's state cannot be saved.
        """
        if self._saves.state is not None:
            raise RuntimeError("track() was called before: name all parts in one call")
        self._saves.state = state = TrainingState(parts, self.rank)
        if state.has_no_model:
            what = ", ".join(state.unsaved)
            raise TypeError(
                f"track() was given no model, but {what}: name what that steps too, as model=model"
            )
        for optimizer in (*state.optimizers, *state.inner_optimizers):
            optimizer.register_step_pre_hook(self._before_optimizer)
        self._marks.build = time.monotonic()
        self._ahead.stop()
        self.environment |= {**depended_on(), **state.given, **state.types()}
        if self.world_size > 1:  # gradients are added up in another order
            self.environment["parameters"] = "in shards" if state.in_shards else "whole"
        if "train.compile" not in self.environment:  # the GPT's, where it is on, is a matter of functions
            self.environment["torch.compile"] = state.compiled
        self.environment["threads"] = torch.get_num_threads()  # which the script may have set meanwhile
        require_plain(self.environment)
        resumed = resume(self.run_dir, self.attempt, self.gang, self._config_hash, state, self.environment)
        self._step = self._started_at = self._saves.newest_step = resumed.step
        self._exchange.norm_must_be_finite = not state.scales_gradients
        orders = {_order_of(optimizer): order for optimizer, order in state.orders().items()}
        tracked = {"the tracked state": state.describe(), "the step resumed from": self._step}
        require_alike(self.gang, {**tracked, **orders})
        self._exactness.track(state, resumed)
        self._resumed_rng = resumed.rng
        self._saves.pass_over({s.step for s in resumed.skipped})
        self._marks.loaded = time.monotonic()
        if self.rank == 0:
            record_start(self._account, self.run_dir, self.attempt, resumed, self._marks, self.attention)
            # Where the resume differs, that is told already.
            if resumed.saved_by and self.environment["deterministic"] and not resumed.differences:
                self._account.steps.redone = Redone(self.run_dir, self.attempt, self._step, resumed.saved_by)
        return self._step

    def _before_optimizer(self, *_: object) -> None:
        if self.total_steps is None:
            self._tell_of_stray_step()
            return
        # The sum over ranks begins while the optimizer works, and is read when the step ends.
        self._saves.settle()
        self._contribute(stepped=True)

    def _tell_of_stray_step(self) -> None:
        """Whoever loops over `range` trains, ends well, and has saved nothing. Told once."""
        if not self._strayed:
            self._strayed = True
            log.warning(
                "an optimizer takes steps outside of `for step in run.steps(...)`: they are neither counted "
                "nor saved, and a notice does not wait for the end of one"
            )

    def _contribute(self, *, stepped: bool) -> None:
        """Begin this step's agreement, unless that was done."""
        assert self._saves.state is not None
        if not self._changed:
            scale = self._saves.state.gradient_scale(self.device)
            if self._overflow.look(scale, stepped=stepped):
                self._account.telemetry.skipped()
        self._changed = self._changed or stepped
        self._begin_sum()

    def _begin_sum(self) -> None:
        due, overflows = self._saves.due_by_clock(), self._overflow.for_good
        self._exchange.contribute(self._step + 1, save=due, overflows=overflows, seconds=self._step_seconds)

    # ------------------------------------------------------------------- loop

    def steps(self, total: int) -> StepsLeft:
        """Indices of the steps that are left, from the resumed one to `total - 1`.

        Between two of them checkpoints are taken and stops agreed on. To go through them raises SystemExit(0)
        on an agreed stop, Fenced where a newer attempt took over, TypeError where `total` is no whole number,
        ConfigError where it is below 0.
        """
        return StepsLeft(partial(self._loop, total))

    def _loop(self, total: int) -> Generator[int]:
        if (total := _whole(total)) < 0:
            raise ConfigError(
                f"run.steps({total}) has no steps, and a run without any would be taken for finished: ask "
                "for how many it has in all, those that were done among them"
            )
        if self._saves.state is None:
            raise RuntimeError("call track(model=..., optimizer=...) before steps(): nothing would be saved")
        if self._looping:
            raise RuntimeError(
                "a loop over run.steps() is under way, and a step in it would be done twice: leave that one "
                "first, by its end, break or close()"
            )
        self._looping, self._ending.thread = True, threading.current_thread()
        self._heard_of_notice = False
        state, exactness = self._saves.state, self._exactness
        # The steps of all optimizers there are.
        looks = register_optimizer_step_pre_hook(lambda one, *_: exactness.look_at_optimizer(state, one))
        try:
            self._end_left_step()
            self._take_back_left_step()
            if self._completed and total == self.total_steps and not self._told_of_total:
                self._told_of_total = True
                log.warning(
                    "run.steps(%d) has no step left, as a loop over these has ended before: it counts from "
                    "the run's first step. Where each epoch has a loop, ask for (epoch + 1) * %d",
                    total,
                    total,
                )
            self.total_steps = total
            self._set_random()  # where no step is left too, for what comes after the loop
            self._left = False
            if self._step < total:
                self._begin(total)
            else:
                self._account.telemetry.nothing_left(total)
                if self.rank == 0 and not self._completed and self._step == self._started_at == total > 0:
                    log.info(
                        "all %d steps were done before; to begin anew, use another run directory than %s",
                        total,
                        self.run_dir.path,
                    )
            while self._step < total:
                yield self._step
                self._pass_on(total)
                self._begin_step(total)
            self._complete()
        except Exception as error:
            self._fault = error
            raise
        finally:  # also where the loop is left by `break`: what comes then is not ours to time, or to copy
            looks.remove()
            if not self._ending.forked:
                self._watchdog.stop()
                if self._step < total:
                    self._watchdog.stand_by()
                self._saves.settle()
                self._left, self._looping = True, False
                self._account.steps.leave()
                self._saves.state.noted.note()

    def _pass_on(self, total: int) -> None:
        """From one step to the next, with a save between the two where one is due."""
        self._end_step()
        if self._step < total and self._save_agreed and not self._put_aside:
            self._losses.flush(self._step)
            if not self._saves.begin_in_turn(self._step):
                self._stop()
        else:
            self._saves.prepare(self._step)

    def _end_left_step(self) -> None:
        """The step in which the loop was left by `break` counts, once an optimizer has changed the state: the
        next loop goes on after it, and a validation between the two is of the state after it. Collective."""
        if self._left and self._changed:
            self._pass_on(self.total_steps or 0)
            self._saves.settle()  # outside the loop others than the optimizer may write to what is copied

    def _take_back_left_step(self) -> None:
        """Where no optimizer had changed the state yet it is done anew: what it told and computed goes."""
        self._losses.take_back(self._step + 1)
        for name in self._spoilt_gradients():
            raise RuntimeError(
                f"step {self._step + 1} was left after it had added to the gradients that {name} has not "
                "stepped with yet: done anew, it would add to them twice. Leave the loop before its backward "
                "pass, or after a step of the optimizer"
            )

    def _spoilt_gradients(self) -> list[str]:
        """The optimizers of which a step that was left, and is to be done anew, has changed the gradients."""
        assert self._saves.state is not None
        return self._saves.state.take_back() if self._left and self._step < (self.total_steps or 0) else []

    def describe_batches(self, describe: Callable[[int], str]) -> None:
        """`describe` says which data this rank has in step `step` (0 is the first): for a fault's message."""
        self._losses.describe_batch = describe

    def _set_random(self) -> None:
        if self._resumed_rng is not None:
            rng.restore(self._resumed_rng)
        elif not self._seeded:
            rng.seed_all(self._seed + self._step, self.rank)
        self._resumed_rng, self._seeded = None, True

    def _begin(self, total: int) -> None:
        self._completed = False
        require_alike(self.gang, {"the number of steps": total, **announced()})
        self._account.begin(
            self._step, total, self._saves.durable_step, self._flops_per_token, self.compute_dtype
        )
        self._account.count_epochs(self.steps_an_epoch, self._step)
        self._watchdog.start()
        tell_of_lingering()
        assert self._saves.state is not None
        for model in self._saves.state.replicated.values():
            divide_alike(model)
        self._saves.state.noted.begin(self._saves.state.optimizers)
        self._exactness.begin(self._saves.state)
        self._overflow.look(self._saves.state.gradient_scale(self.device), stepped=True)
        self._exchange.contribute(self._step)
        agreed = self._exchange.finish()
        self._losses.hear_counts(agreed)  # of the step in which the loop before was left
        self._losses.hear(agreed)
        if agreed.stop:  # a notice came before the first step
            self._stop()
        self._saves.restart_clock()
        self._begin_step(total)

    def _begin_step(self, total: int) -> None:
        self._account.begin_step(self._step)
        self._step_began = time.monotonic()
        ends = self._step + 1
        if self._exchange.early and ends < total and not self._saves.due_at_step(ends):
            self._begin_sum()  # else all of the step is to be known when it ends

    def _end_step(self, *, leaving: bool = False) -> None:
        assert self._saves.state is not None
        self._saves.settle()
        self._saves.state.end_step()
        self._exactness.end_step(self._saves.state, self._step + 1, self._account.journal)
        if not self._left:  # what the loop was left with is noted, and may have been put aside since
            self._saves.state.noted.note()
        self._contribute(stepped=False)
        agreed = self._exchange.finish()
        self._step_seconds = time.monotonic() - self._step_began
        self._watchdog.beat()
        self._saves.end_step()
        self._step += 1
        self._changed = False
        # Where the script caught that, it goes on.
        self._fault, self._ending.exit_status, self._ending.cut_step = None, None, False
        self._ending.left_by_handler = False
        self._losses.hear_counts(agreed)
        self._account.end_step(self._step, owes_counts=self._losses.owes_counts(self._step))
        self._losses.hear(agreed)
        self._save_agreed = agreed.save or self._saves.due_at_step(self._step)
        if self._save_agreed or agreed.stop:
            self._exactness.before_save(self._saves.state)
        if leaving:
            return
        self._saves.raise_if_fenced()
        if agreed.stop:
            self._stop()

    def _explain(self, error: BaseException) -> BaseException:
        if not is_out_of_memory(error):
            in_loop = [] if self.total_steps is None else [data_ended]
            explains = [dead_worker, not_deterministic, *in_loop]
            return next(filter(None, (of(error, self.rank, self._step + 1) for of in explains)), error)
        return out_of_memory(
            error,
            self.rank,
            None if self._saves.state is None else self._step + 1,
            self.device,
            self.memory_remedy,
            fitted=self._step > self._started_at,
            fitted_before=self._started_at > 0 or self._trained_before,
        )

    def log(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        tokens: int = 0,
        samples: int = 0,
        val_loss: torch.Tensor | float | None = None,
        grad_norm: torch.Tensor | float | None = None,
    ) -> None:
        """Tell what this step did on this rank: `loss` is averaged over ranks, counts are added up, and of
        `val_loss` that of rank 0 counts (see `mean`).

        Call it on every rank, at most once a step with a loss; before `optimizer.step()` where you can,
        as the loss then travels with this step's agreement. A loss that is NaN or infinite, or a gradient
        norm where no scaler is tracked, stops the run before that state is saved. `val_loss` is of the state
        as it is now: after this step where an optimizer has had its turn, else after the one before.
        """
        self._saves.settle_if_copied()
        if loss is not None and self.total_steps is None:
            raise RuntimeError(
                "run.log(loss=...) tells of a step: call it in a loop over run.steps(...), which counts and "
                "saves them"
            )
        if loss is not None:
            self._losses.offer(self._step + 1, loss, grad_norm)
        elif grad_norm is not None:
            self._losses.norm(self._step + 1, grad_norm)
        self._losses.count(self._step + 1, tokens, samples)
        if val_loss is not None:
            val_loss = float(number("val_loss", val_loss))
            self._end_left_step()
            done = self._step + self._changed  # the state is this step's once an optimizer has had its turn
            self._account.steps.val_loss(done, val_loss)
            self._saves.validated(done, val_loss)
            if self._completed:
                self._saves.validated_last(done, val_loss)

    def mean(self, value: float) -> float:
        """The mean over ranks, the same bits on every rank. Collective."""
        total = self.gang.sum_async(torch.tensor([value], dtype=torch.float64, device="cpu"))()
        return float(total) / self.world_size

    @property
    def noticed(self) -> bool:
        """Whether this rank was told to end: all stop together, at a step's end. A loop left by `break`
        then counts as interrupted, not as finished, and so does a program that asks here after a loop, or
        before one, hears of it, and ends without another."""
        received = self._notice.received
        self._heard_of_notice = self._heard_of_notice or received
        return received

    def summary(self) -> str:
        """Loss, rates and time left in a line, as far as they are known."""
        return self._account.telemetry.summary()

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Time a part of the step: data, forward, backward, optimizer, validation. Of `backward`, what DDP
        waits for the exchange of gradients is told apart, as `communication`. One within another is no part
        of that; within validation all is part of it."""
        self._saves.settle_if_copied()
        return self._account.spans.span(phase)

    def interruptible(self, items: Iterable[T]) -> Iterator[T]:
        """Go through `items` (the same number on every rank), stopping between two where all agree to.

        For validation: put it at the top of a step. Once an optimizer has changed the state, a stop would
        save half a step, so it then waits for the step's end. So it does where a model holds other values
        than the newest step ended with, such as an average of them: these would be saved as the model.
        """
        self._end_left_step()
        if self._changed:
            for item in items:
                yield item
                self._watchdog.beat(step=False)
                self._saves.settle_if_copied()
            return
        before, random = self._account.telemetry.progress.phase, rng.capture()
        self._account.telemetry.phase("validating")
        waits = not self._completed and self._holds_other_models  # else that step is saved
        for item in items:
            self._exchange.contribute(self._step, waits=waits)
            try:
                yield item
            except GeneratorExit:  # left by `break`: the next agreement reads the sum that has begun
                self._account.telemetry.phase(before)
                raise
            agreed = self._exchange.finish()
            self._watchdog.beat(step=False)
            self._saves.settle_if_copied()
            self._losses.hear_counts(agreed)
            try:
                self._losses.hear(agreed)
            except Exception as error:
                self._fault = error
                raise
            if agreed.stop:
                self._stop(random)
        self._account.telemetry.phase(before)

    @property
    def _put_aside(self) -> bool:
        """Whether the loop was left, and a rank's models hold something else since. Collective."""
        return self._left and any(self.gang.gather(self._holds_other_models))

    @property
    def _holds_other_models(self) -> bool:
        return self._saves.state is not None and self._saves.state.noted.changed

    # -------------------------------------------------------------------- end

    def _stop(self, random: dict[str, Any] | None = None) -> None:
        """The gang has agreed to stop here: save, say so, leave."""
        self._watchdog.stop()
        self._account.telemetry.phase("stopping")
        self._losses.flush(self._step)
        fault = self._saves.now_in_time(self._step, self._notice.remaining(), random)
        if self.rank == 0:
            log.info("stopped on notice after step %d", self._step)
            if fault:
                log.warning("this step is not durable: %s", fault)
        # Before the last words: a rank that hears them in its replica may end this one (supervise.py).
        self._account.stop(self._step, self._notice.remaining())
        self._ending.say("interrupted", str(fault or ""))
        self._notice.settle()
        self.gang.leave()
        raise SystemExit(0)

    def _complete(self) -> None:
        """All steps are done: the last state becomes durable before anything says finished."""
        self._watchdog.stop()
        self._account.telemetry.phase("saving")
        self._losses.flush(self._step)
        # Nothing is left to be done but this: to wait costs no more than to do it all again.
        if fault := self._saves.now_or_later(self._step, self._account.telemetry.unsaved_seconds):
            if any(self.gang.gather(self._notice.received)):
                self._stop()
            self._saves.raise_if_fenced()
            raise type(fault)(f"trained to step {self._step}, but it is not durable: {fault}")
        self._completed = True
        assert self._saves.state is not None
        self._exactness.rest(self._saves.state)
        self._account.telemetry.phase("finished")

    def _at_exit(self) -> None:
        """The program ended by itself; where it left the loop early, it did so of its own will, or as a rank
        was told to end: that is taken for the reason, as what is begun again can be left again. What the loop
        has raised, such as that a loss is no number, is the end also where the script has caught it."""
        if self._fault is not None:
            raise self._fault
        if self.total_steps is not None and not self._completed:
            if self._changed:
                self._end_step(leaving=True)
            for name in self._spoilt_gradients():
                why = "have those of the step in which the loop was left, which a resume does again"
                self._exactness.lose(f"gradients that {name} adds up", why)
            if self._holds_other_models:
                why = "of a loop that was left, such as its best ones, are saved as those of its last step"
                self._exactness.lose("values that models were given after the end", why)
            if self._step < self.total_steps and any(self.gang.gather(self._notice.look())):
                self._stop()
            self._complete()
        if self._heard_of_notice or self._ending.left_by_handler:
            self._account.telemetry.phase("stopping")
            self._ending.say("interrupted", "on notice the program ended, outside of a loop over run.steps")
        else:
            self._ending.say("finished")
        self._notice.settle()
        self._account.close(self._step)
        with contextlib.suppress(RuntimeError):
            self.gang.leave()


def _order_of(optimizer: str) -> str:
    return f"the order of the parameters of {optimizer} (sort them: a set's is another in each process)"


def _flops(a_token: Any) -> float | None:
    """Raises ConfigError where a rate by it would be no number."""
    if a_token is None:
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if 0 <= float(a_token) < math.inf:
            return float(a_token)
    raise ConfigError(
        f"flops_per_token={a_token!r:.100} is no number of operations: give about 6 for each parameter"
    )


def _whole(total: Any) -> int:
    """Also of a float that is whole, as ceil of NumPy gives one. Raises TypeError, as `range` does."""
    return int(total) if isinstance(total, float) and total.is_integer() else operator.index(total)
