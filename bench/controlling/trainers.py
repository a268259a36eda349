"""Rank 0 of the first jobs: the trainer's own endpoint at addresses of this machine, and what it would say.

Only training itself is played: a step is done when `step_done` is called. Fake pods get these addresses, so
the controller asks here as it asks pods.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from bench.report import ReportError
from prometheus_client import CollectorRegistry

from holdfast_trainer.contract import DEFAULT_PORT, Progress
from holdfast_trainer.endpoint import Endpoint

ADDRESS = "bench.holdfast.dev/address"
"""Annotation of a pod: where its trainer answers."""
MOST = 250
STEPS = 1_000_000


def address_of(number: int) -> str:
    """Where the trainer of job `number` answers; MOST have one."""
    return f"127.88.0.{number + 1}"


class Trainers:
    """All are at the same step of their first attempt."""

    def __init__(self) -> None:
        self.step_done(0)

    def step_done(self, step: int) -> None:
        self.step, self.when = step, time.time()

    def progress(self) -> Progress:
        return Progress(
            1, self.step, STEPS, 0, "training",
            world_size=1, resumed_step=0, first_step=1, first_step_time=1767225601.0, checkpoints=0,
            useful_seconds=0.5 * self.step, durable_seconds=0.0, updated=self.when,
        )  # fmt: skip


@contextmanager
def trainers(count: int) -> Iterator[Trainers]:
    """They answer within the block. Raises ReportError where the port that pods are asked at is taken."""
    there, open_ones = Trainers(), []
    try:
        for number in range(count):
            address = address_of(number)
            endpoint = Endpoint(address, DEFAULT_PORT, CollectorRegistry, there.progress)
            open_ones.append(endpoint)
            if endpoint.address != f"{address}:{DEFAULT_PORT}":
                raise ReportError(f"{address}:{DEFAULT_PORT}, where a pod would be asked, is taken; free it")
        yield there
    finally:
        with ThreadPoolExecutor(max(1, len(open_ones))) as closers:  # each takes half a second to notice
            for closing in [closers.submit(endpoint.close) for endpoint in open_ones]:
                closing.result()
