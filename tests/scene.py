"""The reconciler on a stage of its own: a store and an engine in memory, and time that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from fakes import MemoryEngine, MemoryStore

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.reconciler import Reconciler
from holdfast_trainer.contract import Progress

AnEngine = TypeVar("AnEngine", bound=MemoryEngine)


def make(name: str = "a", **spec: Any) -> TrainingJob:
    return TrainingJob(
        metadata=Metadata(name=name), spec=Spec.model_validate({"command": ["x"], "replicas": 2, **spec})
    )


class Scene:
    """A store and an engine in memory, a clock the test moves, and passes one at a time."""

    def __init__(self, engine: MemoryEngine | None = None) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.store = MemoryStore()
        self.engine = engine or MemoryEngine(clock=self.seconds)
        self.reconciler = Reconciler(self.store, self.engine, clock=lambda: self.now)

    def seconds(self) -> float:
        return self.now.timestamp()

    def run_on(self, engine: AnEngine) -> AnEngine:
        """What runs attempts from now on."""
        self.engine = engine
        self.reconciler = Reconciler(self.store, engine, clock=lambda: self.now)
        return engine

    async def submit(self, job: TrainingJob) -> TrainingJob:
        await self.store.create(job)
        return await self.look()

    async def look(self, passes: int = 2) -> TrainingJob:
        for _ in range(passes):
            self.after = await self.reconciler.reconcile("default/a")
        return await self.store.get("default", "a")

    async def end(self, *codes: int) -> TrainingJob:
        """Replicas of the running attempt end with these codes."""
        job = await self.store.get("default", "a")
        for replica, code in enumerate(codes):
            self.engine.end(job, job.status.attempt, replica, code)
        return await self.look()

    async def change(self, **spec: Any) -> TrainingJob:
        job = await self.store.get("default", "a")
        job.spec = job.spec.model_copy(update=spec)
        await self.store.replace_spec(job)
        return await self.look()

    async def reasons(self) -> list[str]:
        return [event.reason for event in await self.store.events("default", "a")]


class TellingEngine(MemoryEngine):
    """An engine whose trainer serves a ledger and progress as well."""

    def __init__(self, clock: Callable[[], float]):
        super().__init__(clock=clock)
        self.lines: list[dict[str, Any]] = []
        self.stepped: list[dict[str, Any]] = []
        self.progress: Progress | None = None

    async def ledger(self, job: TrainingJob) -> list[dict[str, Any]]:
        return self.lines

    async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        return self.stepped

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        return replace(await super().observe(job, attempt), progress=self.progress)


def telling(scene: Scene) -> TellingEngine:
    """The scene's engine from now on."""
    return scene.run_on(TellingEngine(scene.seconds))


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def played() -> None:
        await story(Scene())

    asyncio.run(played())
