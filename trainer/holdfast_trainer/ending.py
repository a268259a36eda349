"""How a rank ends: said once, truly, whoever is first to know.

A rank can end by agreement, by finishing, by an exception, by `sys.exit`, from the keyboard, or because
its grace period is nearly over while its main thread waits for a peer that is gone. Each way leads to
`say`: the termination message for the engine, and a line in the ledger. Whoever comes second, in
whichever thread, finds it said.

What is asked on the way may fail in its turn, or never answer: the run directory, when it is the reason for
the end, or a GPU after its first error. The message is local, and is written whatever happens; the ledger is
waited for no longer than so long.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from . import contract, in_place
from .checkpoint import CheckpointError, Fenced, WrongConfiguration
from .checkpoint.errors import StorageUnavailable, UnsupportedState
from .contract import Progress, Termination
from .faults import DeadWorker, Explained, waited_in_vain
from .ledger import Journal
from .parallel import is_lost_peer
from .schema import ConfigError
from .token_index import DataError, is_away, may_come
from .within import within

log = logging.getLogger("holdfast")
T = TypeVar("T")

EXIT_NOTICE = 143
"""As of a process that SIGTERM ended: the stop was not made in order."""
EXIT_KEYBOARD = 130
NOTICES = (signal.SIGTERM, signal.SIGINT)
HUNG_SECONDS = 30.0
TELL_SECONDS, HURRIED_SECONDS = 20.0, 1.0
"""How long the ledger is waited for, and that where the grace is nearly over."""
CANNOT_BE_MENDED = (ConfigError, DataError, WrongConfiguration, UnsupportedState)
"""What no retry will mend, unless it is data that may come: the exit status says so
(`contract.EXIT_CONFIG_ERROR`)."""


@dataclass(frozen=True)
class Standing:
    """What this rank can say of its work: steps done, the newest durable one, the digest of that one."""

    step: int = 0
    durable_step: int = 0
    digest: str = ""


class Ending:
    """The last words of one rank, and the hooks that see to them."""

    def __init__(self) -> None:
        """Needs nothing but the environment: it is there before anything that can go wrong."""
        env = os.environ
        self._rank, self._local_rank = env.get("RANK", "0"), env.get("LOCAL_RANK", "0")
        self._termination = Path(env.get(contract.ENV_TERMINATION_LOG) or contract.DEFAULT_TERMINATION_LOG)
        self._pid = os.getpid()
        self.thread = threading.current_thread()
        """That which trains. What ends it is the rank's end, though Python would go on without it."""
        self._lock = threading.Lock()
        self._said: contract.Outcome | None = None
        self.journal: Journal | None = None
        self.standing: Callable[[], Standing] = Standing
        self.progress: Callable[[], Progress | None] = lambda: None
        """All figures of this rank, once it measures any."""
        self.noticed: Callable[[], bool] = lambda: False
        self.hanging: Callable[[], bool] = lambda: False
        """Whether another thread is about to say that the gang hangs, and to end this process."""
        self.before_failure: Callable[[], None] = lambda: None
        """Called before a failure is told: what is being saved may still become durable."""
        self.check_fence: Callable[[], None] = lambda: None
        """Raises Fenced where a newer attempt was admitted."""
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        """May put a fault that its own message does not explain into words."""
        self.at_exit: Callable[[], None] = lambda: None
        """Called when the program ends by itself; what it raises is a failure like any other."""
        self.in_step: Callable[[], bool] = lambda: False
        """Whether a loop over steps is under way, and not left by its end or by `break`."""
        self.exit_status: Any = None
        """What `sys.exit` was called with last."""
        self.cut_step = False
        """Whether that was in a step, of which nobody knows how much was done."""
        self.left_by_handler = False
        """Whether the program's own handler for a notice called it."""

    def install(self) -> None:
        """Listen for uncaught exceptions, `sys.exit` and the end of the program."""
        self._previous_hook, self._previous_exit = sys.excepthook, sys.exit
        sys.excepthook = self.fail
        self._previous_thread_hook, threading.excepthook = threading.excepthook, self._fail_in_thread
        # Nothing else tells at exit whether a loop was left by `break` or by sys.exit("no such file"); of a
        # SystemExit that is raised otherwise, who runs the program in place does.
        sys.exit = builtins.exit = builtins.quit = self._exit  # type: ignore[assignment]
        in_place.on_exit = self._ended
        atexit.register(self._leave)

    @contextmanager
    def outermost(self) -> Iterator[None]:
        """Around what wraps `sys.excepthook`, as torch.distributed does to print the rank before each line.

        `fail` does not return to a hook around it, which would then never print what it gathered.
        """
        sys.excepthook = self._previous_hook
        try:
            yield
        finally:
            self._previous_hook, sys.excepthook = sys.excepthook, self.fail

    def say(
        self,
        outcome: contract.Outcome,
        error: str = "",
        *,
        config_error: bool = False,
        storage_unavailable: bool = False,
        patience: float = TELL_SECONDS,
    ) -> bool:
        """Write termination message and ledger line; false where that was done before.

        `patience`: seconds to wait for the ledger, and for who is about to say it in another thread.
        """
        if not self._lock.acquire(timeout=patience):
            return False
        try:
            if self._said:
                return False
            self._said = outcome
            now = _answer_of(self.standing) or Standing()
            told = _answer_of(lambda: self._last_word(now)) if self._rank == "0" else None
            if self._local_rank == "0" or outcome in ("failed", "hung"):
                message = Termination(
                    outcome, now.step, now.durable_step, error, config_error, told, storage_unavailable
                )
                contract.write_termination(self._termination, message)
            if fault := within(patience, lambda: self._tell_ledger(outcome, error, now, told)):
                log.warning("the ledger does not tell of this end: %s", fault)
            return True
        finally:
            self._lock.release()

    def _last_word(self, now: Standing) -> Progress | None:
        """The figures, brought up to where this rank stands."""
        progress = self.progress()
        if progress is None:
            return None
        durable_seconds = progress.durable_seconds
        if progress.durable_step != now.durable_step:
            durable_seconds = progress.useful_seconds if now.durable_step == now.step else None
        return replace(
            progress,
            step=now.step,
            durable_step=now.durable_step,
            durable_seconds=durable_seconds,
            digest=now.digest,
            updated=time.time(),
        )

    def _tell_ledger(
        self, outcome: contract.Outcome, error: str, now: Standing, told: Progress | None
    ) -> None:
        if self.journal is None:
            return
        if self._rank == "0":
            self.journal.event(
                "stop",
                time=time.time() if told is None else told.updated,
                outcome=outcome,
                step=now.step,
                durable_step=now.durable_step,
                error=error,
                digest=now.digest,
                useful_seconds=None if told is None else told.durable_seconds,
            )
        elif outcome == "failed":
            self.journal.event("failure", rank=int(self._rank), step=now.step, error=error)
        if unwritten := self.journal.unwritten:
            log.warning("%d lines of the ledger or steps.jsonl could not be written", unwritten)

    def out_of_time(self) -> None:
        """The grace is nearly over and no stop was made: what is durable counts. From any thread."""
        try:
            why = "the grace period ended before all ranks could stop together"
            if not self.say("interrupted", why, patience=HURRIED_SECONDS):
                time.sleep(HURRIED_SECONDS)  # whoever was first is about to leave, unless it is held up there
        finally:
            os._exit(0 if self._said == "finished" else EXIT_NOTICE)

    def hung(self, who: str, seconds: float, stands: str, stacks: str) -> None:
        """No step has ended for `seconds`: the gang goes on no more. From any thread. Where the run directory
        does not answer either, that is no fault of the job's."""
        away = False
        if (journal := self.journal) is not None:
            rank, step = int(self._rank), (_answer_of(self.standing) or Standing()).step
            told = {"stacks": stacks} if stacks else {}
            fault = within(
                TELL_SECONDS,
                lambda: journal.event("hang", rank=rank, step=step, seconds=seconds, stands=stands, **told),
            )
            away = isinstance(fault, TimeoutError)
        why, patience = f"no step for {seconds:.0f} s: {who}", HURRIED_SECONDS if away else TELL_SECONDS
        if self.say("hung", why, storage_unavailable=away, patience=patience):
            _exit_now(1)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the rank's process: it has no words to say, and no threads of ours."""
        return os.getpid() != self._pid

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """For `sys.excepthook`: does not return, except in a forked child."""
        if self.forked:
            self._previous_hook(kind, error, trace)
            return
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # A hook around this one, by a loop's own init_process_group, gathers what is printed, to print it
            # once this returns, which it does not.
            sys.stderr = sys.__stderr__
        try:
            self._fail(kind, error, trace)
        finally:  # something has failed on the way: a hook before this one, or a log on a full disk
            self.say("failed", "".join(traceback.format_exception(kind, error, trace)))
            os._exit(1)

    def _fail_in_thread(self, told: threading.ExceptHookArgs, /) -> None:
        if told.thread is not self.thread or told.exc_value is None:
            self._previous_thread_hook(told)
        else:
            self.fail(told.exc_type, told.exc_value, told.exc_traceback)

    def _fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        if is_lost_peer(error):
            if self.hanging():
                time.sleep(HUNG_SECONDS)  # it ended because of the hang, of which that thread knows more
            fault = within(TELL_SECONDS, self.check_fence)
            if isinstance(fault, Fenced):  # it has ended by that, and met it first
                error = fault
            elif not self.in_step() and (told := waited_in_vain(error)):
                error.add_note(told)
        if isinstance(error, (*CANNOT_BE_MENDED, CheckpointError)):
            if not isinstance(error, Fenced):  # whose saves count no more
                self._finish_saving()
            away = isinstance(error, DataError) and is_away(error)
            said = str(error)
            if away and contract.saved_before() is not None:
                said += ". Attempts before have trained: is its volume mounted?"
            print(f"error: {said}", file=sys.stderr)  # it says what to do; the stack says nothing more
            mendable = away or not isinstance(error, CANNOT_BE_MENDED) or may_come(error)
            later = away or isinstance(error, StorageUnavailable)
            self.say("failed", said, config_error=not mendable, storage_unavailable=later)
            _exit_now(1 if mendable else contract.EXIT_CONFIG_ERROR)
        error = _answer_of(lambda: self.explain(error)) or error
        if isinstance(error, Explained):
            if error.__cause__ is not None:
                self._previous_hook(kind, error.__cause__, trace)
            self._finish_saving()
            print(f"error: {error}", file=sys.stderr)
            if isinstance(error, DeadWorker) and self.noticed():
                self.say("interrupted", f"the notice met a process that loads data too: {error}")
                _exit_now(EXIT_NOTICE)
            self.say("failed", str(error), config_error=not error.mendable)
            _exit_now(1 if error.mendable else contract.EXIT_CONFIG_ERROR)
        self._previous_hook(kind, error, trace)
        if isinstance(error, KeyboardInterrupt):
            self.say("interrupted", "interrupted from the keyboard")
            _exit_now(EXIT_KEYBOARD)
        self._finish_saving()
        if is_lost_peer(error) and self.noticed():
            self.say("interrupted", f"a peer was lost before all ranks could stop together: {error}")
            _exit_now(EXIT_NOTICE)
        self.say("failed", "".join(traceback.format_exception(kind, error, trace)))
        _exit_now(1)

    def _finish_saving(self) -> None:
        try:
            self.before_failure()
        except Exception as error:  # after one error a GPU answers every question with it
            log.warning("what was being saved is given up: %s", error)

    def _exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() in (threading.main_thread(), self.thread):  # others end by it alone
            self.exit_status, self.cut_step = status, self.in_step()
            self.left_by_handler = _in_handler()
        self._previous_exit(status)

    def _ended(self, status: Any) -> None:
        """The program ended by a SystemExit with this, however that was raised."""
        if status not in (None, 0):
            self.exit_status = status

    def _leave(self) -> None:
        if self._said or self.forked:
            return
        if self.cut_step and self.noticed():  # by a handler of its own for SIGTERM, which came anywhere
            self._finish_saving()
            why = f"on notice the program ended by sys.exit({self.exit_status!r}), in the middle of a step"
            log.warning("%s, which is not saved: leave SIGTERM to Run, which stops between two", why)
            self.say("interrupted", why)
            _exit_now(EXIT_NOTICE)
        if self.exit_status not in (None, 0) and not self.left_by_handler:
            self._finish_saving()
            self.say("failed", f"the program ended by sys.exit({self.exit_status!r})")
            _exit_now(in_place.status_of(self.exit_status) or 1)  # of 256 that is 0, which is a success
        try:
            self.at_exit()  # Python would print what this raises, and exit with status 0
        except SystemExit:  # the gang agreed to stop during the last save, and has said so
            _exit_now(0)
        except BaseException as error:
            self.fail(type(error), error, error.__traceback__)
        if self.exit_status not in (None, 0):
            _exit_now(EXIT_NOTICE)


def _in_handler() -> bool:
    """Whether who called this runs within the program's handler for SIGTERM or SIGINT."""
    handlers = {_code_of(signal.getsignal(number)) for number in NOTICES}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in handlers:
            return True
        frame = frame.f_back
    return False


def _code_of(handler: Any) -> CodeType | None:
    """What runs where it is called: of a partial or an object, what it calls; None of what is no Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for called in (handler, type(handler).__call__) if callable(handler) else ():
        if isinstance(code := getattr(called, "__code__", None), CodeType):
            return code
    return None


def _exit_now(status: int) -> NoReturn:
    """Peers may be waiting for this rank in a collective: leave without waiting for them in turn."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # the log may be on a full disk
        os._exit(status)


def _answer_of(ask: Callable[[], T]) -> T | None:
    """None where that fails: what was asked for is less than the words that are to be said."""
    try:
        return ask()
    except Exception as error:
        log.warning("last words are said without all that there was to tell: %s", error)
        return None
