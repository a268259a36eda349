"""Attempts on this machine: they outlive their controller, and whatever kills them is told apart."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
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
from processes import Processes
from waiting import wait_until, wait_until_async

from holdfast_controller.cluster import Invalid, ReplicaState
from holdfast_controller.drills import DrillKind
from holdfast_controller.gang import attempt_uid, shutdown_timeout
from holdfast_controller.jobs import AttemptRecord, Metadata, TrainingJob, Verdict
from holdfast_controller.local import asking, process
from holdfast_controller.local import engine as engine_module
from holdfast_controller.local.engine import LONGEST_WORD, LocalEngine
from holdfast_controller.local.launch import Runtime, replica_environment, run_directory
from holdfast_controller.local.record import AttemptFiles
from holdfast_controller.local.slots import Grant, Machine
from holdfast_controller.policy.classify import classify
from holdfast_controller.prices import NodePrice, Prices
from holdfast_trainer.contract import RunDir, read_fence

CONTROLLER = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from local_world import at_work, gone, killed, local_engine
from holdfast_controller.jobs import TrainingJob

async def main():
    job = TrainingJob.model_validate_json(sys.argv[2])
    async with at_work(local_engine(Path(sys.argv[1]))) as engine:
        await engine.start(job, 1)
        print("started", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_kill_9_of_the_controller_ends_no_attempt(tmp_path: Path, processes: Processes) -> None:
    job = waiting_job()
    controller = processes.start(
        [sys.executable, "-c", CONTROLLER, tmp_path, job.model_dump_json()],
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    run = run_directory(tmp_path, job)
    wait_until(lambda: all(run.rank_log(1, rank).exists() for rank in (0, 1)), "the ranks")

    def on_record() -> bool:
        """Ranks may run before the disk knows of their supervisors; cut short there, it is no start."""
        launch = AttemptFiles(run, 1).launch()
        return launch is not None and len(launch.supervisors) == 2

    wait_until(on_record, "the attempt to be on record")
    controller.kill()
    controller.wait(300)

    async def story() -> None:
        async with at_work(local_engine(tmp_path)) as engine:
            assert all_running(await engine.observe(job, 1))
            for rank in (0, 1):
                end(tmp_path, job, 1, rank)
            assert classify(await until(engine, job, 1, "the end", gone)).verdict is Verdict.FINISHED

    asyncio.run(story())


VICTIMS = [
    pytest.param(0, "Vanished: its supervisor", id="the replica's supervisor"),
    pytest.param(1, "Killed: torchrun got SIGKILL from outside", id="torchrun"),
    pytest.param(2, "Vanished: 1 of its ranks", id="the rank's supervisor"),
    pytest.param(3, "Killed: rank 1 got SIGKILL from outside", id="the rank"),
]


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "controller down"])
@pytest.mark.parametrize(("depth", "reason"), VICTIMS)
def test_kill_9_from_outside_is_a_disruption(tmp_path: Path, depth: int, reason: str, watched: bool) -> None:
    def victim(job: TrainingJob) -> int:
        """Each process of replica 1 has one child: supervisor, torchrun, supervisor, rank."""
        launch = AttemptFiles(run_directory(tmp_path, job), 1).launch()
        assert launch is not None
        found = psutil.Process(launch.supervisors[1].pid)
        for _ in range(depth):
            found = found.children()[0]
        return found.pid

    async def story() -> None:
        job = waiting_job()
        engine = local_engine(tmp_path)
        async with at_work(engine):
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            if watched:
                os.kill(victim(job), signal.SIGKILL)
                await until(engine, job, 1, "the loss", lambda s: s.replicas[1].state is ReplicaState.FAILED)
        if not watched:
            os.kill(victim(job), signal.SIGKILL)
            wait_until(lambda: not process.find(attempt_uid(job, 1), 1), "the replica to fall")
        async with at_work(local_engine(tmp_path)) as engine:
            seen = await until(engine, job, 1, "the loss", lambda s: not all_running(s))
            assert seen.replicas[1].disrupted
            assert seen.replicas[1].reason.startswith(reason)
            assert not seen.replicas[0].disrupted
            incident = classify(await killed(engine, job))
            assert (incident.verdict, incident.replica) == (Verdict.DISRUPTED, 1)

    asyncio.run(story())


def test_a_rank_that_fails_is_a_failure_also_where_torchrun_ends_its_neighbour(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job(replicas=1, processes=2)
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            end(tmp_path, job, 1, 1, 5)
            incident = classify(await until(engine, job, 1, "the end", gone))
            assert incident.verdict is Verdict.FAILED
            assert incident.reason == "replica 0: rank 1 ended with exit code 5; it last said: rank 1 is up"

    asyncio.run(story())


def test_a_command_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job(command=["trian", "--fast"])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            seen = await until(engine, job, 1, "the end", gone)
            incident = classify(seen)
            assert incident.verdict is Verdict.CONFIG_ERROR
            assert "cannot run 'trian': there is no such command on PATH" in incident.reason
            lines = [line async for line in engine.logs(job, 1, 0)]
            assert "cannot run 'trian'" in lines[-1]

    asyncio.run(story())


def test_a_torchrun_that_starts_no_rank_is_quoted(tmp_path: Path) -> None:
    """As where PyTorch is broken, or there is no /dev/shm: the logs of the ranks are empty, and all that was
    told of it was an exit code."""

    async def story() -> None:
        broken = Runtime(sys.executable, (sys.executable, "-c", "import torch_that_is_broken"))
        job = waiting_job(replicas=1)
        async with at_work(local_engine(tmp_path, runtime=broken)) as engine:
            await engine.start(job, 1)
            incident = classify(await until(engine, job, 1, "the end", gone))
        assert incident.verdict is Verdict.FAILED
        assert incident.reason == (
            "replica 0: ended with exit code 1 before it had started a rank: "
            "ModuleNotFoundError: No module named 'torch_that_is_broken'"
        )

    asyncio.run(story())


def test_an_attempt_costs_what_it_has_though_its_job_asks_for_more_by_now(tmp_path: Path) -> None:
    """Four replicas were asked for while two ran: from then on it had the price of four."""

    async def story() -> None:
        prices = Prices(per_hour=(NodePrice(price=8.0),))
        engine = LocalEngine(tmp_path, Machine(8), runtime=TINY, prices=prices)
        job = waiting_job()
        job.status.attempts = [AttemptRecord(number=1, replicas=2, grace_seconds=30.0)]
        async with at_work(engine):
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            job.spec.replicas = 4
            seen = await engine.observe(job, 1)
            assert [place.price_per_hour for place in seen.places] == [1.0, 1.0]
            await killed(engine, job)

    asyncio.run(story())


def test_what_runs_has_the_grace_that_it_was_started_with(tmp_path: Path) -> None:
    """Its ranks plan their last save by that: with less, as the next attempt is to have, it was cut off."""

    async def story() -> None:
        engine, job = local_engine(tmp_path), waiting_job(grace_seconds=600.0)
        job.status.attempts = [AttemptRecord(number=1, replicas=2, grace_seconds=600.0)]
        async with at_work(engine):
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            job.spec.grace_seconds = 1.0
            await engine.drill(job, 1, 0, DrillKind.NOTICE)
            await engine.stop(job, 1)
            files = AttemptFiles(run_directory(tmp_path, job), 1)
            stop, drill = files.stop(), files.drill(0)
            assert stop is not None
            assert drill is not None
            assert [round(one.deadline - one.time) for one in (stop, drill)] == [600, 600]
            await killed(engine, job)

    asyncio.run(story())


def test_the_grace_ends_also_under_the_next_controller(tmp_path: Path) -> None:
    stubborn = ["sh", "-c", 'trap "" TERM; echo up; while :; do sleep 0.02; done']

    async def story() -> None:
        job = waiting_job(command=stubborn, grace_seconds=3.0)
        engine = local_engine(tmp_path)
        async with at_work(engine):
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            await engine.stop(job, 1)
            assert not (await engine.observe(job, 1)).gone
        async with at_work(local_engine(tmp_path)) as engine:
            seen = await until(engine, job, 1, "the end of the grace", gone)
            assert classify(seen).verdict is Verdict.SUSPENDED

    asyncio.run(story())


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_does_not_move_the_end_of_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """As a laptop's that slept, or was an hour behind until it had a network. A rank that needs a while to
    save has its grace; one that does not end has no more than that, also under the next controller."""
    unset = time.time

    async def story() -> None:
        slow = waiting_job("slow", replicas=1, command=["sh", "-c", "trap '' TERM; echo up; sleep 600"])
        stuck = slow.model_copy(update={"metadata": Metadata(name="stuck", uid="e" * 36)})
        stuck = stuck.model_copy(update={"spec": stuck.spec.model_copy(update={"grace_seconds": 1.0})})
        slow.spec.grace_seconds = 600.0
        async with at_work(local_engine(tmp_path)) as engine:
            for job in (slow, stuck):
                await engine.start(job, 1)
                await ranks_up(engine, tmp_path, job)
                await engine.stop(job, 1)
            monkeypatch.setattr(time, "time", lambda: unset() + 3600 * hours)
            await until(engine, stuck, 1, "the end of the grace", gone)
            seen = await engine.observe(slow, 1)
            assert (seen.stopping, seen.gone) == (True, False)
            assert seen.replicas[0].state is ReplicaState.RUNNING
            await killed(engine, slow)

    asyncio.run(story())


def test_what_we_killed_is_our_doing_though_the_clock_is_set_back_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the times alone it ended an hour before we killed it: the peers of a replica that failed made a
    disruption of the failure."""
    unset = time.time

    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            end(tmp_path, job, 1, rank=0, code=7)
            await until(engine, job, 1, "a failure", lambda s: s.replicas[0].state is ReplicaState.FAILED)
            await engine.kill(job, 1)
            monkeypatch.setattr(time, "time", lambda: unset() - 3600)
            seen = await until(engine, job, 1, "its end", gone)
            assert [replica.disrupted for replica in seen.replicas] == [False, False]
            assert classify(seen).verdict is Verdict.FAILED
        async with at_work(local_engine(tmp_path)) as engine:
            assert classify(await engine.observe(job, 1)).verdict is Verdict.FAILED

    asyncio.run(story())


