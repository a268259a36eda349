"""The domain: what a TrainingJob is, and what is known about it.

What a user asks for is in spec.py; here is what comes of it. The OpenAPI schema and the CRD are generated
from these classes, so every description here is read by users.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from .breakdown import BreakdownOfStart, CostOfAttempt, GoodputOfAttempt, Placed, RecoverySeconds
from .spec import (
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    Capacity,
    JobName,
    Model,
    Namespace,
    Retries,
    Spec,
    Storage,
    cores,
)

__all__ = [  # of spec.py, that whoever works with jobs finds it here
    "RESERVED_ENV",
    "RESERVED_ENV_PREFIXES",
    "Capacity",
    "JobName",
    "Model",
    "Namespace",
    "Retries",
    "Spec",
    "Storage",
    "cores",
]

API_VERSION = "holdfast.dev/v1alpha1"
KIND = "TrainingJob"

ATTEMPTS_KEPT = 20
"""In a job's status."""
TAIL_RANKS = 8
"""Of an attempt in status; `Engine.keep_logs` sees to those of a larger gang."""


# --------------------------------------------------------------------- status


class Phase(StrEnum):
    """Where a job stands. Succeeded and Failed are final."""

    QUEUED = "Queued"
    """waits for room; the condition says why"""
    STARTING = "Starting"
    RUNNING = "Running"
    """at least one step is done in this attempt"""
    RECOVERING = "Recovering"
    """an attempt ended; the next one follows (after a back-off, where it was a failure)"""
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Verdict(StrEnum):
    """What an incident was; policy/classify.py decides it from evidence."""

    FINISHED = "Finished"
    DISRUPTED = "Disrupted"
    LOST_NODE = "LostNode"
    """a disruption: its node went, and nobody could tell how the replica ended"""
    SUSPENDED = "Suspended"
    FAILED = "Failed"
    OUT_OF_MEMORY = "OutOfMemory"
    HUNG = "Hung"
    CONFIG_ERROR = "ConfigError"
    UNSCHEDULABLE = "Unschedulable"
    """a part of the gang ran and waited in vain for a replica that found no place"""
    IMAGE_PULL = "ImagePull"
    """likewise, for one whose image did not come"""
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    """it could not begin: its run directory had no room, or the object store of that did not answer"""


class AttemptRecord(Model):
    """One gang start of all replicas, as it is remembered."""

    number: int
    opened_at: datetime | None = Field(default=None, description="When it was decided that it should be.")
    made_of: str | None = Field(
        default=None, description="A digest of what the spec asked of it when it was started."
    )
    capacity: Capacity | None = Field(
        default=None, description="The nodes it was opened for, where they are others than the job asks for."
    )
    replicas: int | None = Field(
        default=None, description="How many it has, whatever the job asks for now; at times fewer than all."
    )
    processes: int | None = Field(default=None, description="Ranks per replica that it has, likewise.")
    grace_seconds: float | None = Field(
        default=None, description="That its replicas have after a notice, likewise."
    )
    placed: int | None = Field(
        default=None, description="How many replicas ran when it was given up because others had no place."
    )
    placed_at: datetime | None = Field(
        default=None, description="When the last replica got its place on a node."
    )
    started_at: datetime | None = None
    first_step_at: datetime | None = None
    detected_at: datetime | None = Field(
        default=None, description="When it was known that it had lost a replica."
    )
    ended_at: datetime | None = None
    recovery_seconds: RecoverySeconds = None
    breakdown: BreakdownOfStart = None
    whereabouts: Placed = None
    cost: CostOfAttempt = None
    resumed_seconds: float | None = Field(
        default=None, description="Time spent on the steps up to resumedStep, by all attempts that count."
    )
    useful_seconds: float | None = Field(
        default=None, description="Time that it spent on steps that count; corrected as lostSteps is."
    )
    goodput: GoodputOfAttempt = None
    ending: Verdict | None = Field(
        default=None,
        description="What Holdfast ends it for, where it could not go on and did not end by itself.",
    )
    verdict: Verdict | None = None
    reason: str = Field(default="", description="The evidence, in a sentence.")
    resumed_step: int | None = None
    resume_differences: list[str] = Field(
        default_factory=list,
        description="What was not as it was where that checkpoint was written: its bits may differ.",
    )
    passed_over: list[str] = Field(
        default_factory=list,
        description="Newer checkpoints that could not be gone on from, as damaged ones, each with why.",
    )
    last_step: int | None = None
    durable_step: int | None = None
    lost_steps: int | None = Field(
        default=None, description="Steps done and not covered by a durable checkpoint when it ended."
    )
    world_size: int | None = None
    first_step: int | None = None
    checkpoints: int | None = Field(default=None, description="How many it made durable.")
    outcome: str | None = Field(default=None, description="As its rank 0 told at the end, if it could.")
    digest: str | None = Field(
        default=None, description="Of the state in the checkpoint of durableStep, over all ranks."
    )
    last_sign_at: datetime | None = Field(default=None, description="When its rank 0 was last heard of.")
    log_tail: dict[str, str] = Field(
        default_factory=dict,
        description="Last lines of each rank's output, by rank; of the newest attempts that did not succeed.",
    )


