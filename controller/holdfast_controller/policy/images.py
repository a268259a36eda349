"""Which images a job may run: an allow-list of patterns on full image names.

`team/x` and `docker.io/team/x` are one image, so both sides are written out before they are compared, by
the rules of the container runtimes (distribution/reference): what they would pull is what is judged. A
pattern's `*` stands for anything, slashes too, but in the registry's name for no slash: `*.example.org/x`
must not cover `elsewhere.net/a.example.org/x`. Everything else stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .wildcards import wild

# Lower-case path components, then :tag and @digest, as the distribution specification has them.
_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
    r"(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@[a-z0-9]+:[0-9a-f]{32,})?"
)
_HUB = "docker.io"


def full_name(reference: str) -> str:
    """With its registry, as a container runtime reads it: `python:3` is `docker.io/library/python:3`."""
    first, slash, rest = reference.partition("/")
    # Capitals name a registry too: no repository of the hub has any.
    if not slash or not (set(".:") & set(first) or first == "localhost" or first != first.lower()):
        registry, rest = _HUB, reference
    else:
        registry = _HUB if first == f"index.{_HUB}" else first
    return f"{registry}/{rest}" if registry != _HUB or "/" in rest else f"{_HUB}/library/{rest}"


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
    registry, _, rest = full_name(pattern).partition("/")
    return re.compile(f"{wild(registry, '[^/]*')}/{wild(rest, '.*')}")
