"""A gang whose ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class ThreadRank:
    """One rank of it."""

    rank: int
    world_size: int
    barrier: Barrier
    box: list[Any]

    def gather(self, value: Any) -> list[Any]:
        self.box[self.rank] = value
        self.barrier.wait(300)
        values = list(self.box)
        self.barrier.wait(300)
        return values

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def in_gang(world_size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """What `work` returned to each rank."""
    barrier, box = Barrier(world_size), [None] * world_size
    with ThreadPoolExecutor(world_size) as pool:
        jobs = [pool.submit(work, ThreadRank(rank, world_size, barrier, box)) for rank in range(world_size)]
        return [job.result(300) for job in jobs]
