"""What a user asks for: a TrainingJob's spec, key by key, with what each may be.

Plain values, validated by pydantic, serialised in camelCase as Kubernetes does. The OpenAPI schema and the
CRD are generated from these classes, so every description here is read by users.
"""

from __future__ import annotations

import hashlib
import json
import re
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic.alias_generators import to_camel

from holdfast_trainer.contract import CHECKPOINT_EVERY, DEEPEST, deeper_than

JOB_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
JOB_NAME_RULE = (
    "is no name: lower-case letters, digits and '-', first a letter, last no '-', at most 50 characters"
)
JobName = Annotated[str, StringConstraints(pattern=JOB_NAME, min_length=1, max_length=50)]
"""A DNS label with room for the `-<attempt>-worker-<n>` that Kubernetes object names add."""
NAMESPACE = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
NAMESPACE_RULE = "is no namespace: lower-case letters, digits and '-', no '-' at the ends, at most 63"
Namespace = Annotated[str, StringConstraints(pattern=NAMESPACE, min_length=1, max_length=63)]
OBJECT_NAME = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
ObjectName = Annotated[str, StringConstraints(pattern=OBJECT_NAME, min_length=1, max_length=253)]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Size = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$")]
"""Of bytes. No `m`, which is a thousandth: who writes `100m` means a hundred million."""
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME, max_length=128)]
ABSOLUTE = r"^/"
MIG_PROFILE = r"^[1-7]g\.[1-9][0-9]{0,2}gb(\.me)?$"
RULES = {
    NAMESPACE: "is no such name: lower-case letters, digits and '-', no '-' at the ends",
    OBJECT_NAME: "is no such name: lower-case letters, digits, '-' and '.', first and last a letter or digit",
    ENV_NAME: "is no variable's name: letters, digits and '_', first no digit",
    ABSOLUTE: "is no absolute path, which begins with /",
    MIG_PROFILE: "is no MIG profile, such as 1g.10gb",
}
"""What a value says that does not match its pattern."""

RESERVED_ENV_PREFIXES = ("HOLDFAST_", "PET_", "TORCHELASTIC_")
RESERVED_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set by the platform; a job's env cannot name them."""
MOST_CORES, MOST_GPUS, MOST_MEMORY = 1_000_000, 10_000, 1024.0
"""Of a replica, memory in Ti; more cannot be reckoned with."""
LONGEST_NUMBER = 32
"""Characters; nor with more behind the point."""
_IN_TI = {
    **{unit: 1000.0**power / 1024**4 for power, unit in enumerate(("", "k", "M", "G", "T"))},
    **{unit: 1024.0 ** (power - 4) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)},
}
LOG_LIMIT = "1Gi"
LOG_LIMIT_SAYS = (
    "Most that the log of a rank may take in the run directory: of a longer one the beginning and the newest "
    "end are kept, and how much is left out stands between them; 0: no limit."
)


