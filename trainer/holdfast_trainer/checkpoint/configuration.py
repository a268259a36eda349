"""Whether a checkpoint was written under this configuration, and in which of its keys it was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .manifest import Manifest

CONFIGURATION = "configuration"
"""In a manifest's `environment`: what `config_hash` is of, by dotted key, where the loop has told."""
NAMED = 4


def other_configuration(manifest: Manifest, config_hash: str, now: Mapping[str, Any]) -> str:
    """How the one of a checkpoint differs, in words: the keys where both sides are known, else the hashes.
    Empty where it is the same, or one of the two has none. Pure."""
    then = manifest.config_hash
    if not then or not config_hash or then == config_hash:
        return ""
    before = manifest.environment.get(CONFIGURATION, {})
    told = [
        f"{key}: {before.get(key, '-')} -> {value}"
        for key, value in now.items()
        if before and before.get(key, "-") != value
    ]
    if told:
        more = [f"{len(told) - NAMED} more"] if len(told) > NAMED else []
        return "; ".join([*told[:NAMED], *more])
    apart = (at for at, (one, other) in enumerate(zip(then, config_hash, strict=False)) if one != other)
    same = next(apart, min(len(then), len(config_hash)))
    start = same - 6 if same >= 12 else 0
    return f"{then[start : start + 12]}, this is {config_hash[start : start + 12]}"
