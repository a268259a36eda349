"""Units of text to tokens, in parallel processes, in order, with bounded memory.

Workers are spawned, not forked: the tokenizer's library has threads of its own. A worker leaves when
its parent dies, however that happens. At most a few units a worker are under way or waiting to be
written.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from ..token_index import Split
from .corpus import Document, PrepareError, Unit, split_of
from .encoder import Engine, Tokens, load
from .reading import Reader
from .tokenizer import end_of_text, read_tokenizer

UNITS_AHEAD = 3
"""Units a worker has under way: one in work, one waiting, one being written."""


@dataclass(frozen=True)
class EncoderSettings:
    """All that a worker needs to know."""

    tokenizer: Path
    dtype: str
    seed: int
    validation_fraction: float
    text_field: str
    engine: Engine


@dataclass
class EncodedUnit:
    """Tokens of a unit as bytes in the shards' type, for each split, and what was met on the way."""

    tokens: dict[Split, bytes]
    documents: dict[Split, int] = field(default_factory=dict)
    text_bytes: int = 0
    empty: int = 0
    replaced: list[str] = field(default_factory=list)
    """Names of files that hold bytes which are no UTF-8."""


class UnitEncoder:
    """A loaded tokenizer, applied to units."""

    def __init__(self, settings: EncoderSettings):
        self.settings = settings
        tokenizer = read_tokenizer(settings.tokenizer)
        self.encoder = load(settings.engine, tokenizer)
        self.end = end_of_text(tokenizer, settings.tokenizer)
        self.reader = Reader(settings.text_field)

    def encode(self, unit: Unit) -> EncodedUnit:
        """Read and encode one unit."""
        return self.encode_documents(
            (piece.file.name, document) for piece in unit for document in self.reader.documents(piece)
        )

    def encode_documents(self, documents: Iterable[tuple[str, Document]]) -> EncodedUnit:
        """Documents with the names of what they are in; each is closed by the end-of-text token."""
        settings = self.settings
        result = EncodedUnit(tokens={})
        texts: list[str] = []
        splits: list[Split] = []
        for name, document in documents:
            if document.replaced:
                result.replaced.append(name)
            if not document.text:
                result.empty += 1
                continue
            encoded = document.text.encode("utf-8")
            texts.append(document.text)
            splits.append(split_of(encoded, settings.seed, settings.validation_fraction))
            result.text_bytes += len(encoded)
        gathered: dict[Split, list[Tokens]] = {}
        for tokens, split in zip(self.encoder.encode(texts), splits, strict=True):
            gathered.setdefault(split, []).append(tokens)
        result.documents = {split: len(found) for split, found in gathered.items()}
        result.tokens = {split: self._joined(found) for split, found in gathered.items()}
        return result

    def _joined(self, documents: list[Tokens]) -> bytes:
        """The tokens of documents one after the other, each with the end of text."""
        length = sum(map(len, documents)) + len(documents)
        joined = np.full(length, self.end, dtype=np.dtype(self.settings.dtype).newbyteorder("<"))
        place = 0
        for tokens in documents:
            joined[place : place + len(tokens)] = tokens
            place += len(tokens) + 1
        return joined.tobytes()


def encode_units(units: Iterable[Unit], settings: EncoderSettings, workers: int) -> Iterator[EncodedUnit]:
    """Results in the order of the units, whatever the number of workers. Raises PrepareError."""
    if workers == 1:
        encoder = UnitEncoder(settings)
        yield from map(encoder.encode, units)
        return
    remaining = iter(units)
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(settings,),
    )
    try:
        pending: deque[Future[EncodedUnit]] = deque()
        for unit in islice(remaining, workers * UNITS_AHEAD):
            pending.append(_submit(pool, unit))
        while pending:
            result = pending.popleft().result()
            for unit in islice(remaining, 1):
                pending.append(_submit(pool, unit))
            yield result
    except BrokenProcessPool as error:
        raise PrepareError(
            "a worker process died, perhaps for want of memory; run the same command again with fewer "
            "--workers: it continues where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, unit: Unit) -> Future[EncodedUnit]:
    """This may start a worker, and that ignores Ctrl-C only in `_start_worker`: it is born deaf to it.

    What comes for this process meanwhile is heard afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, unit)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: UnitEncoder | None = None
"""The encoder of this process, where it is a worker."""


def _start_worker(settings: EncoderSettings) -> None:
    global _worker
    # Ctrl-C reaches the whole process group; the parent alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # One process a core: the library's own threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = UnitEncoder(settings)


def _leave_with_parent() -> None:
    # A killed parent closes nothing that its workers wait for: they hold each other's pipes open.
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(unit: Unit) -> EncodedUnit:
    if _worker is None:
        raise RuntimeError("the worker was not started")
    return _worker.encode(unit)
