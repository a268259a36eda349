"""Which images a job may run: an allow-list of patterns on full image names.

`team/x` and `docker.io/team/x` are one image, so both sides are written out before they are compared.
A pattern's `*` stands for anything, slashes too; everything else stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Lower-case path components, then :tag and @digest, as the distribution specification has them.
_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
    r"(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*(?::[\w][\w.-]{0,127})?(?:@[a-z0-9]+:[0-9a-f]{32,})?"
)


def full_name(reference: str) -> str:
    """With its registry, as a container runtime reads it: `python:3` is `docker.io/library/python:3`."""
    first, slash, _ = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return reference
    return f"docker.io/{reference}" if slash else f"docker.io/library/{reference}"


def is_reference(text: str) -> bool:
    """Whether it is written as an image's name at all."""
    return _REFERENCE.fullmatch(text) is not None


def allowed(reference: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern covers the image; an empty list covers all."""
    if not patterns:
        return True
    name = full_name(reference)
    return any(_pattern(pattern).fullmatch(name) for pattern in patterns)


def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in full_name(pattern).split("*")))
