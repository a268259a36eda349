"""Imports of large libraries: without looking for garbage among what they leave, and where one is missing.

Python's collector runs hundreds of times while PyTorch is imported, and looks at ever more of what will never
be garbage: a quarter of the CPU time that the import takes. Later each full pass would look at all of
it again, a fifth of a second every time, be it in the middle of a step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector(*, at_start: bool = True) -> Iterator[None]:
    """Nothing is collected within. `at_start` of a process what is there at the end is not looked at later
    either, here or in a fork; amid a program some of it may be garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        if at_start:
            gc.freeze()
    finally:
        if collects:
            gc.enable()


def not_installed(error: ModuleNotFoundError) -> str:
    """What is missing, from which Python, and what installs it. Raises `error` again where it is a part of
    Holdfast itself."""
    package = (error.name or "").partition(".")[0]
    if package.startswith("holdfast_"):
        raise error
    return (
        f"the trainer needs {package}, which is not installed for {sys.executable}: "
        "pip install 'holdfast[trainer]'"
    )