def test_a_helper_with_a_session_of_its_own_keeps_the_attempt_from_being_gone(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job(replicas=1, command=["sh", "-c", "setsid sleep 600 & echo up; exit 0"])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            seen = await until(
                engine, job, 1, "the replica's end", lambda s: s.replicas[0].state is ReplicaState.SUCCEEDED
            )
            assert not seen.gone
            await killed(engine, job)
            assert processes_of(job) == []

    asyncio.run(story())


def test_what_an_attempt_finds_in_its_directory_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")

    async def story() -> None:
        job = waiting_job(
            replicas=1,
            command=["sh", "-c", "env; command -v python; cat $HOLDFAST_CONFIG"],
            config={"model": {"layers": 6}, "text": "ünïcode", "run": "1e5"},
            env={"MY_KEY": "mine", "PATH": "/nowhere", "PYTHONUNBUFFERED": "0"},
            checkpoint={"every": "90s", "keep": 2},
            resources={"cpu": "2"},
        )
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await until(engine, job, 1, "the end", gone)
            said = [line async for line in engine.logs(job, 1, 0)]
            run = run_directory(tmp_path, job)
            assert read_fence(run) == 1
            for line in (
                f"HOLDFAST_RUN_DIR={run.path}",
                "HOLDFAST_JOB=default/a",
                "HOLDFAST_ATTEMPT=1",
                "HOLDFAST_REPLICA=0",
                "HOLDFAST_PORT=0",
                "HOLDFAST_GRACE_SECONDS=30",
                "HOLDFAST_CHECKPOINT_EVERY=90s",
                "HOLDFAST_CHECKPOINT_KEEP=2",
                f"HOLDFAST_TERMINATION_LOG={run.termination(1, 0)}",
                "OMP_NUM_THREADS=2",
                "MY_KEY=mine",
                "PYTHONUNBUFFERED=0",
                str(Path(sys.executable).parent / "python"),
                "model:",
                "text: ünïcode",
                "run: '1e5'",
            ):
                assert line in said
            assert not any("secret" in line for line in said)

    asyncio.run(story())


TITLED = """
import ctypes, os, time
if not os.environ.get("SPT_NOENV"):
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
print("it has a title", flush=True)
time.sleep(600)
"""


def test_a_rank_that_gives_itself_a_title_is_still_seen(tmp_path: Path) -> None:
    """setproctitle writes it over the variables that /proc shows: nobody saw such a process, nor ended it
    where it had a session of its own, nor knew whose GPU it used."""

    async def story() -> None:
        job = waiting_job(replicas=1, command=[sys.executable, "-c", TITLED])
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            assert len(process.ranks_of(attempt_uid(job, 1))) == 1
            await killed(engine, job)

    asyncio.run(story())


def test_programs_of_the_job_s_own_path_are_found(tmp_path: Path) -> None:
    """It was left out without a word, for the machine's own."""
    tool = tmp_path / "bin" / "tool-of-annas"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\ncommand -v python\n")
    tool.chmod(0o755)

    async def story() -> None:
        job = waiting_job(replicas=1, command=[tool.name], env={"PATH": str(tool.parent)})
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await until(engine, job, 1, "the end", gone)
            said = [line async for line in engine.logs(job, 1, 0)]
            assert said == [str(Path(sys.executable).parent / "python")]

    asyncio.run(story())


def test_a_replica_sees_its_own_gpus_alone() -> None:
    job = waiting_job(gpus="2", processes=2)
    grant = Grant(gpus=(2, 3))
    runtime = Runtime.of_this_process()
    seen = replica_environment(job, 1, RunDir(Path("/run")), 0, grant, Machine(16, (0, 1, 2, 3)), runtime)
    assert seen["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert seen["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(("grace", "shutdown"), [(1, 1), (2, 1), (30, 27), (120, 108)])
def test_torchrun_gives_up_on_its_ranks_before_the_grace_ends(grace: float, shutdown: int) -> None:
    assert shutdown_timeout(grace) == shutdown


def test_a_job_this_machine_can_never_run_waits_with_the_reason_and_blocks_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        async with at_work(local_engine(tmp_path, cores=2)) as engine:
            wide = waiting_job("wide", gpus="64")
            plan = engine.plan(wide)
            assert plan.reasons == (
                "asks for 128 GPUs; this machine has 0: set gpus: 0 to train on CPU, or use a cluster",
            )
            await engine.start(wide, 1)
            assert (await engine.observe(wide, 1)).waiting == plan.reasons[0]
            small = waiting_job("small")
            await engine.start(small, 1)
            await until(engine, small, 1, "its start", all_running)
            await killed(engine, small)

    asyncio.run(story())


def test_the_plan_shows_what_would_run(tmp_path: Path) -> None:
    plan = local_engine(tmp_path).plan(waiting_job(image="some/image", capacity="Spot"))
    assert plan.reasons == ()
    assert [manifest["replica"] for manifest in plan.manifests] == [0, 1]
    assert "--node-rank=1" in plan.manifests[1]["command"]
    assert plan.manifests[1]["environment"]["HOLDFAST_REPLICA"] == "1"
    for key in ("image", "capacity"):
        assert f"The local engine does not use spec.{key}." in plan.notes
    assert not any("shares its memory" in note for note in plan.notes)
    share = local_engine(tmp_path).plan(waiting_job(gpus="0.5", replicas=1))
    assert any(note.startswith("1/2 of a GPU is a slice of its time") for note in share.notes)
    chosen = local_engine(tmp_path).plan(waiting_job(env={"CUDA_VISIBLE_DEVICES": "3"}))
    said = "The local engine says which GPUs a replica has: spec.env.CUDA_VISIBLE_DEVICES has no effect."
    assert said in chosen.notes
    nested = local_engine(tmp_path).plan(waiting_job(command=["torchrun", "train.py"]))
    assert any(note.startswith("spec.command names torchrun") for note in nested.notes)
    assert not list((tmp_path / "runs").iterdir())
    bare = dataclasses.replace(Runtime.of_this_process(), pytorch=False)
    (why,) = local_engine(tmp_path, runtime=bare).plan(waiting_job()).reasons
    assert why.startswith(f"jobs run by the controller's Python, {sys.executable}, which has no PyTorch: ")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            {"command": ["python", "-c", "print('a\0b')"]},
            "spec.command[2] has a NUL character in it, with which no process can be started: leave it out",
        ),
        ({"env": {"SEP": "a\0b"}}, "spec.env.SEP has a NUL character in it"),
        (
            {"env": {"TABLE": "é" * (LONGEST_WORD // 2)}},
            f"spec.env.TABLE is of {LONGEST_WORD + 6} bytes, and no process can be started with more than "
            f"{LONGEST_WORD - 1}: put it into spec.config, or into a file",
        ),
    ],
)
def test_a_word_that_no_process_can_have_is_told_before_the_job_runs(
    tmp_path: Path, spec: dict[str, Any], told: str
) -> None:
    """It was taken, and then waited for ever, tried again every five seconds."""
    (why,) = local_engine(tmp_path).plan(waiting_job(**spec)).reasons
    assert why.startswith(told)


@pytest.mark.parametrize("limits", [True, False], ids=["memory is limited", "it is not"])
def test_memory_without_a_unit_is_told_where_it_would_end_each_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: bool
) -> None:
    """64 bytes, for who meant gigabytes: the job ran, was out of memory four times, and had failed."""
    monkeypatch.setattr(engine_module, "parent_group", lambda: tmp_path if limits else None)
    reasons = local_engine(tmp_path).plan(waiting_job(resources={"memory": "64"})).reasons
    told = "spec.resources.memory is 64, in which no replica can start: write the unit, as in 64Gi"
    assert reasons == ((told,) if limits else ())


def test_the_longest_word_that_a_process_can_have_is_taken(tmp_path: Path) -> None:
    longest = "x" * (LONGEST_WORD - 1)
    assert subprocess.run(["true", longest], check=False).returncode == 0
    assert local_engine(tmp_path).plan(waiting_job(command=["true", longest])).reasons == ()
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true", f"{longest}x"], check=False)


def test_a_working_directory_that_is_not_there_does_nothing_to_the_terminal_of_who_reads_of_it(
    tmp_path: Path,
) -> None:
    (why,) = local_engine(tmp_path).plan(waiting_job(workingDir=f"{tmp_path}/\x1b[2Jhome")).reasons
    assert (
        why == f"spec.workingDir: there is no directory {tmp_path}/home on this machine that jobs may enter"
    )


def test_a_job_runs_in_its_working_directory_and_waits_for_one_that_is_not_there(tmp_path: Path) -> None:
    """Several people share a controller, which was started in one directory; each has scripts in another."""
    home = tmp_path / "home of anna"

    async def story() -> None:
        async with at_work(local_engine(tmp_path)) as engine:
            job = waiting_job(replicas=1, command=["sh", "-c", "pwd"], workingDir=str(home))
            (why,) = engine.plan(job).reasons
            assert why == f"spec.workingDir: there is no directory {home} on this machine that jobs may enter"
            home.mkdir()
            assert engine.plan(job).reasons == ()
            await engine.start(job, 1)
            await until(engine, job, 1, "its end", gone)
            assert [line async for line in engine.logs(job, 1, 0)] == [str(home)]

    asyncio.run(story())


def test_a_working_directory_whose_mount_hangs_holds_up_no_other_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller looked there for that job, for ever: it answered nobody, and did not end by Ctrl-C."""
    back, usual = threading.Event(), os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: back.wait(300) if path == "/gone" else usual(path))
    engine = local_engine(tmp_path)
    for _ in range(3):
        (why,) = engine.plan(waiting_job(workingDir="/gone")).reasons
        assert why.startswith("spec.workingDir: the directory /gone does not answer: see to its mount")
    assert sum(thread.name == "look" for thread in threading.enumerate()) == 1
    assert engine.plan(waiting_job("other", workingDir=str(tmp_path))).reasons == ()
    back.set()
    wait_until(lambda: "no directory" in engine.plan(waiting_job(workingDir="/gone")).reasons[0], "an answer")


@pytest.mark.parametrize(
    ("config", "words", "said"),
    [
        ({"train": {"stepz": 9}}, [], "spec.config: train.stepz: unknown key; did you mean 'steps'?"),
        ({}, ["train.global_batch=3"], "3 sequences can not be shared evenly by 2 ranks"),
        ({}, ["no_such.yaml"], "no_such.yaml: no such configuration file"),
        ({}, [], None),
    ],
)
def test_what_the_trainer_will_not_take_is_told_before_the_job_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, dict[str, object]],
    words: list[str],
    said: str | None,
) -> None:
    """A typo in the trainer's settings was found by the job alone, once it had its slots and ranks."""
    monkeypatch.setattr(asking, "ASKING_SECONDS", 120.0)
    whole: dict[str, dict[str, object]] = {
        "model": {"vocab_size": 512, "layers": 1, "heads": 1, "width": 16, "context": 32},
        "data": {"path": "not prepared yet"},
        "train": {"steps": 8, "global_batch": 4},
    }
    given = {name: {**body, **config.get(name, {})} for name, body in whole.items()}
    command = ["python", "-m", "holdfast_trainer", "train", *words]
    engine = local_engine(tmp_path, runtime=Runtime.of_this_process())
    found = asyncio.run(engine.objections(waiting_job(command=command, config=given)))
    assert (len(found) == 1 and said in found[0]) if said else not found
    assert not list((tmp_path / "runs").iterdir())


def test_a_program_of_the_users_own_is_not_asked(tmp_path: Path) -> None:
    assert asyncio.run(local_engine(tmp_path).objections(waiting_job(config={"anything": 1}))) == ()


def test_one_machine_is_no_node_that_a_drill_can_take(tmp_path: Path) -> None:
    async def story() -> None:
        job = waiting_job()
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            with pytest.raises(Invalid, match=r"node: one machine cannot be taken .*: try kill or notice"):
                await engine.drill(job, 1, 0, DrillKind.NODE)
            await killed(engine, job)

    asyncio.run(story())


def test_a_notice_to_one_replica_ends_with_the_grace(tmp_path: Path) -> None:
    stubborn = ["sh", "-c", 'trap "" TERM; echo up; while :; do sleep 0.02; done']

    async def story() -> None:
        job = waiting_job(command=stubborn, grace_seconds=1.0)
        async with at_work(local_engine(tmp_path)) as engine:
            await engine.start(job, 1)
            await ranks_up(engine, tmp_path, job)
            await engine.drill(job, 1, 0, DrillKind.NOTICE)
            seen = await until(
                engine, job, 1, "the end of the grace", lambda s: s.replicas[0].state is ReplicaState.FAILED
            )
            assert seen.replicas[0].disrupted
            assert seen.replicas[1].state is ReplicaState.RUNNING
            await killed(engine, job)

    asyncio.run(story())


@pytest.mark.slow
def test_under_the_real_torchrun(tmp_path: Path) -> None:
    """Ranks meet, one is killed, what is left goes down; torchrun's own flags are the true ones."""
    script = (
        "import os, time\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'], flush=True)\n"
        "while not os.path.exists(os.environ['HOLDFAST_RUN_DIR'] + '/go'): time.sleep(0.05)\n"
    )

    async def story() -> None:
        engine = local_engine(tmp_path, runtime=Runtime.of_this_process())
        job = waiting_job(command=[sys.executable, "-c", script])
        async with at_work(engine):
            await engine.start(job, 1)
            await wait_until_async(
                lambda: all(run_directory(tmp_path, job).rank_log(1, rank).exists() for rank in (0, 1)),
                "torchrun to start its ranks",
            )
            await ranks_up(engine, tmp_path, job)
            lines = [line async for line in engine.logs(job, 1, 1)]
            assert lines == ["1 2 127.0.0.1"]
            await engine.drill(job, 1, 1, DrillKind.KILL)
            await until(engine, job, 1, "the loss", lambda s: s.replicas[1].state is ReplicaState.FAILED)
            incident = classify(await killed(engine, job))
            assert incident.verdict is Verdict.DISRUPTED
            assert processes_of(job) == []

            (run_directory(tmp_path, job).path / "go").touch()
            await engine.start(job, 2)
            seen = await until(engine, job, 2, "the second attempt's end", gone, 60)
            assert classify(seen).verdict is Verdict.FINISHED, seen

    asyncio.run(story())
