"""What a controller finds of attempts that an earlier one started, on its disk and on the machine."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from local_world import (
    TINY,
    all_running,
    at_work,
    end,
    gone,
    killed,
    local_engine,
    processes_of,
    ranks_up,
    until,
    waiting_job,
)
from waiting import wait_until_async

from holdfast_controller.cluster import Unavailable
from holdfast_controller.drills import DrillKind
from holdfast_controller.gang import attempt_uid
from holdfast_controller.jobs import TrainingJob, Verdict
from holdfast_controller.local import process
from holdfast_controller.local.engine import LocalEngine
from holdfast_controller.local.launch import run_directory
from holdfast_controller.local.record import AttemptFiles, Launch
from holdfast_controller.local.slots import Machine
from holdfast_controller.policy.classify import classify


def test_a_new_controller_finds_what_runs_and_starts_no_second_copy(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path, cores=2)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
        files = AttemptFiles(run_directory(tmp_path, job), 1)
        before = files.launch()

        async with at_work(local_engine(tmp_path, cores=2)) as engine:
            assert engine.slots() == {"cpu": (2.0, 2.0), "gpu": (0.0, 0.0)}
            await engine.start(job, 1)
            assert all_running(await engine.observe(job, 1))
            assert files.launch() == before
            assert [line async for line in engine.logs(job, 1, 1)] == ["rank 1 is up"]
            other = waiting_job("b", replicas=1)
            await engine.start(other, 1)
            waits = (await engine.observe(other, 1)).waiting
            assert waits == "waits for 1 CPU slots: 0 of 2 free; job default/a holds 2"
            for rank in (0, 1):
                end(tmp_path, job, 1, rank)
            seen = await until(engine, job, 1, "the end", gone)
            assert classify(seen).verdict is Verdict.FINISHED
            await until(engine, other, 1, "its turn", all_running)
            await killed(engine, other)

    asyncio.run(story())


def test_a_job_whose_store_was_moved_away_keeps_its_gpu_beside_the_next_of_its_name(tmp_path: Path) -> None:
    """As the store advises where its file is damaged; the log says how the old one is ended."""
    machine = Machine(4, (0, 1))

    def on_a_gpu(name: str) -> TrainingJob:
        return waiting_job(name, gpus="1", replicas=1)

    async def story() -> None:
        old, new, other = on_a_gpu("a"), on_a_gpu("a"), on_a_gpu("b")
        async with at_work(LocalEngine(tmp_path, machine, runtime=TINY)) as engine:
            await engine.start(old, 1)
            await ranks_up(engine, tmp_path, old)
        engine = LocalEngine(tmp_path, machine, runtime=TINY)
        async with at_work(engine):
            with structlog.testing.capture_logs() as told:
                engine.tell_of_strangers({old.metadata.uid})
                assert told == []
                engine.tell_of_strangers(set())
            await engine.start(new, 1)
            await engine.start(other, 1)
            assert engine.slots()["gpu"] == (2.0, 2.0)
            waits = (await engine.observe(other, 1)).waiting
            assert waits == "waits for 1 GPU slots: 0 of 2 free; job default/a holds 2"

            assert [line["uid"] for line in told] == [attempt_uid(old, 1)]
            ending = await asyncio.create_subprocess_shell(told[0]["to_end_it"])
            assert await ending.wait() == 0
            await until(engine, other, 1, "its turn", all_running)
            assert sorted(grant.gpu for grant in engine.gpus_held()) == [0, 1]
            for job in (new, other):
                await killed(engine, job)

    asyncio.run(story())


def test_a_copy_of_a_data_directory_does_not_take_the_attempts_of_the_original_for_its_own(
    tmp_path: Path,
) -> None:
    """A backup that is tried out beside what runs: it showed figures of the original, and suspended it."""

    async def story() -> None:
        job = waiting_job()
        first, moved = tmp_path / "first", tmp_path / "moved"
        async with at_work(local_engine(first)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, first, job)
        shutil.copytree(first, tmp_path / "copy")
        place = run_directory(first, job).path
        told = f"copy is a copy: attempt 1 of default/a runs in {place}, and would be taken"
        with pytest.raises(Unavailable, match=told):
            local_engine(tmp_path / "copy")
        assert processes_of(job), "nothing was done to it"

        first.rename(moved)
        first.symlink_to(moved)
        async with at_work(local_engine(moved)) as engine:
            assert all_running(await engine.observe(job, 1)), "by another path, it is its own"
            await killed(engine, job)

    asyncio.run(story())


def test_an_attempt_is_not_started_beside_the_same_one_of_the_directory_that_this_is_a_copy_of(
    tmp_path: Path,
) -> None:
    """Made while the job rested, and tried out beside the original: the processes of the two were told apart
    by nothing, and who ended one ended both."""

    async def story() -> None:
        job = waiting_job()
        first, copy = tmp_path / "first", tmp_path / "copy"
        async with at_work(local_engine(first)) as engine, at_work(local_engine(copy)) as other:
            await engine.start(job, 1)
            await ranks_up(engine, first, job)
            await other.start(job, 1)
            seen = await other.observe(job, 1)
            place = run_directory(first, job).path
            assert f"attempt 1 of default/a runs in {place}, and of the two data" in seen.waiting
            await other.kill(job, 1)
            assert all_running(await engine.observe(job, 1))
            await killed(engine, job)
            await other.start(job, 1)
            await ranks_up(other, copy, job)
            await killed(other, job)

    asyncio.run(story())


def test_what_runs_without_a_record_is_ended_before_its_job_goes_on_or_goes(tmp_path: Path) -> None:
    """Somebody has made room by hand, and started the controller again: the next attempt ran beside it, and
    what was deleted ran on."""

    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
        shutil.rmtree(run_directory(tmp_path, job).path)
        async with at_work(local_engine(tmp_path)) as engine:
            with structlog.testing.capture_logs() as told:
                seen = await engine.observe(job, 1)
            assert (seen.exists, seen.gone, processes_of(job)) == (False, True, [])
            assert told[0]["event"] == "ending what runs without a record"

            await engine.start(job, 2)
            await ranks_up(engine, tmp_path, job, 2)
            shutil.rmtree(run_directory(tmp_path, job).path)
            assert all_running(await engine.observe(job, 2)), "this controller knows of it"
            await killed(engine, job, 2)

    asyncio.run(story())


def test_a_start_looks_at_the_machine_s_processes_once_for_all_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of jobs have, and a look at a machine's thousand processes takes 20 ms."""
    jobs, looks, scandir = [waiting_job(name) for name in "abc"], list[object](), os.scandir

    def counted(path: Any = ".") -> Any:
        looks.append(path)
        return scandir(path)

    async def story() -> None:
        async with at_work(local_engine(tmp_path, cores=8)) as engine:
            for job in jobs:
                await engine.start(job, 1)
                await ranks_up(engine, tmp_path, job)
            for job in jobs[:2]:
                await killed(engine, job)
        with monkeypatch.context() as counting:
            counting.setattr(os, "scandir", counted)
            engine = local_engine(tmp_path, cores=8)
        assert looks.count(process.PROC) == 1
        async with at_work(engine):
            assert [(await engine.observe(job, 1)).gone for job in jobs] == [True, True, False]
            await killed(engine, jobs[2])

    asyncio.run(story())


