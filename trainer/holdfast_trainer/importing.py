"""Imports of large libraries without looking for garbage among what they leave.

Python's collector runs hundreds of times while PyTorch is imported, and looks at ever more of what will never
be garbage: a quarter of the CPU time that the import takes. Later each full pass would look at all of
it again, a fifth of a second every time, be it in the middle of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing is collected within; what is there at the end is not looked at later, here or in a fork."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
