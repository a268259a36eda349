"""Kubernetes quantities as exact numbers, for comparing one with another."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIXES = {
    **{name: Fraction(1000) ** power for power, name in enumerate(("n", "u", "m", "", *"kMGTPE"), -3)},
    **{f"{name}i": Fraction(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(?:([eE][+-]?\d{1,2})|([A-Za-z]*))")


def quantity(text: str) -> Fraction:
    """`500m` is 1/2, `1Gi` is 2**30, `1e3` is 1000. Raises ValueError, naming the text."""
    found = _QUANTITY.fullmatch(text)
    if not found or (found[3] or "") not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity such as 8, 500m or 64Gi")
    return Fraction(found[1] + (found[2] or "")) * _SUFFIXES[found[3] or ""]
