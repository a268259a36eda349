"""Units of text to tokens, in parallel processes, in order, with bounded memory.

Workers are spawned, not forked: the tokenizer's library has threads of its own. Each has a pipe of its own
to a thread of this process, which hears there, and nowhere else, that the worker has died: a pool whose
workers share queues and locks may wait for ever for one of them (`concurrent.futures` did, when it died
while others started). A worker leaves when its parent dies, however that happens. At most a few units a
worker are under way or waiting to be written.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

from .corpus import PrepareError, Unit
from .encode import EncodedUnit, EncoderSettings, UnitEncoder

UNITS_AHEAD = 3
"""Units a worker has under way: one in work, one waiting, one being written."""


def encode_units(units: Iterable[Unit], settings: EncoderSettings, workers: int) -> Iterator[EncodedUnit]:
    """Results in the order of the units, whatever the number of workers. Raises PrepareError."""
    if workers == 1:
        encoder = UnitEncoder(settings)
        yield from map(encoder.encode, units)
        return
    remaining = iter(units)
    crew = _Crew(settings, workers)
    try:
        pending = deque(crew.submit(unit) for unit in islice(remaining, workers * UNITS_AHEAD))
        while pending:
            result = pending.popleft().result()
            pending.extend(crew.submit(unit) for unit in islice(remaining, 1))
            yield result
    finally:
        crew.end()


class _Crew:
    """Workers, each started by the thread that it works for."""

    def __init__(self, settings: EncoderSettings, workers: int):
        self._settings = settings
        self._threads = ThreadPoolExecutor(workers, initializer=_ignore_interrupts)
        self._own = threading.local()
        self._lock = threading.Lock()
        self._started: list[_Worker] = []
        self._ended = False

    def submit(self, unit: Unit) -> Future[EncodedUnit]:
        return self._threads.submit(self._encode, unit)

    def _encode(self, unit: Unit) -> EncodedUnit:
        if not hasattr(self._own, "worker"):
            with self._lock:
                if self._ended:
                    raise RuntimeError("no worker is started any more")
                self._own.worker = _Worker(self._settings)
                self._started.append(self._own.worker)
        worker: _Worker = self._own.worker
        return worker.encode(unit)

    def end(self) -> None:
        """Now, whatever is under way: it is not asked for any more."""
        with self._lock:
            self._ended = True
            for worker in self._started:
                worker.end()
        self._threads.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """A process that this thread starts is born deaf to Ctrl-C: only from `_work` on it ignores it by itself.

    Where the main thread started it, Ctrl-C might come between: it is heard there whichever thread is told.
    Starting the tracker, as a first process does, would end the deafness of the thread that does so.
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


class _Worker:
    """A process that encodes units, one at a time."""

    def __init__(self, settings: EncoderSettings):
        context = multiprocessing.get_context("spawn")
        self._connection, its_end = context.Pipe()
        self._process = context.Process(target=_work, args=(its_end, settings), daemon=True)
        self._process.start()
        its_end.close()

    def encode(self, unit: Unit) -> EncodedUnit:
        """Raises PrepareError when the process dies, and what was raised there."""
        try:
            self._connection.send(unit)
            outcome: EncodedUnit | Exception = self._connection.recv()
        except (EOFError, OSError) as error:
            raise PrepareError(
                "a worker process died, perhaps for want of memory; run the same command again with fewer "
                "--workers: it continues where it stopped"
            ) from error
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def end(self) -> None:
        """It keeps nothing that would be lost."""
        self._process.kill()
        self._process.join()


def _work(connection: Connection, settings: EncoderSettings) -> None:
    # Ctrl-C reaches the whole process group; the parent alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # One process a core: the library's own threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder: UnitEncoder | None = None
    while True:
        unit = connection.recv()
        outcome: EncodedUnit | Exception
        try:
            encoder = encoder or UnitEncoder(settings)
            outcome = encoder.encode(unit)
        except Exception as error:  # the parent raises it
            error.add_note("in a worker process:\n" + traceback.format_exc())
            outcome = error
        connection.send(outcome)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
