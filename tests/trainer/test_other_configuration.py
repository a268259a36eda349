"""What is told of a checkpoint that was written under another configuration."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_trainer.checkpoint.configuration import other_configuration
from holdfast_trainer.checkpoint.manifest import Manifest


@pytest.mark.parametrize(
    ("then", "now", "before", "after", "told"),
    [
        ("a" * 64, "a" * 64, {"seed": 1}, {"seed": 1}, ""),
        ("", "b" * 64, {}, {"seed": 1}, ""),
        ("a" * 64, "", {"seed": 1}, {}, ""),
        ("a" * 64, "b" * 64, {"seed": 1, "steps": 9}, {"seed": 2, "steps": 9}, "seed: 1 -> 2"),
        (
            "a" * 64,
            "b" * 64,
            dict.fromkeys("abcdef", 1),
            dict.fromkeys("abcdefg", 2),
            "a: 1 -> 2; b: 1 -> 2; c: 1 -> 2; d: 1 -> 2; 3 more",
        ),
        ("a" * 64, "b" * 64, {}, {"seed": 2}, "aaaaaaaaaaaa, this is bbbbbbbbbbbb"),
        ("a" * 64 + "-1234", "a" * 64 + "-1334", {}, {}, "aaaa-1234, this is aaaa-1334"),
        ("a" * 64, "a" * 64 + "-1334", {}, {}, "aaaaaa, this is aaaaaa-1334"),
    ],
)
def test_how_a_configuration_differs(
    then: str, now: str, before: dict[str, Any], after: dict[str, Any], told: str
) -> None:
    """Where the data alone was another, both were told by the same digest."""
    environment = {"configuration": before} if before else {}
    manifest = Manifest(6, 1, 1, then, {}, 0.0, environment)
    assert other_configuration(manifest, now, after) == told
