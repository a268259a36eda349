"""A local engine whose jobs do what the test says, on processes that need no torch.

Each rank waits for a file that names the exit code to leave with; `end` writes it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from waiting import wait_until_async

from holdfast_controller.cluster import AttemptObservation, Engine, ReplicaState
from holdfast_controller.gang import attempt_uid
from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.local import process
from holdfast_controller.local.engine import LocalEngine
from holdfast_controller.local.launch import Runtime, run_directory
from holdfast_controller.local.slots import Machine

TINY = Runtime(sys.executable, (sys.executable, str(Path(__file__).parent / "tiny_torchrun.py")))
WAIT = (
    'echo "rank $RANK is up"; until [ -e "$HOLDFAST_RUN_DIR/end-$HOLDFAST_ATTEMPT-$RANK" ]; '
    'do sleep 0.02; done; exit $(cat "$HOLDFAST_RUN_DIR/end-$HOLDFAST_ATTEMPT-$RANK")'
)


def waiting_job(name: str = "a", **spec: Any) -> TrainingJob:
    """A job of two replicas whose ranks run until they are told to end."""
    body = {"command": ["sh", "-c", WAIT], "replicas": 2, **spec}
    return TrainingJob(metadata=Metadata(name=name), spec=Spec.model_validate(body))


def local_engine(data: Path, cores: int = 4, runtime: Runtime = TINY) -> LocalEngine:
    return LocalEngine(data, Machine(cores), runtime=runtime)


def processes_of(job: TrainingJob, attempt: int = 1) -> list[int]:
    """Those that carry the attempt's mark."""
    return [found.pid for found in process.find(attempt_uid(job, attempt))]


def end(data: Path, job: TrainingJob, attempt: int, rank: int, code: int = 0) -> None:
    """Let a rank end with this exit code."""
    path = run_directory(data, job).path / f"end-{attempt}-{rank}"
    draft = path.with_suffix(".draft")
    draft.write_text(str(code))
    draft.replace(path)


@asynccontextmanager
async def at_work(engine: LocalEngine) -> AsyncIterator[LocalEngine]:
    """The engine with its background work, until the block ends; attempts go on."""
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(
    engine: Engine, job: TrainingJob, attempt: int, what: str, test: Any, seconds: float = 180
) -> AttemptObservation:
    """The first observation that passes the test."""

    async def look() -> AttemptObservation | None:
        seen = await engine.observe(job, attempt)
        return seen if test(seen) else None

    found = await wait_until_async(look, f"{what} of {job.key}", seconds)
    assert found is not None
    return found


def gone(seen: AttemptObservation) -> bool:
    return seen.gone


async def killed(engine: Engine, job: TrainingJob, attempt: int = 1) -> AttemptObservation:
    """The end of an attempt that is told to end at once."""
    await engine.kill(job, attempt)
    return await until(engine, job, attempt, "the end", gone)


def all_running(seen: AttemptObservation) -> bool:
    return bool(seen.replicas) and all(r.state is ReplicaState.RUNNING for r in seen.replicas)


async def ranks_up(engine: LocalEngine, data: Path, job: TrainingJob, attempt: int = 1) -> None:
    """Until every rank has written its first line."""
    run = run_directory(data, job)

    def up() -> bool:
        logs = [run.rank_log(attempt, rank) for rank in range(job.spec.world_size)]
        return all(log.exists() and log.stat().st_size > 0 for log in logs)

    await wait_until_async(up, f"the ranks of {job.key} to be up")
