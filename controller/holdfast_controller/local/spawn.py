"""Start the processes of an attempt: each replica in a session of its own, output to files, never pipes.

So they outlive the controller, and a controller that comes back finds them (see process.py).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from holdfast_controller.gang import attempt_uid
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.policy.quantity import quantity
from holdfast_controller.yaml_text import dump
from holdfast_trainer.contract import RunDir, make_directory, raise_fence

from .launch import HOST, ReplicaLaunch, Runtime, config_path, replica_launches
from .memory import MemoryGroup, parent_group
from .ports import free_port
from .process import ProcessId, boot_id, find, identify, kill_all, out_of_memory_kills
from .record import AttemptFiles, Launch
from .slots import Allocation, Machine

log = structlog.get_logger(__name__)

DIRECTORY_GONE = (
    "it was removed since `holdfast up` was started in it, and jobs start there: end the controller and "
    "start it in a directory that is there (jobs run on meanwhile), or give the job a workingDir"
)
_NOT_INHERITED = ("HOLDFAST_", "PET_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_NOT_INHERITED_NAMES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


def directory_gone() -> str:
    """The directory that jobs start in unless they name another, where it is there no more; else empty.

    Whoever removes it and makes it anew, as by cloning once more, leaves this process in what is gone, and so
    all that it starts.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    return ""


@dataclass(frozen=True)
class Started:
    """What came of a start."""

    launch: Launch
    killed: tuple[int, ...] = ()
    """Pids of supervisors, children of ours to be reaped, where the start was cut short."""
    refused: str = ""
    """What the machine said then."""


def start_attempt(
    job: TrainingJob, attempt: int, run: RunDir, *, machine: Machine, allocation: Allocation, runtime: Runtime
) -> Started:
    """Fence, record, start every replica, record again.

    Raises OSError where nothing was started, ValueError for a fence that holds no number and for words that
    no process can be started with: then no record and no cgroup of the start is left. Where only part of the
    replicas could be started they are killed, and the record says that the start was cut short.
    """
    if job.spec.working_dir is None and (gone := directory_gone()):
        raise OSError(errno.ENOENT, DIRECTORY_GONE, gone)
    files = AttemptFiles(run, attempt)
    raise_fence(run, attempt)  # first: where the disk is full, it makes the room that a directory takes
    make_directory(files.directory)
    config_path(run, attempt).write_text(dump(job.spec.config), encoding="utf-8")
    launch = Launch(
        key=job.key,
        uid=attempt_uid(job, attempt),
        attempt=attempt,
        boot=boot_id(),
        started=time.time(),
        master_port=free_port(HOST),
        processes_per_replica=job.spec.processes_per_replica,
        out_of_memory_kills=out_of_memory_kills(),
        allocation=allocation,
    )
    replicas = replica_launches(
        job,
        attempt,
        run,
        machine=machine,
        allocation=allocation,
        master_port=launch.master_port,
        runtime=runtime,
    )
    groups: dict[int, MemoryGroup] = {}
    supervisors: list[ProcessId] = []
    try:
        files.write_launch(launch)
        groups = memory_groups(job, launch)
        for each in replicas:
            supervisors.append(spawn(each, run, attempt))
            if (group := groups.get(each.index)) is not None:
                _hold(group, supervisors[-1].pid, job, launch.uid, each.index)
        complete = replace(launch, supervisors=tuple(supervisors))
        files.write_launch(complete)
    except (OSError, ValueError) as error:
        if not supervisors:
            _remove(groups)
            files.forget_launch()
            raise
        kill_all(launch.uid)
        log.warning("an attempt was started only in part", job=job.key, attempt=attempt, error=str(error))
        return Started(launch, tuple(supervisor.pid for supervisor in supervisors), str(error))
    return Started(complete)


def memory_groups(job: TrainingJob, launch: Launch) -> dict[int, MemoryGroup]:
    """One a replica where this machine lets us, else none at all: a group without its replica would count for
    it that nothing was killed. Raises OSError where the limit of a job cannot be set."""
    parent, memory = parent_group(), job.spec.resources.memory
    if parent is None:
        return {}
    groups = {index: MemoryGroup(parent, launch.uid, index) for index in range(launch.replicas)}
    try:
        for group in groups.values():
            group.make(int(quantity(memory)) if memory is not None else None)
    except OSError as error:
        _remove(groups)
        _missed(job, error)
        return {}
    return groups


def _remove(groups: Mapping[int, MemoryGroup]) -> None:
    for group in groups.values():
        group.remove()


def _hold(group: MemoryGroup, pid: int, job: TrainingJob, uid: str, replica: int) -> None:
    """Put a replica's first process into the group, and what it has started before it was there: on a busy
    machine Python may be up by then. Memory that was taken before stays uncounted. Raises OSError where the
    job has a limit and `pid` cannot be held to it.
    """
    try:
        group.add(pid)
        while outside := {each.pid for each in find(uid, replica)} - group.processes():
            for other in outside:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    group.add(other)
    except OSError as error:
        group.remove()
        _missed(job, error)


def _missed(job: TrainingJob, error: OSError) -> None:
    """A limit must be kept, a count can be missed. Raises `error`."""
    if job.spec.resources.memory is not None:
        raise error
    log.warning("kills for memory are not counted by replica", job=job.key, error=str(error))


def spawn(launch: ReplicaLaunch, run: RunDir, attempt: int) -> ProcessId:
    """Start one replica. Raises OSError.

    The controller's own settings (HOLDFAST_*, its token among them) are not passed on.
    """
    log = str(run.replica_log(attempt, launch.index))
    pid = os.posix_spawn(
        launch.argv[0],
        list(launch.argv),
        {**inherited(os.environ), **launch.environment},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    )
    try:
        return identify(pid) or ProcessId(pid, 0)  # ended already: an identity that no process has
    except OSError:
        os.kill(pid, signal.SIGKILL)  # or it would run, and nobody know it
        os.waitpid(pid, 0)
        raise


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The controller's environment without what belongs to it, or to a torchrun around it."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_NOT_INHERITED) and name not in _NOT_INHERITED_NAMES
    }
