"""From a signal on one rank to a stop that all ranks make at the same step.

A notice (SIGTERM) may reach one rank of many. Each step every rank adds a small vector to a sum that all
ranks receive (`Exchange`): whether it was given notice, whether a checkpoint is due, its loss, what it
worked on. The sum is begun while the optimizer still works and read when the step ends, so nothing blocks
on it; and since all ranks read the same sum at the same step, they agree without any further message. A
notice that arrives before the optimizer's turn stops the gang at the end of that step, a later one at the
end of the next.

A gang that cannot agree (a peer is gone, a first step that compiles for minutes) must still end inside
the grace period: when that is nearly over, `Notice` calls a function that ends this rank at once. Python
runs a signal's handler only between two bytecodes of the main thread, which may be waiting in C for a
peer that will never answer; so the notice is taken from the wakeup descriptor, by a thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch

from .faults import Offered
from .late import Late
from .parallel import Gang
from .supervise import die_with_parent

RESERVE_SHARE = 0.1
"""Share of the grace period kept for the last words of a rank that could not stop in order."""
EARLY_BELOW_SECONDS = 0.5
"""Where a step takes less, a notice may be heard of a step later: of its 30 s that leaves nearly all."""


class Notice:
    """Remembers that this process was told to end, and when it will be killed."""

    def __init__(self, grace_seconds: float, on_deadline: Callable[[], None]) -> None:
        self._grace = grace_seconds
        self._on_deadline = on_deadline
        self._deadline: float | None = None
        self._timer: threading.Timer | None = None
        self._interrupts = 0
        self._rank_process = os.getpid()
        self._first = threading.Lock()  # taken by the first to see a signal, and never let go

    def install(self) -> None:
        """Take SIGTERM and SIGINT; call in the main thread. A second SIGINT ends the process at once."""
        self._waking, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        threading.Thread(target=self._watch, name="notice", daemon=True).start()
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)

    def _before_fork(self) -> None:
        self._forked_by = os.getpid(), threading.get_native_id()

    def _after_fork(self) -> None:
        """In a child: not to outlive the rank, whose memory on a GPU and connections to its peers it has too.
        One that a thread forked is let be, which the kernel would end with that thread."""
        _let_go()
        process, thread = self._forked_by
        if process == self._rank_process == thread:
            with contextlib.suppress(OSError, AttributeError):  # the latter where there is no prctl
                die_with_parent(process)

    def _watch(self) -> None:
        while numbers := self._waking.recv(64, socket.MSG_PEEK):
            if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                self._begin()
            self._waking.recv(len(numbers))  # not before it has begun: see `look`

    def look(self) -> bool:
        """`received`, and also where the thread has not come to it: a script's own handler for the signal, in
        the place of `_receive`, may be faster."""
        with contextlib.suppress(BlockingIOError):
            numbers = self._waking.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                self._begin()
        return self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._begin() and number == signal.SIGINT and self._interrupts:
            raise KeyboardInterrupt
        self._interrupts += number == signal.SIGINT

    def _begin(self) -> bool:
        """The grace period starts with the first signal; true for the one that started it.

        Raises what another signal's handler raises meanwhile, as PyTorch's does, once, of a loader's process
        that was killed: who waits for that would wait in vain."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
        if not self._first.acquire(blocking=False):
            return False
        self._timer = threading.Timer(self._grace * (1 - RESERVE_SHARE), self._on_deadline)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError as error:
            *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
            if innermost.f_code is not threading.Thread.start.__code__:
                raise
            # No more threads, as when the interpreter is ending.
        return True

    @property
    def received(self) -> bool:
        return self._deadline is not None

    def remaining(self) -> float:
        """Seconds left for an orderly stop, the reserve taken off; the whole grace without a notice."""
        reserve = self._grace * RESERVE_SHARE
        if self._deadline is None:
            return self._grace - reserve
        return max(0.0, self._deadline - reserve - time.monotonic())

    def settle(self) -> None:
        """The stop was made in order: the deadline no longer ends the process."""
        if self._timer is not None:
            self._timer.cancel()


