"""Where a `TokenStream` has its documents from: text files, or a `datasets.IterableDataset`.

A source deals its documents to the ranks in units of about one MiB, and knows a place for the beginning of
each, from which it can go on without the ones before. Of files that is a unit's number. A dataset says it
itself (`state_dict`, datasets 2.20 and later): the shard and how many of its examples were passed, so that at
most one shard is gone through again, of an Arrow file nothing. Its ranks read shards of their own where there
are so many that they can be dealt out evenly, and else every n-th example.

What a dataset keeps in a shuffle buffer is in no such state: those examples would be lost, so it is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from .prepare.corpus import PIECE_BYTES, Document, Request, units
from .prepare.listing import corpus_digest, list_files
from .prepare.reading import Reader, clean
from .shuffle_buffer import SHUFFLE_BUFFER, has_shuffle_buffer
from .token_index import DataError

NOWHERE = Path(os.devnull)
"""Nothing is written, so no directory among the sources is left out for it."""

Place = dict[str, Any]
"""Plain values, for a checkpoint; `epoch` is always among them."""
Named = tuple[str, Document]
"""A document, and the name of what it was found in."""


class Source(Protocol):
    """The documents of one rank, over and over the same in each epoch."""

    identity: str
    """A digest that tells other sources apart."""
    told: str
    """For people."""
    served: int
    """How many ranks, from the first one on, have a unit at all, as far as that is known beforehand."""

    def beginning(self, epoch: int) -> Place: ...

    def units(self, place: Place) -> Iterator[tuple[Place, Iterable[Named]]]:
        """The rest of an epoch; each unit with its place. Raises DataError."""
        ...


class ResumableDataset(Protocol):
    """What is needed of a `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class TextFiles:
    """The units of `prepare`: rank r of w reads units r, r + w, and so on. Raises PrepareError."""

    def __init__(
        self, paths: Sequence[Path], patterns: Sequence[str], text_field: str, rank: int, world_size: int
    ):
        request = Request(tuple(paths), NOWHERE, patterns=tuple(patterns), text_field=text_field)
        self._files = list_files(request, digests=False)
        self._reader = Reader(text_field)
        self._rank, self._world_size = rank, world_size
        self.identity = corpus_digest(self._files)
        self.told = f"{len(self._files)} files"
        self.served = sum(1 for _ in islice(units(self._files), world_size))

    def beginning(self, epoch: int) -> Place:
        return {"epoch": epoch, "unit": 0}

    def units(self, place: Place) -> Iterator[tuple[Place, Iterable[Named]]]:
        own = islice(units(self._files), self._rank, None, self._world_size)
        for number, unit in islice(enumerate(own), place["unit"], None):
            documents = ((piece.file.name, one) for piece in unit for one in self._reader.documents(piece))
            yield {**place, "unit": number}, documents


class StreamedDataset:
    """An iterable dataset, as it was given: split over the ranks here. Raises DataError."""

    def __init__(self, dataset: ResumableDataset, text_field: str, rank: int, world_size: int):
        _check(dataset)
        try:
            from datasets.distributed import split_dataset_by_node  # optional, and slow to import
        except ImportError as error:
            raise DataError(
                f"a dataset is shared out and resumed by the library datasets, 2.20 or later ({error}): "
                "pip install 'holdfast[datasets]'"
            ) from error
        # A dataset that has a state goes on there in each epoch, so every reading gets one of its own.
        self._part: Callable[[], Any] = partial(split_dataset_by_node, dataset, rank, world_size)
        self._field, self.served = text_field, world_size
        first = next(iter(split_dataset_by_node(dataset, 0, 1)), None)
        if first is None:
            raise DataError("the dataset of TokenStream is empty")
        columns, shards = sorted(first), getattr(dataset, "num_shards", None)
        self.told = f"a dataset of {shards} shards with {', '.join(columns)}"
        facts = f"{shards}\0{columns}\0{getattr(dataset, 'split', None)}\0{self._document(first).text}"
        self.identity = hashlib.sha256(facts.encode()).hexdigest()

    def beginning(self, epoch: int) -> Place:
        return {"epoch": epoch, "dataset": None}

    def units(self, place: Place) -> Iterator[tuple[Place, Iterable[Named]]]:
        own = self._part()
        if place["dataset"] is not None:
            own.load_state_dict(place["dataset"])
        gathered: list[Named] = []
        size = 0
        for example in own:
            gathered.append((self.told, self._document(example)))
            size += len(gathered[-1][1].text)
            if size >= PIECE_BYTES:
                after = {**place, "dataset": own.state_dict()}
                yield place, gathered
                place, gathered, size = after, [], 0
        if gathered:
            yield place, gathered

    def _document(self, example: Mapping[str, Any]) -> Document:
        text = example.get(self._field)
        if text is not None and not isinstance(text, str):
            raise DataError(f"column {self._field!r} of the dataset holds {type(text).__name__}, not text")
        if self._field not in example:
            known = ", ".join(map(repr, sorted(example)))
            raise DataError(
                f"the dataset has no column {self._field!r}, it has {known}; name the text's with text_field"
            )
        return clean(text)


def _check(dataset: Any) -> None:
    """Raises DataError for what has no position, or one that leaves examples out."""
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise DataError(f"TokenStream reads one split, not {', '.join(dataset)}: take {kind}[NAME]")
    if not hasattr(dataset, "load_state_dict"):
        raise DataError(
            f"TokenStream cannot resume a {kind}, which has no load_state_dict: give it paths, or a "
            "datasets.IterableDataset (load_dataset(..., streaming=True), a Dataset's to_iterable_dataset())"
        )
    if has_shuffle_buffer(dataset):
        raise DataError(SHUFFLE_BUFFER)
