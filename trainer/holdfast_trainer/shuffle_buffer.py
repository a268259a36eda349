"""Whether a dataset of the library `datasets` has a shuffle buffer: what is in that is in no state of it.

Its examples would be lost with an interruption, without a word of the library's, so such a one is refused.
"""

from __future__ import annotations

SHUFFLE_BUFFER = (
    "the dataset has a shuffle buffer, and an interruption would lose what is in it: shuffle before it is "
    "streamed (Dataset.shuffle, then to_iterable_dataset), or prepare it"
)


def has_shuffle_buffer(dataset: object) -> bool:
    """However deep below other steps."""
    waiting: list[object] = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        waiting += [inner for name in ("ex_iterable", "ex_iterables") for inner in _parts(part, name)]
    return False


def _parts(of: object, name: str) -> list[object]:
    found = getattr(of, name, None)
    return found if isinstance(found, list) else [found] if found is not None else []
