"""Bytes as people read them: of a checkpoint of kilobytes as well as of one of gigabytes."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Three significant digits, in decimal units as disks are sold."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError
