"""A rank that does no more steps is noticed, says where it stands, and ends.

Every rank of a gang waits for the slowest in each step, so a hang of one stops all of them. Each rank
watches itself: where no step has ended for longer than `patience` allows, it writes the Python stacks of
all its threads to `rank-N.stacks` in the attempt's directory and to its log, waits a moment for its peers
to do the same, and compares: whoever stands elsewhere than the others, or wrote nothing, is named. Then
it ends, so that the attempt can be judged as hung and the next one begin. Where the run directory is a
bucket these files are on the disk of each machine: a rank then compares its own replica, and says so.
A run directory that hangs may be why no step ends: it is asked in threads of their own, and where it does not
answer in time the rank says so, and ends without having compared.

Time in which the whole process was stopped does not count for that: nobody could have done a step in it.

What the thread cannot see is a rank whose interpreter is stuck in native code. For that faulthandler's own
timer, which needs no interpreter, is set a little later (`HangAfter.native`) and set anew as long as the
thread runs. It goes by the machine's clock, and cannot tell a process that is stuck from one that is stopped:
whoever was stopped for longer than that (a suspended Slurm job, `docker pause`) ends with status 1 in the
moment in which it goes on, with its stacks in the log, and the next attempt begins at the newest checkpoint.
To tell the two apart would take a process beside each rank, which is stopped along with it.

A rank that has left its loop waits for nobody, but others that stay in theirs wait for it, as where each
decides for itself when to stop. It stands by, and says where it is once one of them has noticed that.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .contract import RunDir, exists
from .parallel import Gang
from .schema import ConfigError
from .within import start_thread

AUTO_SECONDS = 600.0
AUTO_STEPS = 30.0
"""A step may take so many times the longest one yet."""
FIRST_STEP_FACTOR = 3.0
"""The first step compiles, allocates and measures."""
LONGEST_LOOK_SECONDS = 5.0
PEERS_SECONDS = 3.0
"""How long to wait for what the peers have to say, beyond two looks: they notice at about the same time."""
LOOK_SECONDS = 5.0
"""How long the run directory may take to answer, beyond what peers are waited for."""
TELLING_SECONDS = 120.0
"""For the last words of this rank, before faulthandler ends it without any."""
NATIVE_MARGIN_SECONDS = 30.0
"""At most, for the thread to end this rank before faulthandler does, and for that before the controller."""
TOLD_RANKS = 8
TOLD_BYTES = 8 * 1024
"""Of a rank's stacks, and of how many ranks, what goes into the ledger, which is read over the network."""
T = TypeVar("T")
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


@dataclass(frozen=True)
class HangAfter:
    """When a gang counts as hung: `seconds` without a step; None: by the steps seen; 0: never."""

    seconds: float | None = None

    @classmethod
    def parse(cls, text: str | float) -> HangAfter:
        """`auto`, or seconds, 0 to switch it off. Raises ConfigError."""
        if text == "auto":
            return cls()
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"hang after {text!r}: say auto, or a number of seconds (0: never)")
        return cls(seconds)

    def patience(self, longest_step: float | None) -> float:
        """Seconds without a step from which on the gang counts as hung.

        `longest_step` is the longest one yet in seconds, None before the first has ended.
        """
        if self.seconds is not None:
            return self.seconds if longest_step is not None else FIRST_STEP_FACTOR * self.seconds
        if longest_step is None:
            return FIRST_STEP_FACTOR * AUTO_SECONDS
        return max(AUTO_SECONDS, AUTO_STEPS * longest_step)

    def native(self, longest_step: float | None) -> float:
        """Seconds after which a rank ends that is stuck outside Python, or was stopped."""
        patience = self.patience(longest_step)
        return 1.5 * patience + min(NATIVE_MARGIN_SECONDS, patience)

    def beyond_help(self, longest_step: float | None) -> float:
        """Seconds after which nothing in the rank's own process can have been left to end it."""
        return self.native(longest_step) + min(NATIVE_MARGIN_SECONDS, self.patience(longest_step))


