"""The gang of a rank that is alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Alone:
    rank: int = 0
    world_size: int = 1

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]