class Condition(Model):
    """As Kubernetes conditions: types are Admitted, Running, Suspended, Complete, Failed; GPUsIdle."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: datetime


class JobProgress(Model):
    """The trainer's own figures, as rank 0 last served them; None is not known, never zero."""

    attempt: int | None = Field(default=None, description="The attempt that served them.")
    step: int = 0
    total_steps: int | None = None
    durable_step: int = 0
    durable_seconds: float | None = Field(
        default=None, description="Time spent on the steps up to durableStep, by all attempts that count."
    )
    checkpoints: int | None = None
    save_fault: str | None = Field(
        default=None, description="Why the newest save failed; the steps after durableStep are at risk."
    )
    training_phase: str = ""
    loss: float | None = None
    loss_ema: float | None = Field(
        default=None,
        description="Mean of the attempt's losses, each counting 2 % less than the one after it.",
    )
    val_loss: float | None = None
    grad_norm: float | None = None
    epoch: float | None = Field(
        default=None, description="How often all attempts together went through the data."
    )
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    data_wait_fraction: float | None = None
    mfu: float | None = None
    gpu_utilization: float | None = Field(
        default=None, description="Share of time in which a kernel ran on rank 0's GPU, anybody's."
    )
    cpu_utilization: float | None = Field(
        default=None, description="Where it computes on the CPU: what rank 0 used of the cores it may use."
    )
    memory_bytes: int | None = Field(
        default=None,
        description="Rank 0's at most so far, in this attempt: of a GPU what tensors took, else what was "
        "resident.",
    )
    eta_seconds: float | None = None
    verdict: str | None = Field(
        default=None,
        description="Where a step's time goes, what holds it back, and what to change, as the trainer says.",
    )
    updated_at: datetime | None = Field(
        default=None, description="When these figures were taken: older where no controller can renew them."
    )


class Status(Model):
    """Observed, never set by users. Bounded: the last 20 attempts; the ledger has all."""

    phase: Phase = Phase.QUEUED
    observed_generation: int = 0
    attempt: int = Field(default=0, description="Number of the newest attempt opened.")
    disruptions: int = 0
    failures: int = 0
    lost_steps: int = Field(default=0, description="Over all attempts, as far as they tell their steps.")
    useful_seconds: float | None = Field(
        default=None, description="Time spent on steps that count, over all attempts."
    )
    goodput: float | None = Field(
        default=None, description="Time spent on steps that count / wall time since the job first ran."
    )
    cost: float | None = Field(
        default=None,
        description="Of all attempts, in costCurrency, as of the newest progress; None where one of them ran "
        "on a node without a price.",
    )
    cost_currency: str | None = None
    ended_cost: float = Field(default=0.0, description="Of the attempts that have ended and have a cost.")
    unpriced_attempts: int = Field(default=0, description="That ran, and whose cost is not known.")
    progress: JobProgress | None = None
    message: str = Field(default="", description="Why the job is in this phase, in one sentence.")
    next_start_at: datetime | None = Field(default=None, description="End of a back-off.")
    first_started_at: datetime | None = None
    finished_at: datetime | None = None
    conditions: list[Condition] = Field(default_factory=list)
    attempts: list[AttemptRecord] = Field(default_factory=list)

    def record(self, attempt: int) -> AttemptRecord | None:
        """Of this number; None where it is not remembered."""
        return next((one for one in self.attempts if one.number == attempt), None)


# ------------------------------------------------------------------------ job


def utcnow() -> datetime:
    return datetime.now(UTC)


class Metadata(Model):
    name: JobName
    namespace: Namespace = "default"
    uid: str = Field(default_factory=lambda: str(uuid.uuid4()))
    resource_version: str = Field(default="", description="Changes with every write.")
    generation: int = Field(default=1, description="Changes with every write of spec.")
    creation_timestamp: datetime = Field(default_factory=utcnow)
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Words of your own to select jobs by (`-l team=vision`), of the form that labels have in "
        "Kubernetes.",
    )
    annotations: dict[str, str] = Field(default_factory=dict)


class TrainingJob(Model):
    """A training job: what a user submits; it lives until it is deleted or its TTL ends."""

    api_version: Literal["holdfast.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["TrainingJob"] = KIND  # type: ignore[assignment]
    metadata: Metadata
    spec: Spec
    status: Status = Field(default_factory=Status)
    _faults: tuple[str, ...] = PrivateAttr(default=())

    @property
    def faults(self) -> tuple[str, ...]:
        """What of the stored spec cannot be read, a line a key; `spec` has the rest of it, and defaults.

        Empty for a job that was validated as a whole, so for all that REST made.
        """
        return self._faults

    def with_faults(self, faults: tuple[str, ...]) -> TrainingJob:
        self._faults = faults
        return self

    def as_of(self, attempt: int) -> TrainingJob:
        """As that attempt was opened: with its nodes, its size and its grace, where those are others.

        A spec may be changed while an attempt runs, and what runs is not changed by that. What the record
        does not say (an older controller has opened it) is taken to be as the job asks now.
        """
        record = self.status.record(attempt)
        if record is None:
            return self
        known = {
            "capacity": (record.capacity, self.spec.capacity),
            "replicas": (record.replicas, self.spec.replicas),
            "processes": (record.processes, self.spec.processes_per_replica),
            "grace_seconds": (record.grace_seconds, self.spec.grace_seconds),
        }
        changes = {key: then for key, (then, now) in known.items() if then not in (None, now)}
        if not changes:
            return self
        return self.model_copy(update={"spec": self.spec.model_copy(update=changes)})

    @property
    def key(self) -> str:
        """`namespace/name`, unique at any moment; `metadata.uid` is unique for ever."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, camelCase, as REST and kubectl show it."""
        return self.model_dump(mode="json", by_alias=True)
