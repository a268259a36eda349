"""A job of the local engine, seen on the GPUs it uses: by name, attempt, replica and rank."""

from __future__ import annotations

import asyncio
from pathlib import Path

from local_world import at_work, local_engine, ranks_up, waiting_job
from tests.exporter.conftest import Look
from tests.nvml.stand_in import GIB, Process, Script

from holdfast_controller.exporter.processes import ENV_RANK, PROC, job_names
from holdfast_controller.gang import attempt_uid
from holdfast_controller.local.process import find


def shells(uid: str) -> dict[str, int]:
    """The pid of each rank's own shell, by rank: of its forks, which come and go, it is the oldest."""
    found: dict[str, tuple[int, int]] = {}
    for process in find(uid):
        directory = PROC / str(process.pid)
        try:
            rank = job_names((directory / "environ").read_bytes()).get(ENV_RANK)
            is_shell = (directory / "comm").read_text() == "sh\n"
        except OSError:
            continue  # it ended meanwhile
        if rank is not None and is_shell:
            age = (process.started, process.pid)
            found[rank] = min(age, found.get(rank, age))
    return {rank: pid for rank, (_, pid) in found.items()}


def test_each_rank_of_a_local_job_is_seen(script: Script, look: Look, tmp_path: Path) -> None:
    async def story() -> None:
        async with at_work(local_engine(tmp_path)) as engine:
            job = waiting_job("gpt")
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            ranks = shells(attempt_uid(job, 1))
            assert set(ranks) == {"0", "1"}
            for rank, pid in ranks.items():
                script.gpus[int(rank)].processes = [Process(pid, (1 + int(rank)) * GIB, 20)]
            script.write()
            seen = look()
            await engine.kill(job, 1)
        for rank in ("0", "1"):
            whose = {"namespace": "default", "job": "gpt", "attempt": "1", "replica": rank, "rank": rank}
            assert seen.value("process_memory_bytes", gpu=rank, **whose) == (1 + int(rank)) * GIB
            assert seen.value("process_sm_ratio", gpu=rank, **whose) == 0.2
        assert seen.all("unattributed_processes") == []

    asyncio.run(story())
