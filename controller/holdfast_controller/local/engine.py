"""Attempts as torchrun processes on this machine: an Engine (cluster.py).

An attempt waits in a queue (slots.py decides who is next), is started (launch.py says what, spawn.py
does it), is looked after (active.py) and judged (evidence.py). All that must survive a controller lies in
the attempt's directory (record.py): a new controller finds what runs, counts its slots as taken, and
never starts a second copy. The queue itself is not kept: to this engine an attempt that waits does not
exist after a restart, and the reconciler asks for it again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from holdfast_controller.cluster import (
    AttemptObservation,
    GpuGrant,
    NotFound,
    NotReady,
    Plan,
    ReplicaObservation,
    ReplicaState,
    Unavailable,
)
from holdfast_controller.drills import DrillKind
from holdfast_controller.gang import attempt_uid
from holdfast_controller.jobs import Capacity, Spec, TrainingJob
from holdfast_controller.policy.cost import Node, place_of
from holdfast_controller.policy.gpu_request import gpu_request, sharing_notes
from holdfast_controller.policy.spec_notes import spec_notes
from holdfast_controller.policy.words import too_little_memory, unstartable
from holdfast_controller.prices import Prices
from holdfast_controller.queueing import Keys
from holdfast_controller.visible_gpus import VARIABLE
from holdfast_controller.yaml_text import dump
from holdfast_trainer.contract import ENV_ATTEMPT_UID, ENV_RUN_DIR, RunDir, exists, is_directory, read_lines

from . import logs, process, progress
from .active import ActiveAttempt, MemoryKills
from .asking import objections
from .launch import ReplicaLaunch, Runtime, replica_launches, run_directory
from .memory import parent_group
from .places import why_not_entered
from .process import ProcessId
from .record import AttemptFiles, Launch
from .slots import Allocation, Grant, Machine, Waiting, admit, never_fits, request_of, usage
from .spawn import DIRECTORY_GONE, directory_gone, inherited, start_attempt
from .steps import all_steps, ends_of_steps, of_attempts
from .targets import TargetsFile

TEND_SECONDS = 0.1
RETRY_SECONDS = 5.0
"""Until a start that the machine refused (disk full, no more processes) is tried again."""
END_SECONDS = 2.0
"""For what was killed to be gone."""
GPUS_CHOSEN = (VARIABLE, "CUDA_DEVICE_ORDER")
LONGEST_WORD = 32 * os.sysconf("SC_PAGESIZE")
"""Bytes that Linux takes of a word or a variable (MAX_ARG_STRLEN, execve(2))."""

log = structlog.get_logger(__name__)


@dataclass
class _Queued:
    job: TrainingJob
    attempt: int
    waiting: str = ""
    not_before: float = float("-inf")
    """By a clock that nobody sets."""


class LocalEngine:
    """Runs attempts in `data`/runs. `run` must be running for anything to move on by itself."""

    name = "local"

    def __init__(
        self,
        data: Path,
        machine: Machine,
        *,
        runtime: Runtime | None = None,
        prices: Prices | None = None,
    ):
        """Finds the attempts that still run; by default this interpreter's own torchrun starts new ones.

        Raises Unavailable where `data` cannot be written."""
        self._data = data
        self._machine = machine
        self._prices = prices or Prices()
        self._runtime = runtime or Runtime.of_this_process()
        self._queue: dict[str, _Queued] = {}
        self._active: dict[str, ActiveAttempt] = {}
        self._unrecorded: set[str] = set()
        """Attempts of which nothing is on record, and nothing runs: looked for once, which takes a while."""
        self._deleted: list[ActiveAttempt] = []
        """Of jobs that are no more; looked after until nothing is left of them."""
        self._keys = Keys()
        self._targets = TargetsFile(data)
        self._memory = MemoryKills(process.out_of_memory_kills(), time.time())
        try:
            (data / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(
                f"cannot write {data / 'runs'}: {error.strerror}; choose another data directory"
            ) from error
        self._recover()

    def _recover(self) -> None:
        seen = process.attempts()  # once for all: of thousands of jobs nearly all have ended
        for directory in self._run_directories():
            run = RunDir(directory)
            for attempt in run.attempt_numbers()[-1:]:
                files = AttemptFiles(run, attempt)
                try:
                    launch = files.launch()
                except OSError as error:
                    raise _started_twice(error) from error
                if launch is not None:
                    if (original := _elsewhere(directory, launch.supervisors)) is not None:
                        raise Unavailable(
                            f"{self._data} is a copy: attempt {launch.attempt} of {launch.key} runs in "
                            f"{original}, and would be taken for the copy's own; suspend the job there "
                            "first, or let it finish"
                        )
                    # Of a start that was cut short a process may show itself yet.
                    self._adopt(files, launch, over=bool(launch.supervisors) and launch.uid not in seen)

    def _run_directories(self) -> list[Path]:
        """Raises Unavailable: an attempt that runs in one which cannot be seen would be started twice."""
        try:
            namespaces = [path for path in (self._data / "runs").iterdir() if is_directory(path)]
            return [directory for namespace in namespaces for directory in namespace.iterdir()]
        except OSError as error:
            raise _started_twice(error) from error

    def _adopt(self, files: AttemptFiles, launch: Launch, *, over: bool = False) -> ActiveAttempt:
        active = ActiveAttempt(files, launch, self._memory, self._keys.publish, over=over)
        if not active.gone:
            log.info("found a running attempt", job=launch.key, attempt=launch.attempt)
        self._active[launch.uid] = active
        return active

    def tell_of_strangers(self, jobs: Collection[str]) -> None:
        """Say which attempts run for none of these jobs (by uid), as where the store was moved away: they
        hold their slots until they end, and no command reaches them."""
        for active in self._unfinished():
            if active.launch.uid.rpartition("/")[0] not in jobs:
                log.warning(
                    "an attempt runs whose job is not in the store; it holds its slots until it ends",
                    job=active.key,
                    uid=active.launch.uid,
                    run=str(active.files.run.path),
                    to_end_it=f"kill {' '.join(str(one.pid) for one in active.launch.supervisors)}",
                )

    # ---------------------------------------------------------- background

    async def run(self) -> None:
        """Look after attempts until cancelled; cancelling stops no attempt."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(progress.poll(self._unfinished, self._keys.publish, self._targets))
            tasks.create_task(self._tend())

    def _unfinished(self) -> list[ActiveAttempt]:
        return [active for active in self._active.values() if not active.gone]

    async def _tend(self) -> None:
        while True:
            self._deleted = [active for active in self._deleted if not active.cleared]
            for active in [one for one in (*self._active.values(), *self._deleted) if not one.cleared]:
                try:
                    active.tend()
                except OSError as error:  # a full disk must not keep us from looking after the others
                    log.warning("cannot look after an attempt", job=active.key, error=str(error))
            self._start_what_fits()
            await asyncio.sleep(TEND_SECONDS)

    # --------------------------------------------------------------- engine

    def plan(self, job: TrainingJob) -> Plan:
        """The command and environment of each replica, as they would be on an empty machine."""
        request = request_of(job.spec)
        manifests: tuple[dict[str, Any], ...] = tuple(
            {
                "replica": launch.index,
                "command": list(launch.argv),
                "environment": _settled(launch.environment),
                "slots": {"cpu": float(request.cores), "gpu": float(request.gpus)},
            }
            for launch in self._planned(job)
        )
        notes = ["The master port is chosen at the start, and so is CUDA_VISIBLE_DEVICES."]
        notes += (*sharing_notes(job.spec.gpus), *(note for _, note in spec_notes(job.spec)))
        for name, value in (
            ("image", job.spec.image),
            ("queue", job.spec.queue),
            ("priority", job.spec.priority),
            ("minReplicas", job.spec.min_replicas),
            ("capacity", job.spec.capacity is not Capacity.ANY),
            ("storage", job.spec.storage),
        ):
            if value:
                notes.append(f"The local engine does not use spec.{name}.")
        for name in job.spec.env:
            if name in GPUS_CHOSEN:
                notes.append(
                    f"The local engine says which GPUs a replica has: spec.env.{name} has no effect."
                )
        if job.spec.mig:
            notes.append(f"The local engine gives whole GPUs: mig {job.spec.mig} has no effect here.")
        limits = parent_group() is not None
        if job.spec.resources.memory:
            notes.append(
                "Each replica is held to resources.memory."
                if limits
                else "This machine does not let Holdfast limit memory (that takes a writable cgroup with the "
                "memory controller: root's, or one that systemd delegates): resources.memory has no effect."
            )
        reasons = (*never_fits(request, self._machine), *unstartable(job.spec, LONGEST_WORD))
        if limits:
            reasons += too_little_memory(job.spec)
        there = job.spec.working_dir
        if there is not None and (why := why_not_entered(there)):
            reasons += (f"spec.workingDir: {why}",)
        if there is None and (gone := directory_gone()):
            reasons += (f"{gone}: {DIRECTORY_GONE}",)
        if not self._runtime.pytorch:
            reasons += (
                f"jobs run by the controller's Python, {self._runtime.python}, which has no PyTorch: "
                "pip install 'holdfast[trainer]' there, and start the controller again",
            )
        return Plan(self.name, manifests, reasons, tuple(notes))

    def _planned(self, job: TrainingJob) -> tuple[ReplicaLaunch, ...]:
        """Of the next attempt, on an empty machine."""
        request = request_of(job.spec)
        return replica_launches(
            job,
            job.status.attempt + 1,
            run_directory(self._data, job),
            machine=self._machine,
            allocation=tuple(Grant(request.cores) for _ in range(request.replicas)),
            master_port=0,
            runtime=self._runtime,
        )

    async def objections(self, job: TrainingJob) -> tuple[str, ...]:
        environment = {**inherited(os.environ), **self._planned(job)[0].environment}
        del environment[ENV_ATTEMPT_UID]  # no process of an attempt
        environment |= {"RANK": "0", "WORLD_SIZE": str(job.spec.world_size)}
        return await asyncio.to_thread(
            objections, job.spec.command, dump(job.spec.config), environment, job.spec.working_dir
        )

    async def start(self, job: TrainingJob, attempt: int) -> None:
        uid = attempt_uid(job, attempt)
        with suppress(OSError):  # whose record cannot be read waits until it can
            if self._known(job, attempt) is not None:
                return
        reasons = never_fits(request_of(job.spec), self._machine)
        self._queue[uid] = _Queued(job, attempt, waiting="; ".join(reasons))
        self._start_what_fits()

    def _start_what_fits(self) -> None:
        """Ask slots.py who is next, and start them."""
        now = time.monotonic()
        waiting = sorted(
            (
                queued
                for queued in self._queue.values()
                if queued.not_before <= now and not never_fits(request_of(queued.job.spec), self._machine)
            ),
            key=lambda queued: (queued.job.metadata.creation_timestamp, queued.job.metadata.uid),
        )
        if not waiting:
            return
        by_key = {queued.job.key: queued for queued in waiting}
        line = [Waiting(key, request_of(queued.job.spec)) for key, queued in by_key.items()]
        admitted, waits = admit(line, self._machine, self._in_use())
        for key, reason in waits.items():
            if by_key[key].waiting != reason:
                by_key[key].waiting = reason
                self._keys.publish(key)
        for key, allocation in admitted.items():
            queued = by_key[key]
            try:
                self._launch(queued.job, queued.attempt, allocation)
            except OSError as error:
                queued.waiting = (
                    f"cannot start yet, tried again every {RETRY_SECONDS:g} s: "
                    f"{error.filename or 'this machine'}: {error.strerror}"
                )
                queued.not_before = now + RETRY_SECONDS
            except UnicodeEncodeError as error:
                unknown = error.object[error.start : error.end]
                queued.waiting = (
                    f"cannot start: the controller's locale ({error.encoding}) has no character for "
                    f"{unknown!a}, which the job's command, env or directory has: start `holdfast up` in one "
                    "that has, as with LC_ALL=C.UTF-8"
                )
                queued.not_before = now + RETRY_SECONDS
            except ValueError as error:  # a fence that holds no number, a command with a NUL in it
                queued.waiting = f"cannot start: {error}; delete the job and submit it again"
                queued.not_before = now + RETRY_SECONDS
            else:
                del self._queue[attempt_uid(queued.job, queued.attempt)]
            self._keys.publish(key)

    def _in_use(self) -> dict[str, Allocation]:
        """By job. Under one key there may be two: its job, and one of that name whose store is gone."""
        held: dict[str, Allocation] = {}
        for active in self._unfinished():
            held[active.key] = held.get(active.key, ()) + active.launch.allocation
        return held

    def slots(self) -> Mapping[str, tuple[float, float]]:
        """Slots used and in all, by resource (`cpu`, `gpu`)."""
        return usage(self._machine, self._in_use())

    def gpus_held(self) -> list[GpuGrant]:
        """Every GPU that a replica has, whether it uses it or not."""
        return [
            GpuGrant(active.key, active.launch.attempt, replica, gpu)
            for active in self._unfinished()
            for replica, grant in enumerate(active.launch.allocation)
            for gpu in grant.gpus
        ]

    def _launch(self, job: TrainingJob, attempt: int, allocation: Allocation) -> None:
        """Raises what `start_attempt` does, and OSError where the attempt runs in a copy, or the original, of
        our directory: the processes of the two would be told apart by nothing."""
        if self._known(job, attempt) is not None:
            return
        for uid in [uid for uid, old in self._active.items() if old.key == job.key and old.cleared]:
            del self._active[uid]
        run = run_directory(self._data, job)
        if (other := _elsewhere(run.path, process.find(attempt_uid(job, attempt)))) is not None:
            raise OSError(
                errno.EBUSY,
                f"attempt {attempt} of {job.key} runs in {other}, and of the two data directories one is a "
                "copy; suspend the job there first, or let it finish",
                str(run.path),
            )
        started = start_attempt(
            job, attempt, run, machine=self._machine, allocation=allocation, runtime=self._runtime
        )
        self._active[started.launch.uid] = ActiveAttempt(
            AttemptFiles(run, attempt),
            started.launch,
            self._memory,
            self._keys.publish,
            to_reap=started.killed,
            refused=started.refused,
        )

    def _known(self, job: TrainingJob, attempt: int) -> ActiveAttempt | None:
        """The started attempt, from memory or from its directory."""
        uid = attempt_uid(job, attempt)
        if (active := self._active.get(uid)) is not None:
            return active
        files = AttemptFiles(run_directory(self._data, job), attempt)
        launch = files.launch()
        return None if launch is None else self._adopt(files, launch)

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        queued = self._queue.get(attempt_uid(job, attempt))
        if queued is not None:
            replicas = tuple(
                ReplicaObservation(index, ReplicaState.PENDING, queued.waiting)
                for index in range(job.spec.replicas)
            )
            return AttemptObservation(attempt, True, False, replicas, queued.waiting or "waits for its turn")
        active = self._known(job, attempt)
        if active is None:
            await self._end_unrecorded(job, attempt)
            return AttemptObservation(attempt, exists=False, gone=True)
        active.tend()
        seen = active.observe()
        spec = job.as_of(attempt).spec
        place = place_of(self._node(spec), spec, self._prices)
        return replace(seen, places=(place,) * spec.replicas, placed_at=seen.started_at)

    async def _end_unrecorded(self, job: TrainingJob, attempt: int) -> None:
        """End what runs of an attempt of which nothing is on record, as where its run directory was removed
        and this controller started after that: the next attempt would run beside it, and it for ever once its
        job is deleted. Raises Unavailable where it does not end."""
        uid, run = attempt_uid(job, attempt), run_directory(self._data, job).path
        if uid in self._unrecorded:
            return
        end = time.monotonic() + END_SECONDS
        while self._known(job, attempt) is None:
            left = process.find(uid)
            if not left or _elsewhere(run, left) is not None:
                self._unrecorded.add(uid)
                return
            pids = [one.pid for one in left]
            if time.monotonic() > end:
                raise Unavailable(f"processes {pids} of attempt {attempt} of {job.key} do not end")
            log.warning("ending what runs without a record", job=job.key, run=str(run), pids=pids)
            process.kill_all(uid)
            await asyncio.sleep(TEND_SECONDS)

    def _node(self, spec: Spec) -> Node:
        """This machine as a node, cut into the slices that the job asks for."""
        gpus = gpu_request(spec.gpus)
        there = {"cpu": self._machine.cores}
        if gpus.on_gpu:
            there[gpus.resource] = self._machine.gpus * (gpus.slices or 1)
        return Node(socket.gethostname(), {}, {name: str(number) for name, number in there.items()})

    async def stop(self, job: TrainingJob, attempt: int) -> None:
        if self._queue.pop(attempt_uid(job, attempt), None) is not None:
            self._keys.publish(job.key)
        elif (active := self._known(job, attempt)) is not None:
            active.stop(job.as_of(attempt).spec.grace_seconds)

    async def kill(self, job: TrainingJob, attempt: int, *, stacks: bool = False) -> None:
        if self._queue.pop(attempt_uid(job, attempt), None) is not None:
            self._keys.publish(job.key)
        elif (active := self._known(job, attempt)) is not None:
            active.kill(stacks=stacks)

    async def drill(self, job: TrainingJob, attempt: int, replica: int, kind: DrillKind) -> None:
        active = self._known(job, attempt)
        if active is None or active.gone:
            raise NotReady(
                f"attempt {attempt} of job {job.key} is not running, so no replica of it can be disrupted"
            )
        active.drill(replica, kind, job.as_of(attempt).spec.grace_seconds)
        self._keys.publish(job.key)

    async def delete(self, job: TrainingJob) -> None:
        prefix = f"{job.metadata.uid}/"
        for uid in [uid for uid in self._queue if uid.startswith(prefix)]:
            del self._queue[uid]
        for uid in [uid for uid in self._active if uid.startswith(prefix)]:
            self._active[uid].kill()
            self._deleted.append(self._active.pop(uid))
        directory = run_directory(self._data, job).path
        try:
            await asyncio.to_thread(_remove_tree, directory)
        except OSError as error:
            raise Unavailable(f"cannot remove {error.filename or directory}: {error.strerror}") from error

    # -------------------------------------------------------------- records

    def run_directory(self, job: TrainingJob) -> str:
        return str(run_directory(self._data, job).path)

    async def ledger(self, job: TrainingJob) -> list[dict[str, Any]]:
        run = run_directory(self._data, job)
        return await asyncio.to_thread(of_attempts, run, lambda attempt: read_lines(run.ledger(attempt)))

    async def keep_logs(self, job: TrainingJob, attempt: int) -> None:
        """They are files, which stay."""

    async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        return await asyncio.to_thread(all_steps, run_directory(self._data, job))

    async def ends_of_steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        return await asyncio.to_thread(ends_of_steps, run_directory(self._data, job))

    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        run = run_directory(self._data, job)
        started = is_directory(run.attempt(attempt))
        if not started and attempt_uid(job, attempt) not in self._queue:
            if (record := job.status.record(attempt)) is not None and record.started_at is not None:
                raise NotFound(
                    f"nothing is left of what attempt {attempt} of job {job.key} wrote: "
                    f"{run.attempt(attempt)} was removed"
                )
            raise NotFound(
                f"job {job.key} has no attempt {attempt}; it has {run.attempt_numbers() or 'none yet'}"
            )
        launch = AttemptFiles(run, attempt).launch()
        world = launch.replicas * launch.processes_per_replica if launch else job.spec.world_size
        if not 0 <= rank < world:
            raise NotFound(f"job {job.key} has no rank {rank}; they are numbered 0 to {world - 1}")

        def over() -> bool:
            active = self._active.get(attempt_uid(job, attempt))
            return active.gone if active is not None else attempt_uid(job, attempt) not in self._queue

        path = run.rank_log(attempt, rank)
        async with aclosing(logs.read(path, tail=tail, over=over if follow else None)) as lines:
            async for line in lines:
                yield line

    async def changes(self) -> AsyncIterator[str]:
        async with aclosing(self._keys.follow()) as keys:
            async for key in keys:
                yield key


