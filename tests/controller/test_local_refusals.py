"""What a machine refuses a job, or its controller: files, room, processes. Nothing is lost or left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from disks import fill, fill_whole, no_more_files, real_disk, small_disk
from local_world import all_running, at_work, gone, killed, local_engine, ranks_up, until, waiting_job
from waiting import wait_until_async

from holdfast_controller.cluster import Unavailable
from holdfast_controller.gang import attempt_uid
from holdfast_controller.jobs import TrainingJob, Verdict
from holdfast_controller.local import engine as engine_module
from holdfast_controller.local.launch import run_directory
from holdfast_controller.local.memory import MemoryGroup, parent_group
from holdfast_controller.local.record import AttemptFiles
from holdfast_controller.policy.classify import classify
from holdfast_trainer.contract import replace_durably


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As where a thousand clients are connected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest_free)


def test_a_controller_that_can_open_no_file_takes_no_job_for_lost(tmp_path: Path) -> None:
    async def story() -> None:
        job, other = waiting_job(), waiting_job("b")
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            with no_descriptor_left():
                with pytest.raises(OSError, match="Too many open files"):
                    await engine.observe(job, 1)
                await engine.start(other, 1)
            assert (await engine.observe(other, 1)).waiting.endswith("Too many open files")
            assert all_running(await engine.observe(job, 1))
            assert not list(run_directory(tmp_path, job).attempt(1).glob("engine-*"))
            await engine.kill(other, 1)
            await killed(engine, job)

    asyncio.run(story())


def test_a_machine_that_refuses_a_start_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    full = True

    def write(path: Path, data: str) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        replace_durably(path, data)

    monkeypatch.setattr("holdfast_controller.local.record.replace_durably", write)
    monkeypatch.setattr(engine_module, "RETRY_SECONDS", 0.05)

    async def story() -> None:
        nonlocal full
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            waits = (await engine.observe(job, 1)).waiting
            assert waits.startswith("cannot start yet, tried again every")
            assert waits.endswith("engine.json: No space left on device")
            full = False
            await until(engine, job, 1, "its start", all_running)
            await killed(engine, job)

    asyncio.run(story())


def test_a_start_that_the_machine_has_room_for_in_part_says_what_was_wanting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full once the replicas run: nobody could find them again."""
    written: list[Path] = []

    def write(path: Path, data: str) -> None:
        written.append(path)
        if [one.name for one in written].count("engine.json") == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        replace_durably(path, data)

    monkeypatch.setattr("holdfast_controller.local.record.replace_durably", write)

    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            incident = classify(await until(engine, job, 1, "the end", gone))
            assert incident.verdict is Verdict.DISRUPTED
            assert "CutShort: not all of it could be started: [Errno 28] No space left" in incident.reason

    asyncio.run(story())


def test_what_a_killed_save_left_on_a_full_disk_gives_way_to_the_next_attempt(tmp_path: Path) -> None:
    """There is no room for a directory either, until the fence has made it. An ext4: a tmpfs has some."""

    async def story(data: Path) -> None:
        job = waiting_job()
        run = run_directory(data, job)
        async with at_work(local_engine(data)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, data, job)
            await killed(engine, job)
            half = run.checkpoints / ".step-00000020.attempt-1"
            half.mkdir(parents=True)
            fill_whole(half)

            await engine.start(job, 2)
            seen = await until(engine, job, 2, "its start", lambda seen: seen.waiting or all_running(seen))
            assert seen.waiting == ""
            assert not half.exists()
            await killed(engine, job, 2)

    with real_disk(tmp_path / "disk", 8 << 20) as disk:
        asyncio.run(story(disk))


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, Verdict.FINISHED), (7, Verdict.FAILED)], ids=["well", "badly"]
)
def test_how_a_job_ends_on_a_full_disk_is_known_to_the_next_controller_too(
    tmp_path: Path, code: int, verdict: Verdict
) -> None:
    """Nobody could write down there how it ended: it was taken for killed, and run again for ever."""

    async def story(data: Path) -> None:
        go = tmp_path / "go"
        script = f"echo up; until [ -e {go} ]; do sleep 0.02; done; exit {code}"
        job = waiting_job(command=["sh", "-c", script])
        async with at_work(local_engine(data)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, data, job)
            fill(data / "filler")
            go.touch()
            seen = await until(engine, job, 1, "the end", gone)
            assert classify(seen).verdict is verdict
        async with at_work(local_engine(data)) as engine:
            seen = await until(engine, job, 1, "the end, read again", gone)
            assert classify(seen).verdict is verdict

    with small_disk(tmp_path / "disk") as disk:
        asyncio.run(story(disk))


