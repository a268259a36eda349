"""What `kubectl get tj` shows of a status and cannot work out by itself: a column prints a value as it is.

The store on Kubernetes writes these beside the status and drops them when it reads one; nothing decides
by them. A column whose value is not known is left out, and kubectl then shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from .jobs import Phase, Status

KEY = "columns"
DESCRIPTIONS: Mapping[str, str] = {
    "engine": "What runs the attempts.",
    "goodput": "status.goodput in percent, as of the status's last write.",
    "eta": "Time that the steps which are left take at the present speed; while the job trains.",
}

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def columns(status: Status, engine: str) -> dict[str, str]:
    """The values of `status.columns`, by the names of `DESCRIPTIONS`."""
    found = {"engine": engine}
    if status.goodput is not None:
        found["goodput"] = f"{100 * status.goodput:.1f}%"
    progress = status.progress
    if progress is not None and progress.eta_seconds is not None and status.phase is Phase.RUNNING:
        found["eta"] = duration(progress.eta_seconds)
    return found


def duration(seconds: float) -> str:
    """Two units at most, as kubectl writes ages: 42s, 3m12s, 2h5m, 3d4h."""
    whole = max(0, round(seconds))
    for (unit, size), (lower, lower_size) in pairwise(_UNITS):
        if whole >= size:
            rest = whole % size // lower_size
            return f"{whole // size}{unit}{rest}{lower}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"
