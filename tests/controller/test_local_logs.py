"""Logs of ranks on this machine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from local_world import (
    TINY,
    at_work,
    local_engine,
    waiting_job,
)

from holdfast_controller.cluster import NotFound
from holdfast_controller.jobs import AttemptRecord
from holdfast_controller.lines import LONGEST_LINE
from holdfast_controller.local import logs
from holdfast_controller.local.launch import run_directory
from holdfast_trainer.bounded_log import NOTE, HoledLog


def test_logs_are_followed_to_their_end_and_a_tail_is_a_tail(tmp_path: Path) -> None:
    async def story() -> None:
        script = (
            "for i in 1 2 3; do echo line $i; done; until [ -e $HOLDFAST_RUN_DIR/go ]; do sleep 0.02; done"
        )
        job = waiting_job(replicas=1, command=["sh", "-c", f"{script}; printf 'the end'"])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            lines = aiter(engine.logs(job, 1, 0, follow=True))
            assert [await anext(lines) for _ in range(3)] == ["line 1", "line 2", "line 3"]
            assert [line async for line in engine.logs(job, 1, 0, tail=2)] == ["line 2", "line 3"]
            (run_directory(tmp_path, job).path / "go").touch()
            assert [line async for line in lines] == ["the end"]
            assert [line async for line in engine.logs(job, 1, 0, tail=1)] == ["the end"]
            assert [line async for line in engine.logs(job, 1, 0, tail=0)] == []

    asyncio.run(story())


def test_a_log_that_was_removed_is_not_said_to_be_of_an_attempt_that_never_was(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job()
        engine = local_engine(tmp_path)
        with pytest.raises(NotFound, match="has no attempt 1; it has none yet"):
            await anext(engine.logs(job, 1, 0))
        job.status.attempts = [AttemptRecord(number=1, started_at=job.metadata.creation_timestamp)]
        with pytest.raises(NotFound, match=r"what attempt 1 of job default/a wrote: .+/0001 was removed"):
            await anext(engine.logs(job, 1, 0))

    asyncio.run(story())


def test_a_progress_bar_that_never_ends_its_line_is_cut_between_characters(tmp_path: Path) -> None:
    async def story() -> None:
        log = tmp_path / "rank-0.log"
        bar = "|" + "\u2588" * (LONGEST_LINE // 2)
        log.write_bytes(bar.encode() + b"\xe2\x96\nnext\n")
        *pieces, last = [line async for line in logs.read(log, tail=None, over=None)]
        assert len(pieces) > 1
        assert "".join(pieces) == bar + "\ufffd", "what the program itself cut is marked"
        assert last == "next"

    asyncio.run(story())


def test_what_is_left_out_of_a_long_log_is_passed_over(tmp_path: Path) -> None:
    """Its reader is shown what is there and told of the rest, also where he was in its midst as it went."""

    async def story() -> None:
        path, limit = tmp_path / "rank-0.log", 1 << 20
        with path.open("ab", buffering=0) as file:
            log = HoledLog(file.fileno(), limit)
            file.write(b"first\n" + b"line %s\n" % (b"." * 58) * (2 * limit // 64))
            follower = aiter(logs.read(path, tail=(limit + limit // 4) // 64, over=lambda: True))
            await anext(follower)
            file.write(b"line %s\n" % (b"." * 58) * (8 * limit // 64) + b"last\n")
            log.cut()
            rest = [line async for line in follower]
        assert [line async for line in logs.read(path, tail=1, over=None)] == ["last"]
        lines = [line async for line in logs.read(path, tail=None, over=None)]
        assert (lines[0], lines[-1]) == ("first", "last")
        assert sum(len(line) + 1 for line in lines) < limit
        (note,) = [line for line in lines if line.startswith("[holdfast]")]
        size = path.stat().st_size
        assert f"{size - sum(len(line) + 1 for line in lines) + NOTE} bytes are left out here" in note
        assert not any("\0" in line for line in (*lines, *rest))
        (note,) = [line for line in rest if line.startswith("[holdfast]")]
        assert note.endswith("bytes were left out before they were shown: they came too fast for that")
        assert rest[-1] == "last"
        assert [line async for line in logs.read(path, tail=len(lines) - 3, over=None)] == lines[3:]

    asyncio.run(story())


def test_a_rank_that_talks_without_end_leaves_the_checkpoints_their_room(tmp_path: Path) -> None:
    async def story() -> None:
        script = "yes 'a line' | head -c 4000000; printf '\\nthe end'"
        job = waiting_job(replicas=1, command=["sh", "-c", script])
        async with at_work(local_engine(tmp_path, runtime=replace(TINY, log_limit="1Mi"))) as engine:
            await engine.start(job, 1)
            lines = [line async for line in engine.logs(job, 1, 0, follow=True)]
        assert (lines[0], lines[-1]) == ("a line", "the end")
        assert any("bytes are left out here: this log may take 1048576 bytes" in line for line in lines)
        assert run_directory(tmp_path, job).rank_log(1, 0).stat().st_blocks * 512 <= 1 << 20

    asyncio.run(story())