def test_a_job_that_ends_well_where_nobody_can_write_that_down_has_finished(tmp_path: Path) -> None:
    """Its controller is its parent, and hears of it from the kernel."""

    async def story() -> None:
        go = tmp_path / "go"
        job = waiting_job(command=["sh", "-c", f"echo up; until [ -e {go} ]; do sleep 0.02; done"])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            ends = [run_directory(tmp_path, job).replica_exit(1, replica) for replica in (0, 1)]
            for path in ends:
                path.mkdir()
                (path / "in the way").touch()
            go.touch()
            seen = await until(engine, job, 1, "the end", gone)
            assert classify(seen).verdict is Verdict.FINISHED

    asyncio.run(story())


def groups_of(job: TrainingJob) -> list[int]:
    """Replicas of its first attempt with a memory cgroup; none on a machine that lets nobody make any."""
    parent = parent_group()
    groups = [MemoryGroup(parent, attempt_uid(job, 1), each) for each in (0, 1)] if parent else []
    return [replica for replica, group in enumerate(groups) if group.kills() is not None]


def test_a_start_of_which_not_even_the_first_process_began_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "RETRY_SECONDS", 0.05)

    async def story() -> None:
        job = waiting_job()
        in_the_way = run_directory(tmp_path, job).replica_log(1, 0)
        in_the_way.mkdir(parents=True)
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            assert (await engine.observe(job, 1)).waiting.endswith("Is a directory")
            assert AttemptFiles(run_directory(tmp_path, job), 1).launch() is None
            assert groups_of(job) == []
            in_the_way.rmdir()
            await until(engine, job, 1, "its start", all_running)
            await killed(engine, job)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo a\0b", "embedded null byte; delete the job and submit it again"),
        # What no locale has; where the controller's is not UTF-8 any other letter may be such a one.
        (
            "echo \ud800",
            "the controller's locale (utf-8) has no character for '\\ud800', which the job's command, env or "
            "directory has: start `holdfast up` in one that has, as with LC_ALL=C.UTF-8",
        ),
    ],
)
def test_a_command_that_no_process_can_have_waits_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    monkeypatch.setattr(engine_module, "RETRY_SECONDS", 0.0)

    async def story() -> None:
        job = waiting_job(command=["sh", "-c", command])
        engine = local_engine(tmp_path)
        for _ in range(2):
            await engine.start(job, 1)
            seen = await engine.observe(job, 1)
            assert seen.waiting == f"cannot start: {said}"
            assert AttemptFiles(run_directory(tmp_path, job), 1).launch() is None
        assert groups_of(job) == []

    asyncio.run(story())


def test_where_the_directory_that_jobs_start_in_is_removed_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `rm -rf` and another `git clone` while the controller runs: each start was a failure of the job,
    by what PyTorch says where it has no directory, and after four of them it was Failed."""
    (tmp_path / "clone").mkdir()
    monkeypatch.chdir(tmp_path / "clone")
    (tmp_path / "clone").rmdir()
    (tmp_path / "clone").mkdir()  # another one, though it has the name

    async def story() -> None:
        job = waiting_job()
        engine = local_engine(tmp_path / "data")
        await engine.start(job, 1)
        said = f"{tmp_path}/clone: it was removed since `holdfast up` was started in it"
        assert said in (await engine.observe(job, 1)).waiting
        assert said in engine.plan(job).reasons[0]
        elsewhere = waiting_job("b", workingDir=str(tmp_path))
        assert engine.plan(elsewhere).reasons == ()
        async with at_work(engine):
            await engine.start(elsewhere, 1)
            await ranks_up(engine, tmp_path / "data", elsewhere)
            await engine.kill(elsewhere, 1)
            await killed(engine, elsewhere)

    asyncio.run(story())


def test_of_a_start_that_failed_half_way_nothing_is_left(tmp_path: Path) -> None:
    async def story() -> None:
        job, before = waiting_job(), psutil.Process().children()
        run_directory(tmp_path, job).replica_log(1, 1).mkdir(parents=True)
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            incident = classify(await until(engine, job, 1, "the end", gone))
            assert incident.verdict is Verdict.DISRUPTED

            def nothing_left() -> bool:
                return psutil.Process().children() == before and groups_of(job) == []

            await wait_until_async(nothing_left, "the processes and groups of the start to go, zombies too")

    asyncio.run(story())


def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"cannot write .*runs: Not a directory; choose another data"):
        local_engine(tmp_path / "file")


def test_a_disk_that_is_full_before_a_rank_has_begun_is_said_to_be(tmp_path: Path) -> None:
    """Nothing of what came of it could be written down, so it was said to be killed from outside."""

    async def story(data: Path) -> None:
        job = waiting_job()
        async with at_work(local_engine(data)) as engine:
            await engine.start(job, 1)
            fill(data / "filler")
            no_more_files(data)
            incident = classify(await until(engine, job, 1, "the end", gone))
            assert incident.verdict is Verdict.STORAGE_UNAVAILABLE
            assert str(run_directory(data, job).attempt(1)) in incident.reason
            assert incident.reason.endswith("No space left on device")

    with small_disk(tmp_path / "disk") as disk:
        asyncio.run(story(disk))