def _let_go() -> None:
    """In a forked child, such as a data loader's worker: no rank, so signals are not for it.

    torchrun signals a rank's whole process group. A worker that died of that would take the batch with
    it that the last step before the stop waits for, so it leaves the group. Its parent ends it.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)


class Counts(NamedTuple):
    """What was worked on in step number `step` (1 is the first)."""

    step: int
    tokens: int
    samples: int


@dataclass(frozen=True)
class Agreed:
    """What the gang knows after an exchange; the same on every rank."""

    stop: bool
    save: bool
    loss: tuple[int, float] | None
    """(step, mean over ranks) of the oldest loss not yet known; None where this rank offered none."""
    grad_norm: float | None = None
    """This rank's gradient norm of that step, where it was told."""
    told: int = 0
    """How many ranks offered a loss or a gradient norm."""
    broken: int | None = None
    """The step (1 is the first) of which a rank told a loss or a norm that is no finite number."""
    counts: Counts | None = None
    """Of all ranks together; None where none told any."""
    overflows: bool = False
    """A rank's gradient scaler has passed over so many steps that no other is to be expected."""


class _Told(NamedTuple):
    step: int
    loss: Late | None
    """None: told already, or not at all."""
    grad_norms: tuple[Late, ...]

    @property
    def late(self) -> bool:
        return any(number.late for number in (self.loss, *self.grad_norms) if number is not None)


def _worst(norms: Sequence[float]) -> float | None:
    """The first that is not finite, else the newest; None where there is none."""
    return next((norm for norm in norms if not math.isfinite(norm)), norms[-1] if norms else None)


