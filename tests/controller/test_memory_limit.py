"""A job that asks for memory is held to it on one machine too; who outgrows it is told apart from a loss."""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
from pathlib import Path

import psutil
import pytest
from local_world import all_running, at_work, local_engine, ranks_up, until, waiting_job
from processes import Processes
from waiting import wait_until, wait_until_async

from holdfast_controller.cluster import Invalid
from holdfast_controller.drills import DrillKind
from holdfast_controller.gang import attempt_uid
from holdfast_controller.jobs import TrainingJob, Verdict
from holdfast_controller.local import engine as engine_module
from holdfast_controller.local import process
from holdfast_controller.local.launch import run_directory
from holdfast_controller.local.memory import MemoryGroup, parent_group
from holdfast_controller.local.record import AttemptFiles
from holdfast_controller.policy.classify import classify

here = parent_group()
limits_memory = pytest.mark.skipif(here is None, reason="this machine lets nobody make memory cgroups")


def tree(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("memory pids" if name.endswith("subtree_control") else "")
    return root


@pytest.mark.parametrize(
    ("told", "files", "found"),
    [
        ("4:cpu,memory:/job\n", ["memory/job/cgroup.procs"], "memory/job"),
        ("4:memory:/gone\n", ["memory/cgroup.procs"], "memory"),
        (
            "0::/app.slice/a.scope\n",
            ["app.slice/cgroup.procs", "app.slice/cgroup.subtree_control"],
            "app.slice",
        ),
        ("0::/app.slice/a.scope\n", ["app.slice/cgroup.procs"], None),
        ("0::/\n", ["cgroup.procs"], None),
        ("", [], None),
    ],
    ids=["version 1", "a group of another namespace", "delegated", "no controller", "no memory", "nothing"],
)
def test_where_groups_can_be_made(tmp_path: Path, told: str, files: list[str], found: str | None) -> None:
    (tmp_path / "cgroup").write_text(told)
    parent = parent_group(tmp_path / "cgroup", tree(tmp_path / "fs", *files))
    assert parent == (None if found is None else tmp_path / "fs" / found)


def limits(job: TrainingJob) -> list[int | None]:
    """Of the groups of its first attempt; None for one that is not there."""
    assert here is not None
    return [MemoryGroup(here, attempt_uid(job, 1), replica).limit for replica in range(job.spec.replicas)]


GROWS = f"{sys.executable} -c 'import time; kept = bytearray(400 << 20); time.sleep(600)'"


@limits_memory
@pytest.mark.parametrize("drilled", [False, True], ids=["it grows", "drilled"])
def test_who_reaches_the_limit_is_out_of_memory_and_its_group_goes_with_it(
    tmp_path: Path, drilled: bool
) -> None:
    async def story() -> None:
        more = (
            {} if drilled else {"command": ["sh", "-c", f'[ "$RANK" = 1 ] && exec {GROWS}; exec sleep 600']}
        )
        job = waiting_job(resources={"memory": "150Mi"}, **more)
        async with at_work(local_engine(tmp_path)) as engine:
            assert "Each replica is held to resources.memory." in engine.plan(job).notes
            await engine.start(job, 1)
            if drilled:
                await ranks_up(engine, tmp_path, job)
                await engine.drill(job, 1, 1, DrillKind.OOM)
            seen = await until(engine, job, 1, "the end of rank 1", lambda s: bool(s.replicas[1].ranks))
            await engine.kill(job, 1)
            seen = await until(engine, job, 1, "the end", lambda s: s.gone)
            await until(engine, job, 1, "the end of its groups", lambda _: limits(job) == [None, None])
        incident = classify(seen)
        assert (incident.verdict, incident.replica) == (Verdict.OUT_OF_MEMORY, 1), incident.reason
        assert incident.reason.startswith(
            "replica 1: OutOfMemory: it reached its limit of 150 MiB; rank 1 had "
        )

    asyncio.run(story())


@limits_memory
def test_a_group_that_is_being_made_outlives_the_end_of_another_test() -> None:
    assert here is not None
    group = MemoryGroup(here, "an attempt of this test", 0)
    group.make(150 << 20)
    Processes().end_all()
    assert group.limit == 150 << 20
    assert group.remove()


@limits_memory
@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted"])
def test_a_group_that_something_else_is_still_in_goes_when_that_has_ended(
    tmp_path: Path, processes: Processes, deleted: bool
) -> None:
    """As a process is that the kernel takes apart, for which nobody can wait: its attempt is gone."""

    async def story() -> None:
        job, other = waiting_job(resources={"memory": "150Mi"}), processes.start(["sleep", "600"])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            assert here is not None
            MemoryGroup(here, attempt_uid(job, 1), 0).add(other.pid)
            await engine.kill(job, 1)
            await until(engine, job, 1, "the end", lambda s: s.gone)
            await until(engine, job, 1, "the end of the other group", lambda _: limits(job)[1] is None)
            assert limits(job)[0] == 150 << 20
            if deleted:
                await engine.delete(job)
            other.kill()
            other.wait()
            await wait_until_async(lambda: limits(job)[0] is None, "the engine to remove it by itself")

    asyncio.run(story())


@limits_memory
def test_a_loss_is_not_taken_for_the_shortage_of_another_job_at_that_moment(tmp_path: Path) -> None:
    async def story() -> None:
        grows = waiting_job(
            "grows", resources={"memory": "150Mi"}, replicas=1, command=["sh", "-c", f"exec {GROWS}"]
        )
        loses = waiting_job("loses", command=["sh", "-c", 'echo "rank $RANK is up"; exec sleep 600'])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(loses, 1)
            await ranks_up(engine, tmp_path, loses)
            await engine.start(grows, 1)
            full = await until(engine, grows, 1, "the end of its rank", lambda s: bool(s.replicas[0].ranks))
            for each in process.find(attempt_uid(loses, 1), 1, 1):
                if psutil.Process(each.pid).name() == "sleep":  # the rank, not its supervisor
                    process.send(each, signal.SIGKILL)
            lost = await until(engine, loses, 1, "the end of rank 1", lambda s: bool(s.replicas[1].ranks))
            for job in (grows, loses):
                await engine.kill(job, 1)
                await until(engine, job, 1, "the end", lambda s: s.gone)
        assert classify(full).verdict is Verdict.OUT_OF_MEMORY
        incident = classify(lost)
        assert incident.verdict is Verdict.DISRUPTED, incident.reason
        assert "rank 1 got SIGKILL from outside" in incident.reason

    asyncio.run(story())


@limits_memory
def test_what_a_replica_has_started_before_it_was_put_under_the_limit_is_held_to_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the controller may have no turn in which to do that for longer than a start takes."""
    add = MemoryGroup.add

    def late(group: MemoryGroup, pid: int) -> None:
        wait_until(lambda: process.find(attempt_uid(job, 1), 0, 0), "its rank to be there")
        add(group, pid)

    monkeypatch.setattr(MemoryGroup, "add", late)
    # It grows on, whenever the controller comes to it: what it took before that is not counted.
    grows = "import time; kept = [time.sleep(0.01) or bytearray(1 << 20) for _ in range(2000)]"
    command = ["sh", "-c", f"exec {sys.executable} -c '{grows}'"]
    job = waiting_job(resources={"memory": "150Mi"}, replicas=1, command=command)

    async def story() -> None:
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            full = await until(engine, job, 1, "the end of its rank", lambda s: bool(s.replicas[0].ranks))
            await engine.kill(job, 1)
            await until(engine, job, 1, "the end", lambda s: s.gone)
        assert classify(full).verdict is Verdict.OUT_OF_MEMORY

    asyncio.run(story())


def test_no_drill_takes_the_memory_of_the_machine(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            with pytest.raises(
                Invalid, match=r"nothing limits the memory of job default/a here; give it resources"
            ):
                await engine.drill(job, 1, 0, DrillKind.OOM)
            await engine.kill(job, 1)
            await until(engine, job, 1, "the end", lambda s: s.gone)

    asyncio.run(story())


@limits_memory
def test_a_start_whose_limit_is_refused_leaves_nothing_and_is_no_disruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel has no more numbers for groups: the second of two is refused."""
    make, full = MemoryGroup.make, True

    def refused(group: MemoryGroup, limit: int | None) -> None:
        if full and not first.exists():
            raise OSError(errno.ENOSPC, "No space left on device", "its group")
        first.unlink(missing_ok=True)
        make(group, limit)

    first = tmp_path / "first"
    monkeypatch.setattr(MemoryGroup, "make", refused)
    monkeypatch.setattr(engine_module, "RETRY_SECONDS", 0.05)

    async def story() -> None:
        nonlocal full
        job = waiting_job(resources={"memory": "150Mi"})
        async with at_work(local_engine(tmp_path)) as engine:
            first.touch()
            await engine.start(job, 1)
            waits = (await engine.observe(job, 1)).waiting
            assert waits.startswith("cannot start yet, tried again every"), waits
            assert waits.endswith("its group: No space left on device")
            assert AttemptFiles(run_directory(tmp_path, job), 1).launch() is None
            assert limits(job) == [None, None], "the group that was made is gone"
            full = False
            await until(engine, job, 1, "its start", all_running)
            assert limits(job) == [150 << 20, 150 << 20]
            await engine.kill(job, 1)
            await until(engine, job, 1, "the end of its groups", lambda _: limits(job) == [None, None])

    asyncio.run(story())