class Model(BaseModel):
    """camelCase outside, snake_case inside; an unknown key is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", validate_default=True
    )


def not_given(model: Model) -> dict[str, Any]:
    """What of it is None, for pydantic's `exclude`, so that it is not kept: a Holdfast that has fewer keys
    then reads all that ask for none of the others. A null within `config` is the user's own, and stays.
    """
    found: dict[str, Any] = {}
    for name, value in model:
        if value is None:
            found[name] = True
        elif isinstance(value, Model) and (within := not_given(value)):
            found[name] = within
    return found


class FrozenModel(Model):
    """As Model; it cannot be changed, and has a hash."""

    model_config = ConfigDict(frozen=True)


def number(value: object) -> object:
    """As it came. Raises ValueError for what is true or false, which Python counts as 1 and 0: a job that is
    to be deleted `no` time after its end would be deleted at once."""
    if value is True or value is False:
        told = json.dumps(value)
        raise ValueError(f"{told}, as YAML also reads yes, on, no or off, stands where a number is needed")
    return value


class Capacity(StrEnum):
    SPOT = "Spot"
    SPOT_FIRST = "SpotFirst"
    ON_DEMAND_FIRST = "OnDemandFirst"
    ON_DEMAND = "OnDemand"
    ANY = "Any"


class Idle(StrEnum):
    REPORT = "Report"
    STOP = "Stop"


class Checkpoint(Model):
    """When the job saves and how many checkpoints it keeps."""

    every: str = Field(
        default="auto",
        description="How often to save. `auto`: from what a save costs here, between 10 s and 15 minutes "
        "apart; it suits most jobs. Or a number of steps such as `500`, or seconds such as `90s`.",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="How many of the newest checkpoints stay on the disk; older ones are deleted.",
    )

    _numbers = field_validator("keep", mode="before")(number)

    @field_validator("every", mode="before")
    @classmethod
    def _every(cls, value: object) -> str:
        text = str(value)
        if not re.fullmatch(CHECKPOINT_EVERY, text):
            raise ValueError(f"{text[:40]!r} is none of: auto, a number of steps (500), seconds (90s)")
        return text


class Retries(Model):
    """How often the job may start again; failures and disruptions are counted apart."""

    failures: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="How many failures (exceptions, crashes, out of memory, hangs) are followed by another "
        "attempt; after one more the job is Failed.",
    )
    disruptions: int | None = Field(
        default=None,
        ge=0,
        description="How many disruptions (a replica that was reclaimed, evicted, or lost with its machine) "
        "are followed by another attempt; unlimited unless given.",
    )

    _numbers = field_validator("failures", "disruptions", mode="before")(number)


class Storage(Model):
    """Where checkpoints, logs and data lie on a cluster."""

    claim: ObjectName = Field(
        description="On a cluster, the PersistentVolumeClaim for checkpoints, logs and the ledger, which all "
        "nodes can mount. On one machine not used: they are in the data directory of `holdfast up`."
    )
    data: ObjectName | None = Field(
        default=None,
        description="On a cluster, the PersistentVolumeClaim with the data to train on, mounted read-only at "
        "/holdfast/data. On one machine not used: name the paths in `config`.",
    )


class Resources(Model):
    """What each replica gets of CPU and memory."""

    cpu: str | None = Field(
        default=None,
        description="Cores that each replica asks for, such as `8` or `500m` (half a core). Unless given, "
        "one for each rank, but none for ranks on GPUs of one machine.",
    )
    memory: str | None = Field(
        default=None,
        description="Memory of each replica, such as `64Gi`. One that takes more is killed, and the attempt "
        "is OutOfMemory; on one machine only where it lets Holdfast limit memory (`holdfast submit "
        "--dry-run` says it).",
    )

    @field_validator("cpu", mode="before")
    @classmethod
    def _cpu(cls, value: object) -> str | None:
        if value is None:
            return None
        text = str(value)
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|[0-9]+m", text) or not cores(text):
            raise ValueError(f"{text!r} is not a CPU quantity such as 8, 0.5 or 500m")
        if cores(text) > MOST_CORES:
            raise ValueError(f"{text[:20]}: more than {MOST_CORES} cores, which no machine has")
        return in_few_digits(text)

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str | None) -> str | None:
        if value is None:
            return None
        found = re.fullmatch(r"([1-9][0-9]*(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", value)
        if found is None:
            raise ValueError(f"{value!r} is not a memory quantity such as 64Gi or 512Mi")
        if float(found[1]) * _IN_TI[found[2] or ""] > MOST_MEMORY:
            raise ValueError(f"{value[:20]}: more than {MOST_MEMORY:g}Ti, which no machine has")
        return in_few_digits(value)


def in_few_digits(number: str) -> str:
    """As it came. Raises ValueError where it has more digits than anybody means."""
    if len(number) > LONGEST_NUMBER:
        raise ValueError(f"{number[:20]} goes on for {len(number)} characters: round it")
    return number


def cores(quantity: str) -> float:
    """Kubernetes CPU quantity to cores: `500m` is 0.5."""
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


class Spec(Model):
    """What to run. A narrow schema on purpose: never a pod spec."""

    image: str = Field(
        default="",
        max_length=512,
        description="On a cluster, the container image of the replicas; unless given the chart's "
        "`jobs.defaultImage`. On one machine not used: jobs run in the environment of `holdfast up`.",
    )
    command: list[str] = Field(
        min_length=1,
        max_length=256,
        description="The program and its arguments, such as `[python, train.py]`; torchrun starts it once "
        "for each rank, so do not name torchrun here.",
    )
    working_dir: str | None = Field(
        default=None,
        pattern=ABSOLUTE,
        max_length=4096,
        description="Directory that the command starts in, as an absolute path. Unless given it is the one "
        "in which `holdfast up` was started, or on a cluster the image's own.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings for the program, any mapping: it finds them in a YAML file, whose path the "
        "environment variable HOLDFAST_CONFIG has.",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="How many equal parts the job has, each with `processes` ranks: on a cluster each is a "
        "pod, on one machine a torchrun with its ranks. They start together; when one is lost the others "
        "stop too, and the next attempt starts all of them again.",
    )
    min_replicas: int | None = Field(
        default=None,
        ge=1,
        description="On a cluster, the fewest replicas to train with while there is no room for all. An "
        "attempt then has the largest number that divides `replicas` and found room. Unless given, the job "
        "waits until there is room for all.",
    )
    gpus: str = Field(
        default="0",
        description="GPUs of each replica: `0` trains on CPU, a whole number such as `2`, or a share of one "
        "GPU such as `0.25`, which others use too.",
    )
    mig: str | None = Field(
        default=None,
        pattern=MIG_PROFILE,
        description="On a cluster whose GPUs are partitioned by MIG, the profile to ask for, such as "
        "`1g.10gb`, with `gpus: 1`: a part of a GPU with memory and faults of its own.",
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Ranks (processes) of each replica. Unless given, one for each GPU, or one on CPU.",
    )
    capacity: Capacity = Field(
        default=Capacity.ANY,
        description="Which nodes of a cluster the job may have. Any: all. Spot: only spot nodes. OnDemand: "
        "only the others. SpotFirst: spot nodes as long as they have room; after three disruptions in a row "
        "without a new durable step the others first, until there is one. OnDemandFirst: the others as long "
        "as they have room, then spot nodes.",
    )
    queue: Namespace | None = Field(
        default=None,
        description="On a cluster with Kueue, the LocalQueue in which the job waits until there is quota for "
        "all its replicas.",
    )
    priority: Namespace | None = Field(
        default=None,
        description="On a cluster with Kueue, the WorkloadPriorityClass: a job of a higher one goes first in "
        "the queue, and may have one of a lower one preempted. Unless given, all jobs of a queue are alike.",
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    retries: Retries = Field(default_factory=Retries)
    storage: Storage | None = None
    resources: Resources = Field(default_factory=Resources)
    env: dict[EnvName, str] = Field(
        default_factory=dict,
        max_length=200,
        description="Environment variables of all ranks, name and value.",
    )
    grace_seconds: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="Seconds that a replica has from the notice (SIGTERM) to SIGKILL, to save and leave. "
        "Raise it where a save takes longer and the platform gives the time: what "
        "spot nodes give bounds it.",
    )
    hang_seconds: int | None = Field(
        default=None,
        ge=0,
        le=604_800,
        description="Seconds without a finished step after which the attempt is ended as hung (0: never); "
        "before the first step three times as long. Unless given, 10 minutes, or 30 times the longest step "
        "where that is more. Raise it where a single step may take longer than that.",
    )
    idle: Idle = Field(
        default=Idle.REPORT,
        description="What happens when GPUs of the job are not used for `idleSeconds`. Report: a condition "
        "and an event say so. Stop: once none of its GPUs is used, the job is also suspended after a "
        "checkpoint, until somebody resumes it.",
    )
    idle_seconds: int = Field(
        default=1800,
        ge=30,
        le=604_800,
        description="Seconds after which a GPU counts as idle, if at every look in that time it was busy for "
        "less than 5 %.",
    )
    suspend: bool = Field(
        default=False,
        description="true: the job stops after a checkpoint and keeps everything, until it is false again; "
        "`holdfast suspend` and `holdfast resume` set it.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        description="Seconds from `status.finishedAt`, when a controller found that the job had ended, until "
        "it is deleted by itself, on one machine with its checkpoints and logs; never unless given.",
    )

    @property
    def of_attempt(self) -> str:
        """A digest of all that an attempt is made from: a change of anything else need not make it anew. Of
        what says no more than a default, nothing: a later Holdfast, which has more keys, gives the same.
        """
        apart = {"retries", "idle", "idle_seconds", "suspend", "ttl_seconds_after_finished"}
        asked = self.model_dump(mode="json", exclude=apart, exclude_defaults=True)
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]

    _numbers = field_validator(
        "replicas",
        "min_replicas",
        "processes",
        "grace_seconds",
        "hang_seconds",
        "idle_seconds",
        "ttl_seconds_after_finished",
        mode="before",
    )(number)

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus(cls, value: object) -> str:
        text = str(value)
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
            raise ValueError(f"{text!r} is not a number of GPUs such as 0, 1, 4 or 0.25")
        if float(text) > MOST_GPUS:
            raise ValueError(f"{text[:20]}: more than {MOST_GPUS} GPUs, which no machine has")
        amount = Fraction(in_few_digits(text))
        if amount > 1 and amount.denominator != 1:
            raise ValueError(f"{text} GPUs: only whole numbers above 1; a fraction is a share of one GPU")
        if 0 < amount < 1 and amount.numerator != 1:
            raise ValueError(f"{text} GPUs: a share is 1/N of a GPU, such as 0.5, 0.25 or 0.125")
        return str(int(amount)) if amount.denominator == 1 else text

    @field_validator("config")
    @classmethod
    def _config(cls, value: dict[str, Any]) -> dict[str, Any]:
        if deeper_than(DEEPEST, value):
            raise ValueError(f"nested deeper than {DEEPEST} levels")
        return value

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

    @model_validator(mode="after")
    def _no_more_than_all(self) -> Spec:
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise ValueError(
                f"minReplicas {self.min_replicas} is more than replicas, which is {self.replicas}"
            )
        return self

    @model_validator(mode="after")
    def _one_mig_device(self) -> Spec:
        if self.mig and self.gpus != "1":
            raise ValueError(
                f"mig {self.mig} with {self.gpus} GPUs: a replica uses one MIG device; set gpus to 1"
            )
        return self

    @property
    def processes_per_replica(self) -> int:
        """Ranks that torchrun starts in each replica."""
        return self.processes or max(1, int(Fraction(self.gpus)))

    @property
    def world_size(self) -> int:
        return self.replicas * self.processes_per_replica
