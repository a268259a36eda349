"""What is kept of an object in memory: thousands lie there, and most of each is of no use to us."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .connection import Document
from .deep_json import DEEPEST

Keep = Callable[[Document], Document]
"""What of an object is of use; it may change what it is given."""


def slim(document: Document, keep: Keep | None = None) -> Document:
    """A copy without what nobody reads, nor what lies too deep, in which equal keys are one string.

    The parser makes keys anew for every object: they would be a third of it.
    """
    kept = document if keep is None else keep(document)
    kept["metadata"].pop("managedFields", None)  # half of most objects
    copy: Document = _interned(kept)
    return copy


def _interned(value: Any, levels: int = DEEPEST) -> Any:
    if not levels and isinstance(value, dict | list):
        return None
    if isinstance(value, dict):
        return {sys.intern(key): _interned(item, levels - 1) for key, item in value.items()}
    return [_interned(item, levels - 1) for item in value] if isinstance(value, list) else value
