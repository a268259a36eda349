"""The page of faults is what the results say, and nothing else."""

from __future__ import annotations

from scripts.faults import page

ROW = {
    "fault": "eviction",
    "verdict": "Disrupted",
    "reason": "replica 1: EvictionByEvictionAPI: by | the API",
    "budget": "disruptions",
    "notice": True,
    "lost_steps": 0,
    "recovery_seconds": 6.32,
    "resume": "exact",
}


def test_a_row_a_fault_with_what_was_seen() -> None:
    text = page({"every": 20, "rows": [ROW, {**ROW, "fault": "etcd restarted", "recovery_seconds": None}]})
    first, second = text.splitlines()[-2:]
    assert first == (
        "| eviction | Disrupted | disruptions | 0 | exact | 6 | "
        "replica 1: EvictionByEvictionAPI: by \\| the API |"
    )
    assert "| exact |  |" in second, "what was not measured is not shown as zero"
    assert "a save is made every 20 steps" in text
