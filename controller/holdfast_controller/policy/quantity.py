"""Kubernetes quantities as exact numbers, for comparing one with another."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIXES = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{name: Fraction(1000**power) for power, name in enumerate(("k", "M", "G", "T"), 1)},
    **{name: Fraction(1024**power) for power, name in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")


def quantity(text: str) -> Fraction:
    """`500m` is 1/2, `1Gi` is 2**30. Raises ValueError, naming the text."""
    found = _QUANTITY.fullmatch(text)
    if not found or found[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity such as 8, 500m or 64Gi")
    return Fraction(found[1]) * _SUFFIXES[found[2]]
