"""Submit jobs by REST and watch what becomes of them.

One clock for both: this process sends the requests and hears the apiserver's watches, where it can of
metadata alone, so that listening costs little. A TrainingJob is there when its watch tells of it, and so is
its PyTorchJob.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from bench.controlling.api import Api, side_by_side
from bench.controlling.jobs import key_of, submission
from bench.controlling.world import Controller
from bench.report import ReportError

from holdfast_controller.kube.pieces import PODS
from holdfast_controller.kube.resource import JOBS
from holdfast_controller.pod_template import JOB_LABEL
from holdfast_controller.pytorchjobs import PYTORCH_JOB

CLIENTS = 16
LONGEST_SECONDS = 900.0


@dataclass
class Sightings:
    """When each object was first seen, by `namespace/job`; of pods how many run."""

    jobs: dict[str, float] = field(default_factory=dict)
    pytorch_jobs: dict[str, float] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    last_running: float = 0.0
    """When the newest of them was first seen to run."""
    last_pod: float = 0.0
    """When the newest was first seen."""
    last_change: float = 0.0
    """When a TrainingJob was last written, its status too."""
    steps: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By job, what its status said of its step, and when; where `follow_steps` runs."""

    async def follow(self, server: Api) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._jobs(server))
            group.create_task(self._pytorch_jobs(server))
            group.create_task(self._pods(server))

    async def _jobs(self, server: Api) -> None:
        async for event in server.watch(JOBS, metadata_only=True):
            meta, self.last_change = event["object"]["metadata"], time.perf_counter()
            self.jobs.setdefault(f"{meta['namespace']}/{meta['name']}", self.last_change)

    async def _pytorch_jobs(self, server: Api) -> None:
        async for event in server.watch(PYTORCH_JOB.resource.path, metadata_only=True):
            meta = event["object"]["metadata"]
            key = f"{meta['namespace']}/{meta['labels'][JOB_LABEL]}"
            self.pytorch_jobs.setdefault(key, time.perf_counter())

    async def _pods(self, server: Api) -> None:
        async for event in server.watch(PODS):
            meta = event["object"]["metadata"]
            key = f"{meta['namespace']}/{meta['name']}"
            if event["type"] == "ADDED":
                self.last_pod = time.perf_counter()
            if event["object"]["status"].get("phase") == "Running" and key not in self.running:
                self.running.add(key)
                self.last_running = time.perf_counter()

    async def follow_steps(self, server: Api) -> None:
        async for event in server.watch(JOBS):
            meta, status = event["object"]["metadata"], event["object"].get("status") or {}
            step = (status.get("progress") or {}).get("step")
            if step is not None:
                key = f"{meta['namespace']}/{meta['name']}"
                self.steps.setdefault(key, []).append((step, time.perf_counter()))


@asynccontextmanager
async def sightings(server: Api) -> AsyncIterator[Sightings]:
    """Kept up to date within the block."""
    seen = Sightings()
    following = asyncio.create_task(seen.follow(server))
    try:
        yield seen
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def submit(controller: Controller, numbers: range, replicas: int, per_second: float = 0) -> list[float]:
    """Submit jobs by several clients, each request after the other, or so many a second.

    Returns the seconds that each request took. Raises ReportError for one that is refused,
    or not answered.
    """
    took: list[float] = []
    headers = {"Authorization": f"Bearer {controller.token}", "Content-Type": "application/json"}
    began = time.perf_counter()
    async with aiohttp.ClientSession(headers=headers) as session:

        async def one(number: int) -> None:
            if per_second:
                due = began + (number - numbers.start) / per_second
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            path, body = submission(number, replicas)
            sent = time.perf_counter()
            try:
                async with session.post(controller.url + path, data=body) as answer:
                    said = await answer.text()
            except aiohttp.ClientError as error:
                controller.check()
                raise ReportError(f"submitting job {number}: {error}") from error
            took.append(time.perf_counter() - sent)
            if answer.status != 201:
                raise ReportError(f"submitting job {number}: {answer.status} {said[:500]}")

        await side_by_side(numbers, one, CLIENTS)
    return took


async def until(
    what: str, condition: Callable[[], bool], check: Callable[[], None], every: float = 0.05
) -> None:
    """Wait for a condition. Raises ReportError where it does not come, and what `check` raises."""
    end = time.perf_counter() + LONGEST_SECONDS
    while not condition():
        check()
        if time.perf_counter() > end:
            raise ReportError(f"waited {LONGEST_SECONDS:g} s for {what}")
        await asyncio.sleep(every)


def keys(numbers: range) -> list[str]:
    return [key_of(number) for number in numbers]
