"""What Linux shows of the processor."""

from __future__ import annotations

from pathlib import Path


def read() -> str:
    """The text of /proc/cpuinfo; empty where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def first(cpuinfo: str) -> dict[str, str]:
    """What such a text says of the first processor, by name."""
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts


def name(facts: dict[str, str]) -> str:
    """The model's, or on Arm, which shows none, its maker's numbers; empty where neither is said."""
    return facts.get("model name") or " ".join(
        facts[number] for number in ("CPU implementer", "CPU part") if number in facts
    )
