"""An engine whose attempts do what the test says: the API's and the command's other side of the port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from holdfast_controller.cluster import (
    AttemptObservation,
    NotFound,
    NotReady,
    Plan,
    ReplicaObservation,
    ReplicaState,
)
from holdfast_controller.drills import DrillKind
from holdfast_controller.jobs import TrainingJob


class ScriptedEngine:
    """Runs nothing. `running` are the replicas of each job that could be drilled; `no_steps` is why none is
    told."""

    name = "scripted"

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {}
        self.drills: list[tuple[str, int, int, DrillKind]] = []
        self.output: dict[tuple[str, int, int], list[str]] = {}
        self.open_attempts: set[tuple[str, int]] = set()
        self.ledger_lines: dict[str, list[dict[str, Any]]] = {}
        self.step_lines: dict[str, list[dict[str, Any]]] = {}
        self.no_steps: str | None = None
        self.followers = 0
        self.said: tuple[str, ...] = ()
        """What every job's program has against its configuration."""

    def plan(self, job: TrainingJob) -> Plan:
        reasons = []
        if job.spec.gpus != "0":
            wanted = int(float(job.spec.gpus) * job.spec.replicas)
            reasons.append(f"spec.gpus: the job needs {wanted} GPUs and this machine has none; give 0")
        manifest = {"command": ["torchrun", *job.spec.command], "replicas": job.spec.replicas}
        return Plan(self.name, (manifest,), tuple(reasons), ("nothing runs here",))

    async def objections(self, job: TrainingJob) -> tuple[str, ...]:
        return self.said

    async def start(self, job: TrainingJob, attempt: int) -> None:
        raise NotImplementedError

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        replicas = tuple(
            ReplicaObservation(index, ReplicaState.RUNNING) for index in self.running.get(job.key, [])
        )
        return AttemptObservation(attempt, exists=bool(replicas), gone=not replicas, replicas=replicas)

    async def stop(self, job: TrainingJob, attempt: int) -> None:
        raise NotImplementedError

    async def kill(self, job: TrainingJob, attempt: int, *, stacks: bool = False) -> None:
        raise NotImplementedError

    async def drill(self, job: TrainingJob, attempt: int, replica: int, kind: DrillKind) -> None:
        if replica not in self.running.get(job.key, []):
            raise NotReady(f"replica {replica} of {job.key} is not running")
        self.drills.append((job.key, attempt, replica, kind))

    async def delete(self, job: TrainingJob) -> None:
        raise NotImplementedError

    async def ledger(self, job: TrainingJob) -> list[dict[str, Any]]:
        return self.ledger_lines.get(job.key, [])

    def run_directory(self, job: TrainingJob) -> str:
        return f"/runs/{job.key}"

    async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        if self.no_steps is not None:
            raise NotReady(self.no_steps)
        return self.step_lines.get(job.key, [])

    async def ends_of_steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        return await self.steps(job)

    async def keep_logs(self, job: TrainingJob, attempt: int) -> None:
        """`output` stays."""

    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        where = (job.key, attempt, rank)
        if where not in self.output:
            raise NotFound(f"rank {rank} of attempt {attempt} of {job.key} has written nothing")
        lines = self.output[where]
        shown = max(0, len(lines) - tail) if tail is not None else 0
        self.followers += 1
        try:
            while True:
                while shown < len(lines):
                    yield lines[shown]
                    shown += 1
                if not follow or (job.key, attempt) not in self.open_attempts:
                    return
                await asyncio.sleep(0.01)
        finally:
            self.followers -= 1

    async def changes(self) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""
