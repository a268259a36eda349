"""The domain: what a TrainingJob is, and what is known about it.

Plain values, validated by pydantic, serialised in camelCase as Kubernetes does. The OpenAPI schema
and the CRD are generated from these classes, so every description here is read by users.
"""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

API_VERSION = "holdfast.dev/v1alpha1"
KIND = "TrainingJob"

JobName = Annotated[
    str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=50)
]
"""A DNS label with room for the `-<attempt>-worker-<n>` that Kubernetes object names add."""
Namespace = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)
]
ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", min_length=1, max_length=253)
]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]

RESERVED_ENV_PREFIXES = ("HOLDFAST_", "PET_", "TORCHELASTIC_")
RESERVED_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set by the platform; a job's env cannot name them."""


class Model(BaseModel):
    """camelCase outside, snake_case inside; an unknown key is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", validate_default=True
    )


# ----------------------------------------------------------------------- spec


class Capacity(StrEnum):
    SPOT = "Spot"
    ON_DEMAND = "OnDemand"
    ANY = "Any"


class Checkpoint(Model):
    """When the job saves and how many checkpoints it keeps."""

    every: str = Field(
        default="auto",
        description="`auto` (from measured cost), a number of steps such as `500`, or seconds such as `90s`.",
    )
    keep: int = Field(default=3, ge=1, le=1000, description="Newest checkpoints kept.")

    @field_validator("every", mode="before")
    @classmethod
    def _every(cls, value: object) -> str:
        text = str(value)
        if not re.fullmatch(r"auto|[1-9]\d*|[1-9]\d*s", text):
            raise ValueError(f"{text!r} is none of: auto, a number of steps (500), seconds (90s)")
        return text


class Retries(Model):
    """How often the job may start again; failures and disruptions are counted apart."""

    failures: int = Field(default=3, ge=0, le=1000, description="Restarts allowed for the job's own faults.")
    disruptions: int | None = Field(
        default=None,
        ge=0,
        description="Restarts allowed for replicas the platform took; unlimited unless given.",
    )


class Storage(Model):
    """Where the run directory lives."""

    claim: ObjectName = Field(
        description="PersistentVolumeClaim; the local engine uses its own data directory."
    )
    data: ObjectName | None = Field(
        default=None,
        description="PersistentVolumeClaim with the data to train on, seen read-only at /holdfast/data; "
        "on the local engine `config` names its paths.",
    )


class Resources(Model):
    """Per replica."""

    cpu: str | None = Field(default=None, description="Cores, e.g. `8` or `500m`.")
    memory: str | None = Field(default=None, description="E.g. `64Gi`.")

    @field_validator("cpu", mode="before")
    @classmethod
    def _cpu(cls, value: object) -> str | None:
        if value is None:
            return None
        text = str(value)
        if not re.fullmatch(r"\d+(\.\d+)?|\d+m", text) or not cores(text):
            raise ValueError(f"{text!r} is not a CPU quantity such as 8, 0.5 or 500m")
        return text

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?", value):
            raise ValueError(f"{value!r} is not a memory quantity such as 64Gi or 512Mi")
        return value


def cores(quantity: str) -> float:
    """Kubernetes CPU quantity to cores: `500m` is 0.5."""
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


class Spec(Model):
    """What to run. A narrow schema on purpose: never a pod spec."""

    image: str = Field(
        default="",
        max_length=512,
        description="Container image; the local engine runs this machine's own environment.",
    )
    command: list[str] = Field(min_length=1, max_length=256, description="Run on every rank under torchrun.")
    config: dict[str, Any] = Field(
        default_factory=dict, description="Any mapping; the YAML file that HOLDFAST_CONFIG names."
    )
    replicas: int = Field(default=1, ge=1, le=10_000, description="Pods of the gang.")
    gpus: str = Field(
        default="0",
        description="Per replica: 0 for CPU and gloo, a whole number, or a share of a GPU (`0.25`).",
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Ranks per replica; by default one per GPU, or one on CPU.",
    )
    capacity: Capacity = Field(default=Capacity.ANY, description="Spot, OnDemand or Any.")
    queue: Namespace | None = Field(default=None, description="Kueue LocalQueue.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    retries: Retries = Field(default_factory=Retries)
    storage: Storage | None = None
    resources: Resources = Field(default_factory=Resources)
    env: dict[EnvName, str] = Field(
        default_factory=dict, max_length=200, description="Literal environment variables."
    )
    grace_seconds: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="Seconds a replica has between the notice (SIGTERM) and SIGKILL.",
    )
    hang_seconds: int | None = Field(
        default=None,
        ge=0,
        le=604_800,
        description="Seconds without a step after which the attempt is ended as hung (0: never); "
        "by default 10 minutes, or 30 times the longest step where that is more.",
    )
    suspend: bool = Field(default=False, description="True: stop after a checkpoint, keep everything.")
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, description="Delete the job this long after it finished; never unless given."
    )

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus(cls, value: object) -> str:
        text = str(value)
        if not re.fullmatch(r"\d+(\.\d+)?", text):
            raise ValueError(f"{text!r} is not a number of GPUs such as 0, 1, 4 or 0.25")
        amount = Fraction(text)
        if amount > 1 and amount.denominator != 1:
            raise ValueError(f"{text} GPUs: only whole numbers above 1; a fraction is a share of one GPU")
        if 0 < amount < 1 and amount.numerator != 1:
            raise ValueError(f"{text} GPUs: a share is 1/N of a GPU, such as 0.5, 0.25 or 0.125")
        return str(int(amount)) if amount.denominator == 1 else text

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.startswith(RESERVED_ENV_PREFIXES) or name in RESERVED_ENV:
                raise ValueError(f"{name} is set by the platform and cannot be given in env")
        return value

    @model_validator(mode="after")
    def _one_rank_per_device(self) -> Spec:
        gpus = Fraction(self.gpus)
        if self.processes and gpus and self.processes > max(1, int(gpus)):
            raise ValueError(
                f"{self.processes} processes on {self.gpus} GPU: NCCL cannot run two ranks on one device; "
                f"give at most {max(1, int(gpus))} processes"
            )
        return self

    @property
    def processes_per_replica(self) -> int:
        """Ranks that torchrun starts in each replica."""
        return self.processes or max(1, int(Fraction(self.gpus)))

    @property
    def world_size(self) -> int:
        return self.replicas * self.processes_per_replica


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
    SUSPENDED = "Suspended"
    FAILED = "Failed"
    OUT_OF_MEMORY = "OutOfMemory"
    HUNG = "Hung"
    CONFIG_ERROR = "ConfigError"


class AttemptRecord(Model):
    """One gang start of all replicas, as it is remembered."""

    number: int
    started_at: datetime | None = None
    first_step_at: datetime | None = None
    ended_at: datetime | None = None
    verdict: Verdict | None = None
    reason: str = Field(default="", description="The evidence, in a sentence.")
    resumed_step: int | None = None
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
        description="Last lines of each rank's output, by rank; of unsuccessful attempts.",
    )


class Condition(Model):
    """As Kubernetes conditions: types are Admitted, Running, Suspended, Complete, Failed."""

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
    training_phase: str = ""
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    data_wait_fraction: float | None = None
    mfu: float | None = None
    eta_seconds: float | None = None
    verdict: str | None = Field(
        default=None,
        description="Where a step's time goes, what holds it back, and what to change, as the trainer says.",
    )
    updated_at: datetime | None = None


class Status(Model):
    """Observed, never set by users. Bounded: the last 20 attempts; the ledger has all."""

    phase: Phase = Phase.QUEUED
    observed_generation: int = 0
    attempt: int = Field(default=0, description="Number of the newest attempt opened.")
    disruptions: int = 0
    failures: int = 0
    lost_steps: int = Field(default=0, description="Over all attempts.")
    useful_seconds: float | None = Field(
        default=None, description="Time spent on steps that count, over all attempts."
    )
    goodput: float | None = Field(
        default=None, description="Time spent on steps that count / wall time since the job first ran."
    )
    progress: JobProgress | None = None
    message: str = Field(default="", description="Why the job is in this phase, in one sentence.")
    next_start_at: datetime | None = Field(default=None, description="End of a back-off.")
    first_started_at: datetime | None = None
    finished_at: datetime | None = None
    conditions: list[Condition] = Field(default_factory=list)
    attempts: list[AttemptRecord] = Field(default_factory=list)


# ------------------------------------------------------------------------ job


def _now() -> datetime:
    return datetime.now(UTC)


class Metadata(Model):
    name: JobName
    namespace: Namespace = "default"
    uid: str = Field(default_factory=lambda: str(uuid.uuid4()))
    resource_version: str = Field(default="", description="Changes with every write.")
    generation: int = Field(default=1, description="Changes with every write of spec.")
    creation_timestamp: datetime = Field(default_factory=_now)
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = Field(default_factory=dict)
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

    @property
    def key(self) -> str:
        """`namespace/name`, unique at any moment; `metadata.uid` is unique for ever."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, camelCase, as REST and kubectl show it."""
        return self.model_dump(mode="json", by_alias=True)
