"""The domain: what a TrainingJob is, and what is known about it.

What a user asks for is in spec.py; here is what comes of it. The OpenAPI schema and the CRD are generated
from these classes, so every description here is read by users.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

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
SILENT_SECONDS = 120.0
"""A program that has not reported for so long since all replicas are up is not going to: it uses no `Run`.
What did so in an earlier attempt does: DNS may be down, and its ranks look for each other."""
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
    """a part of the gang ran and waited in vain for a replica that found no place, or its node could not
    start one"""
    IMAGE_PULL = "ImagePull"
    """likewise, for one whose image did not come"""
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    """it could not begin: its run directory had no room, or the object store of that did not answer"""


_VERDICTS = frozenset(Verdict)


def _that_is_known(verdict: Any) -> Any:
    """One that only a newer Holdfast gives, whose jobs are read after a rollback, is a disruption here: that
    the attempt is over counts, its reason says why, and what it cost the job stands in `Status`."""
    newer = isinstance(verdict, str) and verdict not in _VERDICTS
    return Verdict.DISRUPTED if newer else verdict


KnownVerdict = Annotated[Verdict, BeforeValidator(_that_is_known)]
_CAPACITIES = frozenset(Capacity)
_PHASES = frozenset(Phase)


def _asked_for(capacity: Any) -> Any:
    """Likewise of nodes that only a newer one opens attempts for."""
    newer = isinstance(capacity, str) and capacity not in _CAPACITIES
    return None if newer else capacity


class AttemptRecord(Model):
    """One gang start of all replicas, as it is remembered."""

    number: int = Field(
        description="From 1 on; each attempt has the next one.",
    )
    opened_at: datetime | None = Field(default=None, description="When it was decided that it should be.")
    made_of: str | None = Field(
        default=None, description="A digest of what the spec asked of it when it was started."
    )
    capacity: Annotated[Capacity | None, BeforeValidator(_asked_for)] = Field(
        default=None, description="The nodes it was opened for, where they are others than the job asks for."
    )
    replicas: int | None = Field(
        default=None, description="How many it has, whatever the job asks for now; at times fewer than all."
    )
    processes: int | None = Field(default=None, description="Ranks per replica that it has, likewise.")
    gpus: str | None = Field(default=None, description="GPUs per replica that it has, likewise.")
    mig: str | None = Field(
        default=None, description="The MIG profile of these. None where they are no MIG devices."
    )
    grace_seconds: float | None = Field(
        default=None, description="That its replicas have after a notice, likewise."
    )
    checkpoint_every: str | None = Field(
        default=None, description="How often it saves, as `spec.checkpoint.every`, likewise."
    )
    placed: int | None = Field(
        default=None, description="How many replicas ran when it was given up because others had no place."
    )
    placed_at: datetime | None = Field(
        default=None, description="When the last replica got its place on a node."
    )
    held_up_at: datetime | None = Field(
        default=None,
        description="Since when a replica that has its place is known to be unable to start there, as where "
        "its image cannot be pulled. None while none is.",
    )
    started_at: datetime | None = Field(
        default=None,
        description="When its first process began (on a cluster, its first container). None until then, "
        "and where it never came to that.",
    )
    first_step_at: datetime | None = Field(
        default=None,
        description="When its first step was done. None until then, and of a program that tells nothing "
        "of its steps.",
    )
    detected_at: datetime | None = Field(
        default=None, description="When it was known that it had lost a replica."
    )
    ended_at: datetime | None = Field(
        default=None,
        description="When its last replica had ended. None while it runs.",
    )
    recovery_seconds: RecoverySeconds = None
    breakdown: BreakdownOfStart = None
    whereabouts: Placed = None
    cost: CostOfAttempt = None
    resumed_seconds: float | None = Field(
        default=None,
        description="Seconds spent on the steps up to resumedStep, by all attempts whose work of them "
        "counts. None where nobody knows.",
    )
    useful_seconds: float | None = Field(
        default=None,
        description="Seconds that it spent on steps that count; corrected as lostSteps is. None where "
        "nothing is known of its steps.",
    )
    goodput: GoodputOfAttempt = None
    ending: KnownVerdict | None = Field(
        default=None,
        description="What Holdfast ends it for, where it could not go on and did not end by itself.",
    )
    verdict: KnownVerdict | None = Field(
        default=None,
        description="What its end was. None while it runs. Finished: all done. Disrupted, LostNode: the "
        "platform took a replica, which `status.disruptions` counts. Failed, OutOfMemory, "
        "Hung, ConfigError: the job's own fault, which `status.failures` counts. Suspended: "
        "as asked. Unschedulable, ImagePull, StorageUnavailable: it could not begin, or not "
        "whole, and nothing counts it.",
    )
    reason: str = Field(
        default="",
        description="The evidence for the verdict, in a sentence. Empty while it runs.",
    )
    resumed_step: int | None = Field(
        default=None,
        description="Step of the checkpoint that it went on from; 0: it began anew. None until it is "
        "known, and of a program that tells nothing of its steps.",
    )
    resume_differences: list[str] = Field(
        default_factory=list,
        description="What was not as it was where that checkpoint was written: its bits may differ.",
    )
    passed_over: list[str] = Field(
        default_factory=list,
        description="Newer checkpoints that could not be gone on from, as they were damaged or gone, each "
        "with why.",
    )
    last_step: int | None = Field(
        default=None,
        description="The last step that it did, counted from the beginning of the job. None while it "
        "runs, and where nothing is known of its steps.",
    )
    durable_step: int | None = Field(
        default=None,
        description="The newest step with a durable checkpoint when it ended, from which the next "
        "attempt can go on; 0: there was none. None while it runs, and where nothing is "
        "known of its steps.",
    )
    lost_steps: int | None = Field(
        default=None,
        description="Steps done and not covered by a durable checkpoint when it ended, which the next "
        "attempt does again; corrected once that tells where it went on. None while it runs, "
        "and where nothing is known of its steps.",
    )
    world_size: int | None = Field(
        default=None,
        description="Ranks in all, as the program told. None until it does.",
    )
    first_step: int | None = Field(
        default=None,
        description="Number of the first step that it did itself. None until that is done, and where "
        "nothing is known of its steps.",
    )
    checkpoints: int | None = Field(
        default=None,
        description="How many it made durable. None while it runs, and where nothing is known of them.",
    )
    outcome: str | None = Field(
        default=None,
        description="How its rank 0 said that it ended: finished, interrupted (it saved on notice), "
        "failed or hung. None while it runs, and where it could say nothing, as after "
        "SIGKILL.",
    )
    digest: str | None = Field(
        default=None,
        description="SHA-256 of the state in the checkpoint of durableStep, over all ranks: equal "
        "digests are equal bits. None where this attempt did not make that one or could not "
        "tell.",
    )
    last_sign_at: datetime | None = Field(default=None, description="When its rank 0 was last heard of.")
    log_tail: dict[str, str] = Field(
        default_factory=dict,
        description="Last lines of each rank's output, by rank; of the newest attempts that did not succeed.",
    )

    @property
    def trained(self) -> bool:
        """Whether it is known to have done a step or, as a program may tell of none, to have run for long."""
        if self.last_step:
            return True
        if self.started_at is None or self.ended_at is None:
            return False
        return (self.ended_at - self.started_at).total_seconds() >= SILENT_SECONDS


class Condition(Model):
    """As Kubernetes conditions: types are Admitted, Running, Suspended, Complete, Failed; GPUsIdle."""

    type: str = Field(
        description="Admitted: it has its room, and an attempt begins, runs or ends. Running: it does "
        "steps. Suspended, Complete, Failed: as the phase. GPUsIdle: GPUs of the job have "
        "not been used for `spec.idleSeconds`.",
    )
    status: Literal["True", "False", "Unknown"] = Field(
        description="Whether it holds. A condition that never held may be missing.",
    )
    reason: str = Field(
        description="Why, in one word for programs.",
    )
    message: str = Field(
        default="",
        description="Why, in a sentence: of Admitted what the job waits for, of GPUsIdle which GPUs. "
        "Often empty; `status.message` says more.",
    )
    last_transition_time: datetime = Field(
        description="When `status` last changed.",
    )


class JobProgress(Model):
    """The trainer's own figures, as rank 0 last served them; None is not known, never zero."""

    attempt: int | None = Field(default=None, description="The attempt that served them.")
    step: int = Field(
        default=0,
        description="Steps done, counted from the beginning of the job: what was lost counts no more.",
    )
    total_steps: int | None = Field(
        default=None,
        description="Steps at which the training is done. None where the program does not say.",
    )
    durable_step: int = Field(
        default=0,
        description="The newest step with a durable checkpoint; what came after it would be lost without "
        "a notice. 0: there is none.",
    )
    durable_seconds: float | None = Field(
        default=None,
        description="Seconds spent on the steps up to durableStep, by all attempts whose work of them "
        "counts.",
    )
    checkpoints: int | None = Field(
        default=None,
        description="How many this attempt has made durable.",
    )
    save_fault: str | None = Field(
        default=None, description="Why the newest save failed; the steps after durableStep are at risk."
    )
    training_phase: str = Field(
        default="",
        description="What rank 0 is about: starting, training, validating, saving, stopping or finished.",
    )
    loss: float | None = Field(
        default=None,
        description="Of the newest step whose loss is known; it may be a step or two behind `step`. None "
        "until there is one, and where it is no number.",
    )
    loss_ema: float | None = Field(
        default=None,
        description="Mean of the attempt's losses, each counting 2 % less than the one after it.",
    )
    val_loss: float | None = Field(
        default=None,
        description="Loss of this attempt's newest validation. None where there was none.",
    )
    grad_norm: float | None = Field(
        default=None,
        description="Norm of all gradients at the newest step of which it is known. None where the "
        "program does not log it.",
    )
    epoch: float | None = Field(
        default=None, description="How often all attempts together went through the data."
    )
    tokens_per_second: float | None = Field(
        default=None,
        description="Of all ranks together, over the recent steps of this attempt. None where the "
        "program logs no tokens, and once it has done nothing for half a minute and ten steps' time.",
    )
    samples_per_second: float | None = Field(
        default=None,
        description="Of all ranks together, over the recent steps of this attempt. None where the "
        "program logs no samples.",
    )
    data_wait_fraction: float | None = Field(
        default=None,
        description="Share of rank 0's time, from 0 to 1, that recent steps waited for data. None where "
        'the loop does not tell, as with `run.span("data")`.',
    )
    mfu: float | None = Field(
        default=None,
        description="Model FLOPs utilization: from 0 to 1, the computation that the recent steps needed "
        "of what the hardware could do at that precision. None where one of the two is not "
        "known.",
    )
    gpu_utilization: float | None = Field(
        default=None,
        description="Share of the newest second or two, from 0 to 1, in which a kernel ran on rank 0's "
        "GPU, anybody's. None on CPU, and where the driver does not say.",
    )
    cpu_utilization: float | None = Field(
        default=None,
        description="Of the cores that rank 0 computes on, the share that it used in the newest second or "
        "two: above 1 where further threads of it, as those of a save, were busy beside. None where it "
        "computes on a GPU.",
    )
    memory_bytes: int | None = Field(
        default=None,
        description="Bytes that rank 0 took at most so far, in this attempt: of a GPU what tensors took, "
        "else what was resident.",
    )
    eta_seconds: float | None = Field(
        default=None,
        description="Seconds that are left until totalSteps, with saves and validations as often as so "
        "far, and without interruptions. None where there is no total, or no speed.",
    )
    verdict: str | None = Field(
        default=None,
        description="Where a step's time goes, what holds it back, and what to change, as the trainer says.",
    )
    updated_at: datetime | None = Field(
        default=None, description="When these figures were taken: older where no controller can renew them."
    )
    unheard_since: datetime | None = Field(
        default=None,
        description="Since when rank 0 has not answered, though it should: how fast it is and how long it "
        "takes is not told after half a minute of that. None while it answers.",
    )


