"""Values as people read them in a terminal. What is not known is a dash, never a zero."""

from __future__ import annotations

from datetime import UTC, datetime

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """Two units at most: 0.4s, 42s, 3m12s, 2h5m, 3d4h."""
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    whole = round(seconds)
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // lower_size
            return f"{whole // size}{unit}{rest}{lower}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"


def age(since: datetime | None, now: datetime | None = None) -> str:
    """How long ago, to the second."""
    if since is None:
        return UNKNOWN
    seconds = ((now or datetime.now(UTC)) - since).total_seconds()
    return duration(max(0, round(seconds))) if seconds >= 10 else f"{max(0, int(seconds))}s"


def count(value: float | None) -> str:
    """12,345; below ten one digit more, and of one that would be none so, two that are significant."""
    if value is None:
        return UNKNOWN
    if 0 < value < 0.05:
        return f"{value:.2g}"
    return f"{value:,.1f}" if value != int(value) and abs(value) < 10 else f"{value:,.0f}"


def figure(value: float | None) -> str:
    """Four places, for losses; of one that is too small for these, or large, four that are significant."""
    if value is None:
        return UNKNOWN
    return f"{value:.4f}" if not value or 0.001 <= abs(value) < 1000 else f"{value:.4g}"


def percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f}%"


def integer(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def steps(done: int | None, total: int | None) -> str:
    if done is None:
        return UNKNOWN
    return f"{done}/{total}" if total is not None else str(done)


def moment(value: datetime | None) -> str:
    """Local time, to the second."""
    return UNKNOWN if value is None else value.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def money(value: float | None, currency: str | None) -> str:
    """`12.34 USD`; below one, three significant places."""
    if value is None or currency is None:
        return UNKNOWN
    return f"{value:,.2f} {currency}" if value >= 1 else f"{value:.3g} {currency}"