def _started_twice(error: OSError) -> Unavailable:
    return Unavailable(
        f"cannot read {error.filename}: {error.strerror}; what runs there would be started twice: "
        "make it readable, or choose another data directory"
    )


def _settled(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is chosen at the start."""
    return {name: value for name, value in environment.items() if name != VARIABLE}


def _remove_tree(directory: Path) -> None:
    """Where somebody has left a link to it elsewhere, the link alone: what is there may be more than this
    job's, as where two jobs share it."""
    if directory.is_symlink():
        log.warning(
            "a run directory is a link; what it leads to stays",
            run=str(directory),
            to=os.path.realpath(directory),
        )
        directory.unlink()
    elif exists(directory):
        shutil.rmtree(directory)


def _elsewhere(directory: Path, processes: Iterable[ProcessId]) -> Path | None:
    """The other run directory that one of these, of an attempt of ours, was started in, if it is still there:
    one of the two is a copy. Where ours was moved, or is reached by another path, there is none."""
    for one in processes:
        with suppress(*process.NOT_TO_BE_SEEN):
            variables = process.environment(one.pid) if process.alive(one) else ()
            for variable in variables:
                name, _, value = os.fsdecode(variable).partition("=")
                if name != ENV_RUN_DIR or not exists(place := Path(value)):
                    continue
                if not exists(directory) or not place.samefile(directory):
                    return place
    return None
