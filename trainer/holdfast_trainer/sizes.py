"""Figures as people read them: bytes of a checkpoint of kilobytes as of one of gigabytes, losses, shares."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Three significant digits, in decimal units as disks are sold."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def loss_text(loss: float) -> str:
    """Four places; of one that is too small for these, or large, four that are significant."""
    return f"{loss:.4f}" if not loss or 0.001 <= abs(loss) < 1000 else f"{loss:.4g}"


def share_text(share: float) -> str:
    """In percent; of one that would be none so, one place that is significant."""
    return f"{100 * share:.1g}%" if 0 < share <= 0.005 else f"{share:.0%}"


def rate_text(rate: float) -> str:
    """A place behind the point; of one that would be none so, two that are significant."""
    return f"{rate:.2g}" if 0 < rate < 0.05 else f"{rate:,.1f}"