class Clock:
    """Seconds since the last beat, leaving out time in which this process did not run."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked = now()
        self._waited = 0.0

    def beat(self) -> float:
        """Begin anew; returns what had passed."""
        passed = self.look(float("inf"))
        self._waited = 0.0
        return passed

    def look(self, longest_gap: float) -> float:
        """Seconds since the beat. A gap since the last look counts for no more than `longest_gap`."""
        now = self._now()
        self._waited += min(now - self._looked, longest_gap)
        self._looked = now
        return self._waited


class Watchdog:
    """Watches one rank's steps from a thread of its own, between `start` and `stop`."""

    def __init__(
        self,
        run_dir: RunDir,
        attempt: int,
        gang: Gang,
        after: HangAfter,
        on_hang: Callable[[str, float, str, str], None],
    ) -> None:
        """`on_hang` is told, in the thread: who holds the gang up, in a sentence; the seconds without a
        step; where this rank stands; its stacks, as far as the ledger is to have them."""
        everybody = range(gang.world_size)
        seen = gang.of_this_replica if run_dir.objects else everybody
        self._stacks = {rank: run_dir.stacks(attempt, rank) for rank in seen}
        self._unseen = [rank for rank in everybody if rank not in seen]
        self._rank, self._gang = gang.rank, gang
        self._after = after
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._clock = Clock()
        self._longest: float | None = None
        self._pauses = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._asking: threading.Thread | None = None
        """What waits for an answer of the run directory."""
        self._recalled = threading.Event()
        """It need stand by no more."""
        self.telling = False
        """It has noticed a hang and will end this process."""

    def start(self) -> None:
        """Begin to watch; the first step has longer. Again after `stop`, anew. Until then nothing else says
        how long ranks wait for each other."""
        self._gang.wait_for_peers(watched=True)
        if self._after.seconds == 0:
            return
        self._recalled.set()
        self._longest, self._clock = None, Clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._ended,), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. Safe to call twice, and from the thread itself."""
        self._ended.set()
        self._recalled.set()
        faulthandler.cancel_dump_traceback_later()
        self._gang.wait_for_peers(watched=False)
        if self._thread not in (None, threading.current_thread()) and not self.telling:
            self._thread.join()

    def stand_by(self) -> None:
        """After `stop`, as the loop was left: until that or `start` is called again, tell where this rank is
        once another has told that it hangs. Not where the loop ends only as the interpreter takes apart a
        program that has failed: it starts no thread any more, and would wait for one for ever."""
        if self._after.seconds == 0 or sys.is_finalizing():
            return
        self._recalled = threading.Event()
        look = min(LONGEST_LOOK_SECONDS, self._after.patience(self._longest) / 10)
        arguments = self._recalled, look
        threading.Thread(target=self._stand_by, args=arguments, name="standing by", daemon=True).start()

    def beat(self, *, step: bool = True) -> None:
        """Something was done: a step, or (`step=False`) a part of one that may be long."""
        with self._lock:
            passed = self._clock.beat()
            if step:
                self._longest = max(self._longest or 0.0, passed)

    def quiet(self) -> tuple[float, float | None]:
        """Seconds since the last beat, and those from which on nothing in this process will end it, for who
        watches from outside: None while nobody watches, as before the loop, after it, and where nobody is to.
        """
        with self._lock:
            gap = math.inf
            limit: float | None = None
            if self._thread is not None and not self._ended.is_set():
                limit = self._after.beyond_help(self._longest)
                gap = 5 * min(LONGEST_LOOK_SECONDS, self._after.patience(self._longest) / 10)
            return (0.0 if self._pauses else self._clock.look(gap)), limit

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what has a deadline of its own and waits for no other rank, such as the copy for a save."""
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._clock.beat()

    def _watch(self, ended: threading.Event) -> None:
        while True:
            with self._lock:
                patience = self._after.patience(self._longest)
                native = self._after.native(self._longest)
            look = min(LONGEST_LOOK_SECONDS, patience / 10)
            faulthandler.dump_traceback_later(native, exit=True)
            if ended.wait(look):
                faulthandler.cancel_dump_traceback_later()  # it may have been set after `stop` did so
                return
            with self._lock:
                if self._pauses:
                    self._clock.beat()
                    continue
                waited = self._clock.look(5 * look)
                patience = self._after.patience(self._longest)
            if waited > patience or (waited > patience / 2 and self._peer_told(look)):
                self._tell(waited, 2 * look + PEERS_SECONDS)
                return

    def _stand_by(self, recalled: threading.Event, look: float) -> None:
        while not recalled.wait(look):
            if self._peer_told(look):
                self._tell(
                    self._clock.look(math.inf), 2 * look + PEERS_SECONDS, ", out of its loop over run.steps"
                )
                return

    def _peer_told(self, seconds: float) -> bool:
        told = self._asked(seconds, lambda: any(exists(path) for path in self._stacks.values()))
        return told is True

    def _asked(self, seconds: float, ask: Callable[[], T]) -> T | None:
        """What the run directory answers; None where it fails, does not in time, or owes another answer."""
        if self._asking is not None and self._asking.is_alive():
            return None
        answers: list[T] = []

        def answer() -> None:
            with suppress(OSError):
                answers.append(ask())

        self._asking = start_thread(answer, "asking")
        if self._asking is None:
            answer()
        else:
            self._asking.join(seconds)
        return answers[0] if answers else None

    def _all_told(self) -> bool:
        return not self._unseen and all(exists(path) for path in self._stacks.values())

    def _tell(self, waited: float, peers_seconds: float, more: str = "") -> None:
        self.telling = True
        faulthandler.dump_traceback_later(TELLING_SECONDS, exit=True)
        mine = f"{standing_of(threading.main_thread())}{more}"
        _print(f"no step for {waited:.0f} s; all stacks of this rank:")
        faulthandler.dump_traceback(all_threads=True)
        compared = self._asked(LOOK_SECONDS + peers_seconds, lambda: self._compared(mine, peers_seconds))
        who, kept = compared or (f"rank {self._rank} stands at {mine}; its run directory does not answer", "")
        self._on_hang(who, waited, mine, kept)

    def _compared(self, mine: str, peers_seconds: float) -> tuple[str, str]:
        """Who holds the gang up, and this rank's stacks where they are to be in the ledger."""
        write_stacks(self._stacks[self._rank], mine)
        deadline = time.monotonic() + peers_seconds
        while not self._all_told() and time.monotonic() < deadline:
            time.sleep(0.05)
        stands = {rank: read_standing(path) for rank, path in self._stacks.items()}
        kept = last_of(self._stacks[self._rank]) if self._rank in telling_most(stands) else ""
        return compare(stands, self._unseen), kept


