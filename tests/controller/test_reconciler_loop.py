"""The reconciler's loop: many jobs, real processes, a controller that ends, leads no more, comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import MemoryEngine, MemoryStore
from local_world import all_running, at_work, end, local_engine, ranks_up, until, waiting_job
from scene import make
from series import sample
from structlog.testing import capture_logs
from waiting import wait_until_async

from holdfast_controller import reconciler
from holdfast_controller.cluster import AttemptObservation, Conflict, Event, Unavailable
from holdfast_controller.drills import DrillKind
from holdfast_controller.job_series import JobFigures
from holdfast_controller.jobs import Phase, Status, TrainingJob, Verdict
from holdfast_controller.local.launch import run_directory
from holdfast_controller.local.store import LocalStore
from holdfast_controller.metrics import Metrics
from holdfast_controller.queueing import WorkQueue
from holdfast_controller.reconciler import Reconciler


@dataclass
class Stage:
    """A running reconciler."""

    store: Any
    engine: Any
    metrics: Metrics

    async def phase(self, name: str, *phases: Phase) -> TrainingJob:
        async def look() -> TrainingJob | None:
            job: TrainingJob = await self.store.get("default", name)
            return job if job.status.phase in phases else None

        found = await wait_until_async(look, f"job {name} to be {phases}")
        assert found is not None
        return found


@asynccontextmanager
async def on_stage(store: Any, engine: Any, settle_seconds: float = 0.3) -> AsyncIterator[Stage]:
    metrics = Metrics(getattr(engine, "slots", None) if callable(getattr(engine, "slots", None)) else None)
    reconciler = Reconciler(store, engine, metrics=metrics, settle_seconds=settle_seconds)
    task = asyncio.create_task(reconciler.run())
    try:
        yield Stage(store, engine, metrics)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_many_jobs_run_side_by_side_and_one_that_breaks_the_pass_stops_no_other() -> None:
    class Breaking(MemoryEngine):
        broken = 3

        async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
            if job.metadata.name == "bad" and self.broken:
                self.broken -= 1
                raise Unavailable("the engine does not answer")
            return await super().observe(job, attempt)

    async def story() -> None:
        engine = Breaking(slots=2)
        async with on_stage(MemoryStore(), engine) as stage:
            for name in ("bad", "x", "y", "z"):
                await stage.store.create(make(name, replicas=1))

            async def all_over() -> list[TrainingJob]:
                for attempt in list(engine.attempts.values()):
                    if attempt.alive:
                        engine.end(attempt.job, attempt.number, 0, 0)
                jobs = await stage.store.list_jobs()
                return jobs if all(job.status.phase is Phase.SUCCEEDED for job in jobs) else []

            jobs = await wait_until_async(all_over, "all jobs to end")
            assert [job.status.attempt for job in jobs] == [1, 1, 1, 1]
            assert sample(stage.metrics, "holdfast_reconcile_errors_total") == 3
            succeeded = {"phase": "Succeeded"}
            await wait_until_async(
                lambda: sample(stage.metrics, "holdfast_jobs", succeeded) == 4,
                "the metrics to follow",
            )

    asyncio.run(story())


def test_a_job_that_is_woken_again_and_again_while_its_passes_fail_does_not_fill_the_log() -> None:
    """With each step that it told of: of a database whose disk failed fifty jobs told every second."""

    class Down(MemoryEngine):
        why = "the disk failed"

        async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
            raise Unavailable(self.why)

    async def story() -> None:
        engine = Down()
        async with on_stage(MemoryStore(), engine) as stage:
            errors = lambda: sample(stage.metrics, "holdfast_reconcile_errors_total") or 0  # noqa: E731

            async def fail(passes: int) -> None:
                async def failed() -> bool:
                    engine.tell("default/a")
                    return errors() >= passes

                await wait_until_async(failed, f"{passes} passes to fail")

            with capture_logs() as lines:
                await stage.store.create(make(replicas=1))
                await fail(20)
                engine.why = "the disk is full"
                await fail(30)
            told = [line for line in lines if line["event"] == "a pass failed and is tried again"]
            first = [line["passes"] for line in told if line["error"] == "the disk failed"]
            second = [line["passes"] for line in told if line["error"] == "the disk is full"]
            assert first[:5] == [1, 2, 4, 8, 16]
            assert len(first) <= 6
            assert len(second) <= 2, "another error is told at once"
            assert second

    asyncio.run(story())


def test_a_job_that_somebody_changes_during_a_pass_is_looked_at_again_and_that_is_no_error() -> None:
    class Changed(MemoryStore):
        others = 3

        async def replace_status(self, job: TrainingJob, status: Status, *events: Event) -> TrainingJob:
            if self.others:
                self.others -= 1
                raise Conflict("somebody wrote first")
            return await super().replace_status(job, status, *events)

    async def story() -> None:
        async with on_stage(Changed(), MemoryEngine()) as stage:
            await stage.store.create(make(replicas=1))
            await stage.phase("a", Phase.STARTING)
            assert sample(stage.metrics, "holdfast_reconcile_errors_total") == 0

    asyncio.run(story())


def test_a_drill_on_real_processes_costs_no_failure_and_little_time(tmp_path: Path) -> None:
    async def story() -> None:
        store = await LocalStore.open(tmp_path / "jobs.db")
        try:
            async with at_work(local_engine(tmp_path)) as engine, on_stage(store, engine) as stage:
                job = await store.create(waiting_job())
                await until(engine, job, 1, "its start", all_running)
                await ranks_up(engine, tmp_path, job)
                await engine.drill(job, 1, 1, DrillKind.KILL)
                await until(engine, job, 2, "the second attempt", all_running)
                for rank in (0, 1):
                    end(tmp_path, job, 2, rank)
                job = await stage.phase("a", Phase.SUCCEEDED, Phase.FAILED)
                assert (job.status.attempt, job.status.disruptions, job.status.failures) == (2, 1, 0)
                assert job.status.attempts[0].verdict is Verdict.DISRUPTED
                assert job.status.attempts[0].log_tail["1"] == "rank 1 is up"
                labels = {"namespace": "default", "job": "a"}
                assert sample(stage.metrics, "holdfast_job_attempts_total", labels) == 2
                assert sample(stage.metrics, "holdfast_job_disruptions_total", labels) == 1
                assert sample(stage.metrics, "holdfast_slots", {"resource": "cpu"}) == 4
        finally:
            await store.close()

    asyncio.run(story())


def test_a_controller_that_ends_and_comes_back_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job()
        for _ in range(3):
            store = await LocalStore.open(tmp_path / "jobs.db")
            try:
                async with at_work(local_engine(tmp_path)) as engine, on_stage(store, engine):
                    with suppress(Exception):
                        job = await store.create(job)
                    await until(engine, job, 1, "its start", all_running)
                    await ranks_up(engine, tmp_path, job)
            finally:
                await store.close()
        store = await LocalStore.open(tmp_path / "jobs.db")
        try:
            for rank in (0, 1):
                end(tmp_path, job, 1, rank)
            async with at_work(local_engine(tmp_path)) as engine, on_stage(store, engine) as stage:
                job = await stage.phase("a", Phase.SUCCEEDED, Phase.FAILED)
                assert (job.status.phase, job.status.attempt) == (Phase.SUCCEEDED, 1)
                assert run_directory(tmp_path, job).attempt_numbers() == [1]
                await store.mark_deleted("default", "a")

                async def gone() -> bool:
                    return await store.list_jobs() == []

                await wait_until_async(gone, "the job to be forgotten")
                assert not run_directory(tmp_path, job).path.exists()
        finally:
            await store.close()

    asyncio.run(story())


def test_who_leads_no_more_tells_of_no_job_and_leading_again_of_those_that_are_left() -> None:
    async def story() -> None:
        store, metrics = MemoryStore(), Metrics()
        reconciler = Reconciler(store, MemoryEngine(), metrics=metrics)

        @asynccontextmanager
        async def leading() -> AsyncIterator[None]:
            task = asyncio.create_task(reconciler.run())
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

        def told() -> set[str]:
            lines = b"".join(metrics.text()).decode().splitlines()
            return {line.split('job="')[1][0] for line in lines if line.startswith("holdfast_job_phase{")}

        for name in ("a", "b"):
            await store.create(make(name, replicas=1))
        async with leading():
            await wait_until_async(lambda: told() == {"a", "b"}, "both jobs to be told of")
        assert told() == set(), "the leader tells of them now"
        assert sample(metrics, "holdfast_queue_depth") == 0

        await store.remove(await store.get("default", "a"))
        async with leading():
            await wait_until_async(lambda: told() == {"b"}, "the job that is left")

    asyncio.run(story())


def test_jobs_whose_time_has_come_wait_for_a_pass_while_no_worker_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while an apiserver does not answer: until somebody else told of a job, none waited."""
    monkeypatch.setattr(reconciler, "SLICE_SECONDS", 3600.0)

    class Away(MemoryStore):
        async def get(self, namespace: str, name: str) -> TrainingJob:
            if name == "b":
                await asyncio.Event().wait()
            raise Unavailable("the apiserver does not answer")

    async def story() -> None:
        store, metrics = Away(), Metrics()
        for name in ("a", "b"):
            await store.create(make(name, replicas=1))
        task = asyncio.create_task(Reconciler(store, MemoryEngine(), metrics=metrics, workers=1).run())
        await wait_until_async(
            lambda: (
                sample(metrics, "holdfast_reconcile_errors_total") == 1
                and sample(metrics, "holdfast_queue_depth") == 1
            ),
            "the first job to wait for its second pass",
        )
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_a_resync_looks_at_a_part_of_the_jobs_that_are_over_and_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thousand that were over took 4 % of a core, for ever."""
    monkeypatch.setattr(reconciler, "SLICE_SECONDS", 0.001)

    async def story() -> None:
        store, metrics, woken = MemoryStore(), Metrics(None), list[str]()
        names = [f"over-{number}" for number in range(20)]
        for name in (*names, "waits"):
            job = await store.create(waiting_job(name))
            phase = Phase.QUEUED if name == "waits" else Phase.SUCCEEDED
            metrics.jobs[job.key] = JobFigures.of(await store.replace_status(job, Status(phase=phase)))
        rounds = Reconciler(store, MemoryEngine(slots=4), metrics=metrics, resync_seconds=0.02)
        monkeypatch.setattr(rounds, "_wake", woken.append)
        resync = asyncio.create_task(rounds._resync())
        await wait_until_async(lambda: woken.count("default/waits") > reconciler.OVER_TURNS, "ten resyncs")
        resync.cancel()
        seen = Counter(
            woken[: [n for n, key in enumerate(woken) if key == "default/waits"][reconciler.OVER_TURNS]]
        )
        assert {seen[f"default/{name}"] for name in names} == {1}
        assert seen["default/waits"] == reconciler.OVER_TURNS

    asyncio.run(story())


def test_the_queue_hands_a_key_to_one_worker_at_a_time() -> None:
    async def story() -> None:
        queue = WorkQueue()
        queue.add("a")
        queue.add("a")
        assert len(queue) == 1
        assert await queue.get() == "a"
        queue.add("a")
        waiting = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.done("a")
        assert await asyncio.wait_for(waiting, 5) == "a"
        queue.done("a")
        queue.add_after("late", 3600)
        queue.add_after("late", 0.01)
        queue.add_after("late", 3600)
        assert await asyncio.wait_for(queue.get(), 5) == "late"
        queue.close()

    asyncio.run(story())