def test_a_record_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that fails once: the next attempt ran beside the one that it is of."""
    read_bytes = Path.read_bytes

    def fails(path: Path) -> bytes:
        if path.name == "engine.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
        with monkeypatch.context() as failing:
            failing.setattr(Path, "read_bytes", fails)
            told = "engine.json: Input/output error; what runs there would be started twice"
            with pytest.raises(Unavailable, match=told):
                local_engine(tmp_path)
        async with at_work(local_engine(tmp_path)) as engine:
            assert all_running(await engine.observe(job, 1))
            await killed(engine, job)

    asyncio.run(story())


def test_a_directory_that_has_no_record_of_it_does_not_end_what_runs_in_another(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job()
        async with (
            at_work(local_engine(tmp_path / "first")) as engine,
            at_work(local_engine(tmp_path / "copy")) as other,
        ):
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path / "first", job)
            assert (await other.observe(job, 1)).gone
            assert all_running(await engine.observe(job, 1))
            await killed(engine, job)

    asyncio.run(story())


@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_the_place_of_a_run_directory_goes_with_its_job(tmp_path: Path, there: bool) -> None:
    """Where its disk was full it was moved to another, and its job could not be deleted, for `None`. What the
    link leads to stays: another job may go on from there."""

    async def story() -> None:
        job = waiting_job()
        place, moved = run_directory(tmp_path / "data", job).path, tmp_path / "moved"
        engine = local_engine(tmp_path / "data")
        place.parent.mkdir(parents=True)
        place.symlink_to(moved)
        if there:
            (moved / "checkpoints").mkdir(parents=True)
        await engine.delete(job)
        assert (moved / "checkpoints").exists() == there
        assert not place.is_symlink()
        await engine.delete(job)

    asyncio.run(story())


def test_what_ended_with_its_machine_ended_when_it_was_last_heard_of(tmp_path: Path) -> None:
    """Until the next morning, when a controller was started, it was taken to run, and cost money."""

    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
        process.kill_all(attempt_uid(job, 1))
        await wait_until_async(lambda: not processes_of(job), "the machine to be off")
        files = AttemptFiles(run_directory(tmp_path, job), 1)
        launch, night = files.launch(), time.time() - 10 * 3600
        assert launch is not None
        files.write_launch(replace(launch, started=night - 3600, boot="the boot before"))
        for path in files.directory.iterdir():
            os.utime(path, (night, night))
        async with at_work(local_engine(tmp_path)) as engine:
            seen = await until(engine, job, 1, "the end", gone)
        incident = classify(seen)
        assert incident.verdict is Verdict.DISRUPTED
        assert incident.reason == "replica 0: Vanished: this machine went down, and was booted since"
        assert [one.ended_at for one in seen.replicas] == [pytest.approx(night, abs=1)] * 2

    asyncio.run(story())


@pytest.mark.parametrize("begun", [0, 1])
def test_a_start_cut_short_is_put_to_an_end_and_never_doubled(tmp_path: Path, begun: int) -> None:
    """The controller died after it had recorded its intent: some replicas may run, some may not."""

    async def story() -> None:
        job = waiting_job()
        engine = local_engine(tmp_path)
        async with at_work(engine):
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
        files = AttemptFiles(run_directory(tmp_path, job), 1)
        launch = files.launch()
        assert launch is not None
        for replica in range(begun, 2):
            process.kill_all(launch.uid, replica)
        for leftover in files.directory.glob("engine-*"):
            leftover.unlink()
        files.write_launch(Launch(**{**vars(launch), "supervisors": ()}))

        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            incident = classify(await until(engine, job, 1, "the end", gone))
            assert incident.verdict is Verdict.DISRUPTED
            assert "CutShort: its start was interrupted" in incident.reason
            assert processes_of(job) == []

    asyncio.run(story())


def test_what_a_later_version_has_written_of_an_attempt_is_read_after_a_rollback(tmp_path: Path) -> None:
    """One key more in one of its files, and `holdfast up` ended in a traceback."""

    async def story() -> None:
        job = waiting_job()
        engine = local_engine(tmp_path)
        async with at_work(engine):
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            await engine.drill(job, 1, 1, DrillKind.NOTICE)
            await engine.stop(job, 1)
            await killed(engine, job)
        files = AttemptFiles(run_directory(tmp_path, job), 1)
        known = (files.launch(), files.stop(), files.drill(1), files.lost(0))
        assert None not in known
        for file in files.directory.glob("engine*.json"):
            file.write_text(json.dumps({**json.loads(file.read_text()), "invented": 1}))
        assert (files.launch(), files.stop(), files.drill(1), files.lost(0)) == known
        assert (await local_engine(tmp_path).observe(job, 1)).gone

    asyncio.run(story())