def standing_of(thread: threading.Thread) -> str:
    """Where a thread stands: `file:line function` of its innermost frame outside libraries, and
    what that one is in, where it is in one."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    if not frames:
        return ""
    own = next((one for one in reversed(frames) if not _of_a_library(one.filename)), None)
    innermost = _place(frames[-1])
    return innermost if own in (None, frames[-1]) else f"{_place(own)} (in {innermost})"


def _place(frame: traceback.FrameSummary | None) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" if frame is not None else ""


def _of_a_library(filename: str) -> bool:
    path = Path(filename)
    if Path(__file__).parent in path.parents:
        return False
    return filename.startswith("<") or any(path.is_relative_to(where) for where in _LIBRARIES)


def write_stacks(path: Path, standing: str) -> None:
    """One JSON line with where the main thread stands, then the stacks of all threads.

    It appears at once and whole; a disk that is full makes it missing, never the end of the rank late.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps({"stands": standing}) + "\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        temporary.rename(path)
    except OSError as error:
        _print(f"the stacks could not be written to {path}: {error}")


def _print(line: str) -> None:
    """Into the log, which may be on a full disk: there is more to be said elsewhere."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def read_standing(path: Path) -> str | None:
    """What a rank wrote of where it stands; None where it wrote nothing."""
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.loads(file.readline())["stands"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_of(path: Path, most: int = TOLD_BYTES) -> str:
    """The last whole lines of a rank's stacks, at most so many bytes; the main thread's come last. Empty
    where there are none."""
    try:
        with open(path, "rb") as file:
            file.readline()
            text = file.read()
    except OSError:
        return ""
    if len(text) > most:
        text = text[-most:].partition(b"\n")[2]
    return text.decode(errors="replace").strip()


def telling_most(stands: Mapping[int, str | None], most: int = TOLD_RANKS) -> list[int]:
    """The ranks whose stacks tell most, of those that have any: first those that stand where few do."""
    places = Counter(where for where in stands.values() if where is not None)
    told = [(places[where], rank) for rank, where in stands.items() if where is not None]
    return [rank for _, rank in sorted(told)[:most]]


def compare(stands: Mapping[int, str | None], unseen: Sequence[int] = ()) -> str:
    """Who holds the gang up, in a sentence. `stands` is where each rank's main thread is; None: silent.

    Of those `unseen` nothing can be told: what they wrote is on other machines.
    """
    if unseen:
        said = _compare(stands, "every rank of this replica")
        return f"{said}; not seen from here: {_ranks(unseen)}"
    return _compare(stands, "every rank")


def _compare(stands: Mapping[int, str | None], everybody: str) -> str:
    silent = [rank for rank, where in stands.items() if where is None]
    if silent:
        verb = "says" if len(silent) == 1 else "say"
        return f"{_ranks(silent)} {verb} nothing: stopped, gone, or stuck outside Python"
    places = Counter(where for where in stands.values())
    (common, many), *others = places.most_common()
    if not others:
        return f"{everybody} stands at {common}"
    told = [f"{_ranks(_at(stands, where))} at {where}" for where, _ in others]
    if many == others[0][1]:  # nobody is alone against the rest
        first = _at(stands, common)
        return f"{_ranks(first)} stand{'s' if many == 1 else ''} at {common}, {', '.join(told)}"
    return f"{', '.join(told)}; the others wait at {common}"


def _at(stands: Mapping[int, str | None], where: str | None) -> list[int]:
    return [rank for rank, place in stands.items() if place == where]


def _ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2`; of many the first few."""
    shown = ", ".join(str(number) for number in numbers[:8])
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"
