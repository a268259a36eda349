"""What every job store promises, on SQLite and in memory alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fakes import MemoryStore

from holdfast_controller.cluster import AlreadyExists, Conflict, Event, Idempotency, JobStore, NotFound
from holdfast_controller.jobs import Metadata, Phase, Spec, Status, TrainingJob
from holdfast_controller.local.store import LocalStore

Story = Callable[[JobStore], Coroutine[Any, Any, None]]


@pytest.fixture(params=["local", "memory"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Run a story on a fresh store."""

    @asynccontextmanager
    async def store() -> AsyncIterator[JobStore]:
        if request.param == "memory":
            yield MemoryStore()
            return
        local = await LocalStore.open(tmp_path / "jobs.db")
        try:
            yield local
        finally:
            await local.close()

    def run(story: Story) -> None:
        async def told() -> None:
            async with store() as opened:
                await story(opened)

        asyncio.run(told())

    return run


def job(name: str = "a", namespace: str = "default") -> TrainingJob:
    return TrainingJob(metadata=Metadata(name=name, namespace=namespace), spec=Spec(command=["true"]))


def event(message: str, reason: str = "Test") -> Event:
    return Event(datetime.now(UTC), "Normal", reason, message)


def test_a_job_is_kept_as_it_was_submitted(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        made = await store.create(job("a"))
        assert made.metadata.resource_version
        assert await store.get("default", "a") == made
        await store.create(job("b", "team"))
        assert [j.key for j in await store.list_jobs()] == ["default/a", "team/b"]
        assert [j.key for j in await store.list_jobs("team")] == ["team/b"]

    tell(story)


def test_two_jobs_of_one_name_and_a_job_that_is_not_there(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        await store.create(job("a"))
        with pytest.raises(AlreadyExists, match="default/a exists already"):
            await store.create(job("a"))
        await store.create(job("a", "other"))
        with pytest.raises(NotFound, match="no job default/nothing"):
            await store.get("default", "nothing")

    tell(story)


def test_who_decided_on_an_old_version_is_refused(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        old = await store.create(job("a"))
        new = await store.replace_status(old, Status(phase=Phase.RUNNING))
        assert new.metadata.generation == 1
        with pytest.raises(Conflict, match="default/a changed"):
            await store.replace_status(old, Status(phase=Phase.FAILED))
        with pytest.raises(Conflict, match="read it again"):
            await store.replace_spec(old)
        assert (await store.get("default", "a")).status.phase is Phase.RUNNING

    tell(story)


def test_generation_counts_changes_of_the_spec_alone(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        made = await store.create(job("a"))
        made.metadata.labels["team"] = "x"
        labelled = await store.replace_spec(made)
        assert labelled.metadata.generation == 1
        assert labelled.metadata.labels == {"team": "x"}
        labelled.spec.suspend = True
        suspended = await store.replace_spec(labelled)
        assert suspended.metadata.generation == 2
        assert suspended.spec.suspend

    tell(story)


def test_a_repeated_request_makes_one_job(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        once = Idempotency("key-1", "fingerprint")
        made = await store.create(job("a"), idempotency=once)
        again = await store.create(job("a"), idempotency=once)
        assert again.metadata.uid == made.metadata.uid
        with pytest.raises(Conflict, match="'key-1' was used for another request"):
            await store.create(job("b"), idempotency=Idempotency("key-1", "another"))
        elsewhere = await store.create(job("a", "team"), idempotency=once)
        assert elsewhere.metadata.uid != made.metadata.uid
        await store.remove(made)
        with pytest.raises(Conflict):
            await store.create(job("a"), idempotency=once)

    tell(story)


def test_deletion_is_a_mark_until_the_reconciler_removes_the_job(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        made = await store.create(job("a"))
        changed = await store.replace_status(made, Status(message="it goes on"))
        with pytest.raises(Conflict):
            await store.mark_deleted("default", "a", known=made)
        marked = await store.mark_deleted("default", "a", known=changed)
        assert marked.metadata.deletion_timestamp is not None
        again = await store.mark_deleted("default", "a")
        assert again.metadata.deletion_timestamp == marked.metadata.deletion_timestamp
        await store.remove(marked)
        second = await store.create(job("a"))
        await store.remove(made)  # the first one is meant, not the one that has its name now
        assert (await store.get("default", "a")).metadata.uid == second.metadata.uid
        with pytest.raises(NotFound):
            await store.replace_status(marked, Status())

    tell(story)


def test_events_are_bounded_and_repeats_are_counted(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        made = await store.create(job("a"))
        for _ in range(3):
            await store.record_event(made, event("same"))
        assert [(e.message, e.count) for e in await store.events("default", "a")] == [("same", 3)]
        for number in range(205):
            await store.record_event(made, event(f"event {number}"))
        events = await store.events("default", "a")
        assert len(events) == 200
        assert events[-1].message == "event 204"
        await store.remove(made)
        await store.record_event(made, event("too late"))
        with pytest.raises(NotFound):
            await store.events("default", "a")

    tell(story)


def test_a_status_and_the_events_that_it_comes_with_are_kept_both_or_neither(
    tell: Callable[[Story], None],
) -> None:
    """A controller that ends between two acts would tell of what happened never: no later pass has it."""

    async def story(store: JobStore) -> None:
        made = await store.create(job("a"))
        await store.replace_status(made, Status(phase=Phase.RUNNING), event("one"), event("two"))
        assert [e.message for e in await store.events("default", "a")] == ["one", "two"]
        with pytest.raises(Conflict):
            await store.replace_status(
                made, Status(phase=Phase.FAILED), event("of a pass that came too late")
            )
        assert [e.message for e in await store.events("default", "a")] == ["one", "two"]

    tell(story)


def test_a_watch_tells_all_jobs_first_then_every_change(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        made = await store.create(job("a"))
        watch: Any = store.watch()
        async with aclosing(watch) as changes:
            first = await anext(changes)
            assert (first.type, first.job.key) == ("ADDED", "default/a")
            made = await store.replace_status(made, Status(message="one"))
            made = await store.replace_status(made, Status(message="two"))
            merged = await anext(changes)
            assert (merged.type, merged.job.status.message) == ("MODIFIED", "two")
            await store.create(job("b"))
            assert (await anext(changes)).job.key == "default/b"
            await store.remove(made)
            gone = await anext(changes)
            while gone.type == "MODIFIED":  # a store may tell the mark of deletion, too
                gone = await anext(changes)
            assert (gone.type, gone.job.key) == ("DELETED", "default/a")

    tell(story)


def test_a_watch_of_a_namespace_tells_of_no_other(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        other = await store.create(job("a", "other"))
        await store.create(job("b", "team"))
        watch: Any = store.watch("team")
        async with aclosing(watch) as changes:
            assert (await anext(changes)).job.key == "team/b"
            await store.replace_status(other, Status(message="elsewhere"))
            await store.create(job("c", "other"))
            await store.create(job("c", "team"))
            told = await anext(changes)
            assert (told.type, told.job.key) == ("ADDED", "team/c")

    tell(story)


def test_many_writers_at_once_lose_no_write(tell: Callable[[Story], None]) -> None:
    async def story(store: JobStore) -> None:
        await store.create(job("a"))

        async def add_one() -> None:
            while True:
                current = await store.get("default", "a")
                status = current.status.model_copy(update={"failures": current.status.failures + 1})
                try:
                    await store.replace_status(current, status)
                except Conflict:
                    continue
                return

        await asyncio.gather(*(add_one() for _ in range(10)))
        assert (await store.get("default", "a")).status.failures == 10

    tell(story)
