"""What every engine starts alike: the supervised rank and the environment the platform sets.

Under torchrun (holdfast_trainer/torchrun.py) each rank is a supervised run of the job's command
(supervise.py), which keeps its output and the way it ended in the run directory. Where the two engines
differ (how torchrun finds its peers, what stands around it) is theirs: local/launch.py and manifests.py.
"""

from __future__ import annotations

import hashlib

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.policy.quantity import quantity
from holdfast_trainer.contract import (
    ENV_ATTEMPT,
    ENV_ATTEMPT_UID,
    ENV_CHECKPOINT_EVERY,
    ENV_CHECKPOINT_KEEP,
    ENV_CONFIG,
    ENV_DURABLE_STEP,
    ENV_GRACE_SECONDS,
    ENV_HANG_SECONDS,
    ENV_JOB,
    ENV_LOG_BYTES,
    ENV_RUN_DIR,
    RunDir,
)

TORCHRUN = "holdfast_trainer.torchrun"
"""The module that every replica starts with."""


def run_name(job: TrainingJob) -> str:
    """`namespace/name-uid`: the uid keeps a second job of one name away from the first one's checkpoints."""
    meta = job.metadata
    return f"{meta.namespace}/{meta.name}-{meta.uid[:8]}"


def attempt_uid(job: TrainingJob, attempt: int) -> str:
    """Unique to an attempt of a job; processes carry it in their environment."""
    return uid_of_attempt(job.metadata.uid, attempt)


def uid_of_attempt(job_uid: str, attempt: int) -> str:
    return f"{job_uid}/{attempt}"


def rendezvous_id(job: TrainingJob, attempt: int) -> str:
    """torchrun's --rdzv-id, which is a part of file names too."""
    return hashlib.sha256(attempt_uid(job, attempt).encode()).hexdigest()[:12]


def shutdown_timeout(grace_seconds: float) -> int:
    """torchrun's --shutdown-timeout: it kills its ranks so long after a notice.

    Whole seconds (torchrun takes no fractions) that leave it a tenth, at least 1 s, to end itself: or the
    engine's own SIGKILL at the end of the grace would come first, and nobody would say how ranks ended.
    """
    return max(1, int(grace_seconds - max(1.0, grace_seconds / 10)))


def supervised_rank(job: TrainingJob, attempt: int, run: RunDir, options: tuple[str, ...]) -> tuple[str, ...]:
    """What torchrun starts for each rank; `options` are those of its supervisor that the engine has."""
    directory = run.attempt(attempt)
    return (
        *options,
        "--log",
        str(directory / "rank-{RANK}.log"),
        "--exit",
        str(directory / "rank-{RANK}.exit"),
        "--",
        *job.spec.command,
    )


def rank_environment(
    job: TrainingJob, attempt: int, run: RunDir, *, config: str, grace_seconds: float, log_limit: str
) -> dict[str, str]:
    """What the trainer is told (contract.py) wherever it runs; the rest is the engine's to add."""
    spec = job.spec
    saved = job.status.saved_before(attempt)
    return {
        **({} if saved is None else {ENV_DURABLE_STEP: str(saved)}),
        ENV_RUN_DIR: str(run.path),
        ENV_JOB: job.key,
        ENV_ATTEMPT: str(attempt),
        ENV_CONFIG: config,
        ENV_GRACE_SECONDS: f"{grace_seconds:g}",
        ENV_CHECKPOINT_EVERY: spec.checkpoint.every,
        ENV_CHECKPOINT_KEEP: str(spec.checkpoint.keep),
        ENV_HANG_SECONDS: "auto" if spec.hang_seconds is None else str(spec.hang_seconds),
        ENV_ATTEMPT_UID: attempt_uid(job, attempt),
        ENV_LOG_BYTES: str(int(quantity(log_limit))),
    }