class Exchange:
    """One sum a step over all ranks: (notice, save due, has a loss, loss, norm not finite, its step,
    has counts, tokens, samples, their step, gradients overflow for good, seconds of the step before, has a
    loss or a norm, a stop has to wait)."""

    def __init__(
        self, gang: Gang, notice: Notice, late: Callable[[torch.Tensor | float], Late] = Late.of
    ) -> None:
        """`late` has a number begin its way from where it is computed."""
        self._gang, self._notice, self._late = gang, notice, late
        self._losses: deque[_Told] = deque()
        self._counts: deque[Counts] = deque()
        self._pending: Callable[[], torch.Tensor] | None = None
        self._newest = 0
        self._counted_step: int | None = None
        self.offered: Offered | None = None
        """What this rank told in the newest exchange."""
        self.norm_must_be_finite = True
        """False where a gradient scaler passes such a step over."""
        self._step_seconds = 0.0
        """Of a recent step, as all ranks have agreed; 0 before any."""

    @property
    def early(self) -> bool:
        """Whether a step's sum had better begin with the step; the same on every rank.

        It then travels while the step computes, and nobody waits for it at the end. Begun in the optimizer's
        turn it holds up ranks that share their cores (2 ms of a step of 122, two ranks on two cores). But of
        what comes within the step, a notice or its loss, all hear a step later, so steps must be short; and
        on a GPU it is the CPU alone that waits, with the step's work queued.
        """
        gathers = self._gang.control is not None and self._gang.device.type == "cpu"
        return gathers and 0 < self._step_seconds < EARLY_BELOW_SECONDS

    def offer_loss(
        self, step: int, loss: torch.Tensor | float, grad_norm: torch.Tensor | float | None = None
    ) -> None:
        """Queue this rank's loss of a step, a scalar. Raises ValueError on a second one of a step."""
        if step <= self._newest:
            raise ValueError(
                f"step {step} has told its loss already: add up the parts, and tell the sum once"
            )
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ValueError(f"a loss of shape {list(loss.shape)}: tell one number, such as loss.mean()")
        self._newest = step
        self._offer(step, loss, grad_norm)

    def offer_norm(self, step: int, grad_norm: torch.Tensor | float) -> None:
        """Queue a gradient norm of this rank's, with the loss of that step where it has not gone yet."""
        self._offer(step, None, grad_norm)

    def _offer(
        self, step: int, loss: torch.Tensor | float | None, grad_norm: torch.Tensor | float | None
    ) -> None:
        queued = self._losses.pop() if self._losses and self._losses[-1].step == step else None
        known, norms = (None, ()) if queued is None else (queued.loss, queued.grad_norms)
        if grad_norm is not None:
            norms = *norms, self._late(grad_norm)
        self._losses.append(_Told(step, known if loss is None else self._late(loss), norms))

    def count(self, step: int, tokens: int, samples: int) -> None:
        """Add to what this rank worked on in a step."""
        if self._counts and self._counts[-1].step == step:
            _, more_tokens, more_samples = self._counts.pop()
            tokens, samples = tokens + more_tokens, samples + more_samples
        if tokens or samples:
            self._counts.append(Counts(step, tokens, samples))

    def take_back(self, step: int) -> None:
        """What this rank told of a step counts for nothing: it was left in its middle, and is done anew."""
        self._losses = deque(told for told in self._losses if told.step != step)
        self._counts = deque(counts for counts in self._counts if counts.step != step)
        self._newest = min(self._newest, step - 1)

    def owes_counts(self, step: int) -> bool:
        """Whether some of a step's are still to be told, as they came when its sum had begun."""
        return any(counts.step == step for counts in self._counts)

    def contribute(
        self,
        step: int,
        *,
        save: bool = False,
        overflows: bool = False,
        seconds: float = 0.0,
        waits: bool = False,
    ) -> None:
        """Begin this step's sum; a second call within a step does nothing. `seconds`: what the step before
        it took on this rank, 0 where that is not known. `waits`: here no rank is to stop.

        What a GPU computes is read a step late, by all ranks alike: the CPU then waits for the step before at
        most (see `late`).
        """
        if self._pending is not None:
            return
        vector = torch.zeros(14, dtype=torch.float64, device="cpu")  # whatever torch.set_default_device says
        vector[0], vector[1], vector[10] = float(self._notice.received), float(save), float(overflows)
        vector[11], vector[13] = seconds, float(waits)
        self.offered, self._offered_step = None, 0
        if self._losses and (not self._losses[0].late or self._losses[0].step < step):
            told = self._losses.popleft()
            loss = None if told.loss is None else told.loss.read()
            norm = _worst([one.read() for one in told.grad_norms])
            self.offered, self._offered_step = Offered(loss, norm), told.step
            vector[12], vector[5] = 1.0, told.step
            if loss is not None:
                vector[2], vector[3] = 1.0, loss
            if norm is not None and self.norm_must_be_finite:
                vector[4] = float(not math.isfinite(norm))
        self._counted_step = self._counts[0].step if self._counts else None
        if self._counts:
            counts = self._counts.popleft()
            vector[6], vector[7], vector[8], vector[9] = 1.0, counts.tokens, counts.samples, counts.step
        self._pending = self._gang.sum_async(vector)

    def finish(self) -> Agreed:
        """Wait for the sum begun by `contribute`. Raises RuntimeError where a peer is gone."""
        assert self._pending is not None
        total, self._pending = self._pending().tolist(), None
        if total[11] > 0:
            self._step_seconds = total[11] / self._gang.world_size
        told, mine = int(total[12]), self.offered
        broken = told > 0 and (total[4] > 0 or not math.isfinite(total[3]))
        counts = None
        if counting := int(total[6]):
            step = self._counted_step or round(total[9] / counting)
            # Parts of ranks add up to a little less than the whole, as six sixths do.
            counts = Counts(step, round(total[7]), round(total[8]))
        return Agreed(
            stop=total[0] > 0 and total[13] == 0,
            save=total[1] > 0,
            loss=None if mine is None or mine.loss is None else (self._offered_step, total[3] / total[2]),
            grad_norm=None if mine is None else mine.grad_norm,
            told=told,
            broken=round(total[5] / told) if broken else None,
            counts=counts,
            overflows=total[10] > 0,
        )

    def drain(self, step: int) -> Iterator[Agreed]:
        """Exchange losses, norms and counts still queued. Collective: it goes on until no rank has any."""
        while True:
            self.contribute(step + 1)
            agreed = self.finish()
            if not agreed.told and agreed.counts is None:
                return
            yield agreed
