"""Patterns of an operator, in which `*` stands for anything and all else for itself."""

from __future__ import annotations

import re


def wild(text: str, anything: str) -> str:
    """A regular expression; `anything` is what a `*` stands for in it."""
    return anything.join(re.escape(part) for part in text.split("*"))