class Status(Model):
    """Observed, never set by users. Bounded: 20 attempts; the ledger has all."""

    phase: Phase = Field(
        default=Phase.QUEUED,
        description="Where the job stands. Queued: it waits, mostly for room, and `message` says why. "
        "Starting: an attempt was opened and has done no step yet. Running: a step is done, or a program "
        "that tells of none has run for two minutes. Recovering: an attempt ended and the next one follows. "
        "Suspending, Suspended: `spec.suspend` is true; or it is deleted, and only somebody else's finalizer "
        "keeps it. Succeeded and Failed are final.",
    )
    observed_generation: int = Field(
        default=0,
        description="`metadata.generation` of the spec that this status was decided from; if it is less, "
        "the newest change of spec has not been seen yet.",
    )
    attempt: int = Field(
        default=0,
        description="Number of the newest attempt opened; 0: there was none.",
    )
    disruptions: int = Field(
        default=0,
        description="Attempts that ended because the platform took a replica (Disrupted, LostNode); "
        "`spec.retries.disruptions` bounds them.",
    )
    failures: int = Field(
        default=0,
        description="Attempts that ended by the job's own fault (Failed, OutOfMemory, Hung, "
        "ConfigError); `spec.retries.failures` bounds them.",
    )
    lost_steps: int = Field(
        default=0,
        description="Steps done and not covered by a durable checkpoint when their attempt ended, over all "
        "attempts that tell their steps.",
    )
    useful_seconds: float | None = Field(
        default=None,
        description="Seconds spent on steps that count, over all attempts; a step that was done twice "
        "counts once. None of a program that tells nothing of its steps.",
    )
    goodput: float | None = Field(
        default=None,
        description="usefulSeconds / seconds since firstStartedAt, from 0 to 1: waiting, starting, "
        "saving and lost steps make it less. While it does steps as of the newest progress, of one that is "
        "over as of its last attempt's end; else of the moment at which Holdfast is asked, where `kubectl` "
        "has that of the status's last write. None where usefulSeconds is.",
    )
    cost: float | None = Field(
        default=None,
        description="Of all attempts, in costCurrency; of one that runs up to the moment at which Holdfast "
        "is asked, where `kubectl` has it as of the newest progress. None where there are no prices, and "
        "where one of the attempts ran, or runs, on a node without one.",
    )
    cost_currency: str | None = Field(
        default=None,
        description="Of `cost`, such as USD; as the prices were given.",
    )
    ended_cost: float = Field(
        default=0.0,
        description="Of the attempts that have ended and have a cost, in their nodes' currency.",
    )
    unpriced_attempts: int = Field(
        default=0,
        description="How many attempts ran whose cost is not known, or is in another currency than that of "
        "those before; `cost` is None where there is one.",
    )
    progress: JobProgress | None = None
    message: str = Field(default="", description="Why the job is in this phase, in one sentence.")
    next_start_at: datetime | None = Field(
        default=None,
        description="End of the back-off after a failure: the next attempt is opened then. None where "
        "there is none.",
    )
    first_started_at: datetime | None = Field(
        default=None,
        description="When the first process of the first attempt began. None until then.",
    )
    finished_at: datetime | None = Field(
        default=None,
        description="When a controller found that the job Succeeded or Failed; from then on "
        "`spec.ttlSecondsAfterFinished` counts. None until then. `endedAt` of its last attempt is its own "
        "end.",
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        description="As Kubernetes has them, one of each type.",
    )
    attempts: list[AttemptRecord] = Field(
        default_factory=list,
        description="The newest 20, oldest first. The last that did a step, or ran for long, is one of them, "
        "however many came since of which none did.",
    )

    @model_validator(mode="before")
    @classmethod
    def _phase_that_is_known(cls, body: Any) -> Any:
        """For one that only a newer Holdfast has, whose jobs are read after a rollback: final where the job
        is over, which must not start again; else it is decided anew."""
        phase = body.get("phase") if isinstance(body, dict) else None
        if not isinstance(phase, str) or phase in _PHASES:
            return body
        known = Phase.QUEUED if body.get("finishedAt") is None else Phase.FAILED
        if known is Phase.FAILED and (body.get("attempts") or [{}])[-1].get("verdict") == Verdict.FINISHED:
            known = Phase.SUCCEEDED
        return {**body, "phase": known}

    def record(self, attempt: int) -> AttemptRecord | None:
        """Of this number; None where it is not remembered."""
        return next((one for one in self.attempts if one.number == attempt), None)

    def durable_before(self, attempt: int) -> int | None:
        """The newest step that is known to have been durable when this attempt began."""
        earlier = [one.durable_step for one in self.attempts if one.number < attempt]
        return next((step for step in reversed(earlier) if step is not None), None)

    def saved_before(self, attempt: int) -> int | None:
        """As `durable_before`, 0 where nothing was; None where no attempt before is known to have trained."""
        saved = self.durable_before(attempt) or 0
        trained = any(one.trained for one in self.attempts if one.number < attempt)
        return saved if saved or trained else None

    @property
    def wall_ended_at(self) -> datetime | None:
        """Where the wall time of a job that is over ends: with its last attempt, for nobody may have been
        there to see it finish. None until then."""
        if self.finished_at is None or not self.attempts:
            return self.finished_at
        return self.attempts[-1].ended_at or self.finished_at


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
        "Kubernetes. A cluster may let some through to the job's pods (`jobs.podLabels` of the chart).",
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
    _kept_by: tuple[str, ...] = PrivateAttr(default=())

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
    def kept_by(self) -> tuple[str, ...]:
        """Who keeps it, once it is deleted, when nothing of it is left: finalizers that are not ours."""
        return self._kept_by

    def with_keepers(self, kept_by: tuple[str, ...]) -> TrainingJob:
        self._kept_by = kept_by
        return self

    def as_of(self, attempt: int) -> TrainingJob:
        """As that attempt was opened: with its nodes, size, GPUs, grace and saves, where those are others.

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
            "gpus": (record.gpus, self.spec.gpus),
            "grace_seconds": (record.grace_seconds, self.spec.grace_seconds),
        }
        changes: dict[str, Any] = {key: then for key, (then, now) in known.items() if then not in (None, now)}
        if record.gpus is not None and record.mig != self.spec.mig:
            changes["mig"] = record.mig
        if record.checkpoint_every not in (None, self.spec.checkpoint.every):
            saves = self.spec.checkpoint.model_copy(update={"every": record.checkpoint_every})
            changes["checkpoint"] = saves
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
