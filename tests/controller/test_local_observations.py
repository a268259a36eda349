"""What the local engine hears of a running attempt: its progress, and the kernel's memory killer."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from local_world import at_work, killed, local_engine, ranks_up, until, waiting_job

from holdfast_controller.gang import attempt_uid
from holdfast_controller.local import process
from holdfast_controller.local.active import MemoryKills
from holdfast_controller.local.launch import run_directory
from holdfast_controller.local.record import AttemptFiles, Launch
from holdfast_controller.local.slots import Grant
from holdfast_trainer.contract import ATTEMPT_HEADER, Progress


async def serve(answers: list[str], *headers: str) -> tuple[asyncio.Server, str]:
    """An HTTP server that gives these answers one after the other, the last one for ever."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An engine that ends may have come without having asked yet.
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            body = (answers.pop(0) if len(answers) > 1 else answers[0]).encode()
            lines = ("HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *headers, "", "")
            writer.write("\r\n".join(lines).encode() + body)
            await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    return server, f"{host}:{port}"


def test_progress_is_asked_for_and_nonsense_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_controller.local.progress.EVERY_SECONDS", 0.02)

    async def story() -> None:
        job = waiting_job(replicas=1)
        another = Progress(7, 99, 100, 99, "training").to_json()
        true = Progress(1, 5, 100, 0, "training", loss=2.5)
        server, address = await serve(["<html>", "{}", "[1]", another, true.to_json()])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            place = run_directory(tmp_path, job).progress_address(1)
            place.write_text("not an address")
            assert (await engine.observe(job, 1)).progress is None
            place.write_text(address)
            seen = await until(engine, job, 1, "progress", lambda s: s.progress is not None)
            assert seen.progress == true
            server.close()
            await server.wait_closed()
            assert (await engine.observe(job, 1)).progress == true
            await killed(engine, job)

    asyncio.run(story())


def test_progress_goes_on_where_the_run_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training goes on as well, and saves anew: its step and speed stood still for ever."""
    monkeypatch.setattr("holdfast_controller.local.progress.EVERY_SECONDS", 0.02)

    async def story() -> None:
        job = waiting_job(replicas=1)
        told = [Progress(1, step, 100, 0, "training", loss=2.5).to_json() for step in (5, 6)]
        answers = told[:1]
        server, address = await serve(answers)
        run = run_directory(tmp_path, job)
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            run.progress_address(1).write_text(address)
            await until(engine, job, 1, "progress", lambda s: s.progress is not None)
            shutil.rmtree(run.path)
            answers[:] = told[1:]
            await until(engine, job, 1, "step 6", lambda s: s.progress.step == 6, seconds=10)
            await killed(engine, job)
        server.close()
        await server.wait_closed()

    asyncio.run(story())


def test_a_port_that_another_jobs_rank_has_by_now_tells_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has closed its port, as at its end, and the kernel has given the number away. Both jobs are at
    their first attempt; the answer says whose it is."""
    monkeypatch.setattr("holdfast_controller.local.progress.EVERY_SECONDS", 0.02)

    async def story() -> None:
        jobs = [waiting_job(name=name, replicas=1) for name in ("before", "now")]
        told = Progress(1, 5, 100, 0, "training", loss=2.5)
        header = f"{ATTEMPT_HEADER}: {attempt_uid(jobs[1], 1)}"
        server, address = await serve([told.to_json()], header)
        async with at_work(local_engine(tmp_path)) as engine:
            for job in jobs:
                await engine.start(job, 1)
                await ranks_up(engine, tmp_path, job)
            for job in jobs:  # in this order: whoever is told first has been asked as often
                run_directory(tmp_path, job).progress_address(1).write_text(address)
            seen = await until(engine, jobs[1], 1, "progress", lambda s: s.progress is not None)
            assert seen.progress == told
            assert (await engine.observe(jobs[0], 1)).progress is None
            await until(engine, jobs[0], 1, "silence", lambda s: s.silence and s.silence.unheard > 0)
            for job in jobs:
                await killed(engine, job)
        server.close()
        await server.wait_closed()

    asyncio.run(story())


def test_kills_for_memory_of_another_boot_say_nothing_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It killed something since, and nothing before: a rank that went down with it was out of memory."""
    monkeypatch.setattr("holdfast_controller.local.active.parent_group", lambda: None)
    monkeypatch.setattr(process, "out_of_memory_kills", lambda: 3)
    job = waiting_job(replicas=1)
    run = run_directory(tmp_path, job)
    run.attempt(1).mkdir(parents=True)
    launch = Launch(job.key, attempt_uid(job, 1), 1, "the boot before", 1.0, 1, 1, 0, (Grant(),))
    AttemptFiles(run, 1).write_launch(replace(launch, supervisors=(process.ProcessId(1, 1),)))
    run.rank_exit(1, 0).write_text('{"signal": 9, "ended": 2.0}')
    run.replica_exit(1, 0).write_text('{"code": 1, "ended": 2.0}')
    (replica,) = asyncio.run(local_engine(tmp_path).observe(job, 1)).replicas
    assert (replica.out_of_memory, replica.disrupted) == (False, True), replica.reason


def test_a_kill_for_memory_is_told_from_one_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    counts = iter((3, 3, 4))
    monkeypatch.setattr(process, "out_of_memory_kills", lambda: next(counts))
    memory = MemoryKills(process.out_of_memory_kills(), since=now)
    memory.look()
    assert not memory.explains(now, count_at_start=0)
    memory.look()
    assert memory.explains(now, count_at_start=0)
    assert not memory.explains(now + 60, count_at_start=0)


def test_a_kill_that_nobody_watched_goes_by_the_count_since_the_start() -> None:
    memory = MemoryKills(4, since=1000.0)
    assert memory.explains(900.0, count_at_start=3)
    assert not memory.explains(900.0, count_at_start=4)
