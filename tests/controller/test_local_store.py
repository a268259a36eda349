"""The SQLite file itself: restarts, damage, disks and second controllers."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from disks import fill, small_disk

from holdfast_controller.cluster import AlreadyExists, Idempotency, Unavailable
from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Spec, Status, TrainingJob
from holdfast_controller.local import store as local_store
from holdfast_controller.local.store import LocalStore


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open(path)
    try:
        yield store
    finally:
        await store.close()


def job(name: str) -> TrainingJob:
    return TrainingJob(metadata=Metadata(name=name), spec=Spec(command=["true"]))


def test_what_jobs_were_given_to_run_with_is_read_by_their_user_alone(tmp_path: Path) -> None:
    """A data directory that was there before may be open to all, and keys and passwords are in `env`."""
    path = tmp_path / "jobs.db"

    def modes() -> dict[str, int]:
        return {one.name: one.stat().st_mode & 0o077 for one in tmp_path.glob("jobs.db*")}

    async def story() -> None:
        async with opened(path) as store:
            await store.create(job("a"))
            assert {"jobs.db", "jobs.db-wal"} <= modes().keys()
            assert not any(modes().values()), modes()
        path.chmod(0o644)  # as an earlier Holdfast made it
        async with opened(path):
            assert not any(modes().values()), modes()

    asyncio.run(story())


def test_a_restart_finds_everything_and_versions_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        once = Idempotency("key", "print")
        async with opened(tmp_path / "jobs.db") as store:
            made = await store.create(job("a"), idempotency=once)
            made = await store.replace_status(made, Status(phase=Phase.RUNNING))
        async with opened(tmp_path / "jobs.db") as store:
            assert await store.get("default", "a") == made
            assert (await store.create(job("a"), idempotency=once)).metadata.uid == made.metadata.uid
            newer = await store.create(job("b"))
            assert int(newer.metadata.resource_version) > int(made.metadata.resource_version)

    asyncio.run(story())


def test_who_gives_a_name_twice_is_told_how_to_give_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "jobs.db") as store:
            await store.create(job("a"))
            told = (
                r"choose another name, as with --set metadata\.name=NAME, or delete it first: holdfast delete"
            )
            with pytest.raises(AlreadyExists, match=told):
                await store.create(job("a"))

    asyncio.run(story())


async def until_refused(writes: Iterator[Awaitable[object]]) -> None:
    for write in writes:
        await write


def test_a_full_disk_is_a_fault_until_there_is_room_again(tmp_path: Path) -> None:
    async def story(disk: Path) -> None:
        async with opened(disk / "jobs.db") as store:
            made = await store.create(job("a"))
            fill(disk / "filler")
            more = (store.create(job(f"more-{number}")) for number in itertools.count())
            with pytest.raises(Unavailable, match="the disk is full; free some space"):
                await until_refused(more)
            assert "the disk is full" in (store.fault or "")
            assert await store.get("default", "a") == made, "what is there can be read"
            (disk / "filler").unlink()
            await store.replace_status(made, Status(phase=Phase.RUNNING))
            assert store.fault is None

    with small_disk(tmp_path / "disk") as disk:
        asyncio.run(story(disk))


def test_a_full_disk_does_not_keep_a_job_whose_files_fill_it(tmp_path: Path) -> None:
    """To delete it takes a few writes before its files go: they have room that was kept for them."""

    async def story(disk: Path) -> None:
        async with opened(disk / "jobs.db") as store:
            for name in ("a", "b"):
                await store.create(job(name))
            fill(disk / "filler")
            more = (store.create(job(f"more-{number}")) for number in itertools.count())
            with pytest.raises(Unavailable, match="the disk is full; free some space"):
                await until_refused(more)
            going = await store.mark_deleted("default", "a")
            assert going.metadata.deletion_timestamp is not None
            for number in range(5):
                going = await store.replace_status(going, Status(phase=Phase.RUNNING, attempt=number))
            fill(disk / "more")  # somebody else's file takes what is left of it
            more = (store.create(job(f"again-{number}")) for number in itertools.count())
            with pytest.raises(Unavailable, match="the disk is full"):
                await until_refused(more)
            with pytest.raises(Unavailable, match="the disk is full"):
                await store.mark_deleted("default", "b")
            (disk / "filler").unlink()
            await store.remove(going)
            fill(disk / "filler")
            more = (store.create(job(f"more-{number}")) for number in itertools.count(1000))
            with pytest.raises(Unavailable, match="the disk is full"):
                await until_refused(more)
            assert (await store.mark_deleted("default", "b")).metadata.name == "b", "room was kept anew"

    with small_disk(tmp_path / "disk") as disk:
        asyncio.run(story(disk))


def refusal(path: Path) -> str:
    async def story() -> None:
        async with opened(path):
            pass

    with pytest.raises(Unavailable) as refused:
        asyncio.run(story())
    return str(refused.value)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_text("this is not a database, but it is long enough to be taken for one" * 50)
    assert "jobs.db is damaged (file is not a database); move it away" in refusal(path)


def test_a_damaged_page(tmp_path: Path) -> None:
    async def fill() -> None:
        async with opened(tmp_path / "jobs.db") as store:
            for number in range(60):
                await store.create(job(f"job-{number}"))

    asyncio.run(fill())
    with open(tmp_path / "jobs.db", "r+b") as file:
        file.seek(4096)
        file.write(random.Random(7).randbytes(3 * 4096))
    assert "is damaged" in refusal(tmp_path / "jobs.db")


def test_a_file_of_a_newer_holdfast(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "jobs.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    assert "has schema version 99, this Holdfast reads 1" in refusal(tmp_path / "jobs.db")


def changed_by_a_newer_holdfast(path: Path, key: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE jobs SET body = json_set(body, '{key}', 1)")
    db.close()


def test_what_a_newer_holdfast_asks_of_a_job_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "jobs.db") as store:
            await store.create(job("a"))
        changed_by_a_newer_holdfast(tmp_path / "jobs.db", "$.spec.fromTheFuture")
        async with opened(tmp_path / "jobs.db") as store:
            told = (
                r"jobs\.db has a job that this Holdfast cannot read \(spec\.fromTheFuture: .*; run the Hold"
            )
            for look in (store.list_jobs(), store.get("default", "a"), anext(aiter(store.watch()))):
                with pytest.raises(Unavailable, match=told):
                    await look

    asyncio.run(story())


def test_who_goes_back_to_an_older_holdfast_keeps_the_jobs_that_ask_for_nothing_it_does_not_know(
    tmp_path: Path,
) -> None:
    """A key that nobody gave was kept as null, and the Holdfast before that key read none of the jobs."""

    async def story() -> None:
        async with opened(tmp_path / "jobs.db") as store:
            asked = job("a")
            asked.spec.config = {"name": None, "within": {"rate": None}}
            made = await store.create(asked)
            with sqlite3.connect(tmp_path / "jobs.db") as db:
                spec = json.loads(db.execute("SELECT body FROM jobs").fetchone()[0])["spec"]
            db.close()
            given = (spec, spec["resources"], spec["retries"])
            assert not [key for keys in given for key, value in keys.items() if value is None]
            assert spec["config"] == asked.spec.config, "a null of the user's own stays"
            assert await store.get("default", "a") == made

    asyncio.run(story())


def test_who_goes_back_to_an_older_holdfast_keeps_the_jobs_whose_status_said_more(tmp_path: Path) -> None:
    """The older controller would not start, and jobs that ran were left to themselves."""

    async def story() -> None:
        async with opened(tmp_path / "jobs.db") as store:
            attempts = [AttemptRecord(number=1, opened_at=datetime.now(UTC))]
            ran = Status(phase=Phase.RUNNING, attempt=1, attempts=attempts)
            made = await store.replace_status(await store.create(job("a")), ran)
        for key in ("$.status.fromTheFuture", "$.status.attempts[0].fromTheFuture"):
            changed_by_a_newer_holdfast(tmp_path / "jobs.db", key)
        async with opened(tmp_path / "jobs.db") as store:
            assert await store.list_jobs() == [made]
            made.status.phase = Phase.SUCCEEDED
            ended = await store.replace_status(made, made.status)
            assert await store.get("default", "a") == ended

    asyncio.run(story())


def test_a_second_controller_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "jobs.db"):
            with pytest.raises(Unavailable, match=r"another controller uses .*jobs\.db; stop it"):
                await LocalStore.open(tmp_path / "jobs.db")
        async with opened(tmp_path / "jobs.db"):
            pass

    asyncio.run(story())


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal(tmp_path / "file" / "data" / "jobs.db")


def test_a_write_that_was_cancelled_leaves_the_store_usable(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "jobs.db") as store:
            for number in range(20):
                task = asyncio.create_task(store.create(job(f"job-{number}")))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            made = await store.create(job("after"))
            assert await store.get("default", "after") == made

    asyncio.run(story())


def test_others_have_their_turn_while_a_list_of_many_jobs_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five thousand take half a second, in which no request was answered and no attempt looked after."""
    turns, at_jobs = 0, list[int]()
    decode = local_store._decode

    def noted(row: sqlite3.Row) -> TrainingJob:
        at_jobs.append(turns)
        return decode(row)

    async def story() -> None:
        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with opened(tmp_path / "jobs.db") as store:
            names = [f"job-{number}" for number in range(3 * local_store.JOBS_AT_ONCE)]
            for name in names:
                await store.create(job(name))
            others = asyncio.create_task(take_turns())
            monkeypatch.setattr(local_store, "_decode", noted)
            assert sorted(one.metadata.name for one in await store.list_jobs()) == sorted(names)
            others.cancel()

    asyncio.run(story())
    assert len(set(at_jobs)) == 3
