"""Imports of large libraries without looking for garbage among what they leave.

Python's collector runs hundreds of times while PyTorch is imported, and looks at ever more of what will never
be garbage: a quarter of the CPU time that the import takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing is collected within."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
