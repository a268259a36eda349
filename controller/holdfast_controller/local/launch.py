"""What starts for an attempt, as plain values: pure, so the dry run shows exactly what would run.

Each replica is a supervised torchrun, each of its ranks a supervised run of the job's command::

    supervise (replica-I.log, replica-I.exit)
      torchrun --node-rank=I
        supervise (rank-N.log, rank-N.exit)
          COMMAND
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from holdfast_controller.gang import (
    TORCHRUN,
    rank_environment,
    rendezvous_id,
    run_name,
    shutdown_timeout,
    supervised_rank,
)
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.spec import LOG_LIMIT
from holdfast_controller.visible_gpus import VARIABLE
from holdfast_trainer.contract import ENV_PORT, ENV_REPLICA, ENV_TERMINATION_LOG, RunDir

from .slots import Grant, Machine

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Runtime:
    """What runs on this machine: the interpreter, and the torchrun it starts replicas with."""

    python: str
    torchrun: tuple[str, ...]
    log_limit: str = LOG_LIMIT
    """What the log of a rank may take of the disk."""
    pytorch: bool = True
    """Whether the interpreter has it."""

    @classmethod
    def of_this_process(cls, log_limit: str = LOG_LIMIT) -> Runtime:
        python = sys.executable
        return cls(python, (python, "-m", TORCHRUN), log_limit, pytorch=find_spec("torch") is not None)


@dataclass(frozen=True)
class ReplicaLaunch:
    """One replica, ready to be started."""

    index: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """What the platform and the job set; the controller's own environment lies under it."""


def run_directory(data: Path, job: TrainingJob) -> RunDir:
    """Where the job's checkpoints and logs lie."""
    return RunDir(data / "runs" / run_name(job))


def config_path(run: RunDir, attempt: int) -> Path:
    return run.attempt(attempt) / "config.yaml"


def replica_launches(
    job: TrainingJob,
    attempt: int,
    run: RunDir,
    *,
    machine: Machine,
    allocation: tuple[Grant, ...],
    master_port: int,
    runtime: Runtime,
) -> tuple[ReplicaLaunch, ...]:
    """Command line and environment of every replica."""
    return tuple(
        ReplicaLaunch(
            index,
            replica_command(job, attempt, run, index, master_port, runtime),
            replica_environment(job, attempt, run, index, grant, machine, runtime),
        )
        for index, grant in enumerate(allocation)
    )


def replica_command(
    job: TrainingJob, attempt: int, run: RunDir, replica: int, master_port: int, runtime: Runtime
) -> tuple[str, ...]:
    """torchrun with static rendezvous (who is who is known), supervised, around supervised ranks."""
    spec = job.spec
    return (
        runtime.python,
        "-m",
        "holdfast_trainer.supervise",
        "--log",
        str(run.replica_log(attempt, replica)),
        "--exit",
        str(run.replica_exit(attempt, replica)),
        *(() if spec.working_dir is None else ("--directory", spec.working_dir)),
        "--",
        *runtime.torchrun,
        f"--nnodes={spec.replicas}",
        f"--node-rank={replica}",
        f"--nproc-per-node={spec.processes_per_replica}",
        "--rdzv-backend=static",
        f"--rdzv-id={rendezvous_id(job, attempt)}",
        f"--master-addr={HOST}",
        f"--master-port={master_port}",
        f"--local-addr={HOST}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--shutdown-timeout={shutdown_timeout(spec.grace_seconds)}",
        # Else each attempt leaves a directory in /tmp, which nobody removes where torchrun is killed.
        f"--log-dir={run.attempt(attempt) / 'torchrun'}",
        "--",
        *supervised_rank(job, attempt, run, ("--die-with-parent",)),
    )


def replica_environment(
    job: TrainingJob,
    attempt: int,
    run: RunDir,
    replica: int,
    grant: Grant,
    machine: Machine,
    runtime: Runtime,
) -> dict[str, str]:
    """What a replica and its ranks see; the job's own `env` cannot override what the platform sets."""
    spec = job.spec
    per_rank = grant.cores / spec.processes_per_replica if grant.cores else machine.cores // spec.world_size
    # Programs of the job's own PATH are found, and `python` is the one that runs jobs in any case.
    paths = (Path(runtime.python).parent, spec.env.get("PATH"), os.environ.get("PATH", os.defpath))
    platform = {
        **rank_environment(
            job,
            attempt,
            run,
            config=str(config_path(run, attempt)),
            grace_seconds=spec.grace_seconds,
            log_limit=runtime.log_limit,
        ),
        ENV_PORT: "0",  # many jobs on one machine: any free port, told in progress.address
        ENV_REPLICA: str(replica),
        ENV_TERMINATION_LOG: str(run.termination(attempt, replica)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbers that NVML has, by which they are seen
        VARIABLE: ",".join(str(device) for device in grant.gpus),
        "SPT_NOENV": "1",  # else setproctitle, as Ray uses it, wipes out what processes are told apart by
        "PATH": os.pathsep.join(str(path) for path in paths if path),
    }
    ours = {"OMP_NUM_THREADS": str(max(1, int(per_rank))), "PYTHONUNBUFFERED": "1"}
    return {**ours, **spec.env, **platform}
