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
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

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
    started: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def encode(unit: Unit) -> EncodedUnit:
        worker = idle.get()  # there is one for each thread
        try:
            return worker.encode(unit)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(workers) as threads:
        pending: deque[Future[EncodedUnit]] = deque()
        try:
            for _ in range(workers):
                started.append(_Worker(settings))
                idle.put(started[-1])
            for unit in islice(remaining, workers * UNITS_AHEAD):
                pending.append(threads.submit(encode, unit))
            while pending:
                result = pending.popleft().result()
                for unit in islice(remaining, 1):
                    pending.append(threads.submit(encode, unit))
                yield result
        finally:
            for future in pending:
                future.cancel()
            for worker in started:
                worker.end()  # which is what threads wait for that still have a unit


class _Worker:
    """A process that encodes units, one at a time."""

    def __init__(self, settings: EncoderSettings):
        context = multiprocessing.get_context("spawn")
        self._connection, its_end = context.Pipe()
        self._process = context.Process(target=_work, args=(its_end, settings), daemon=True)
        # It ignores Ctrl-C from `_work` on alone: it is born deaf to it. What comes for this process
        # meanwhile is heard afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
