"""What the API sends and takes beside the TrainingJob itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field, field_validator

from ..cluster import Plan
from ..drills import KINDS, DrillKind
from ..jobs import API_VERSION, Model, TrainingJob
from ..spec import number


class ListMetadata(Model):
    continue_: str = Field(
        default="",
        alias="continue",
        description="Send it back as `continue` for the next page; empty: all seen.",
    )
    remaining_item_count: int = Field(default=0, description="Jobs that follow this page.")


class TrainingJobList(Model):
    api_version: Literal["holdfast.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["TrainingJobList"] = "TrainingJobList"
    metadata: ListMetadata = Field(default_factory=ListMetadata)
    items: list[TrainingJob]


class PlanDocument(Model):
    """The dry run: what would be sent to the engine, and every reason why it could not run here."""

    engine: str
    feasible: bool
    manifests: list[dict[str, Any]]
    reasons: list[str] = Field(description="Why the job could not run here; empty: it can.")
    notes: list[str]

    @classmethod
    def of(cls, plan: Plan, more_reasons: list[str]) -> PlanDocument:
        reasons = [*plan.reasons, *more_reasons]
        return cls(
            engine=plan.engine,
            feasible=not reasons,
            manifests=list(plan.manifests),
            reasons=reasons,
            notes=list(plan.notes),
        )


class DrillRequest(Model):
    """Disrupt one replica, to see the job survive it."""

    replica: int | None = Field(default=None, ge=0, description="By default a random running one.")
    kind: DrillKind = Field(default=DrillKind.KILL, description=KINDS)

    _numbers = field_validator("replica", mode="before")(number)


class DrillResult(Model):
    attempt: int
    replica: int
    kind: DrillKind


class EventDocument(Model):
    time: datetime
    type: str = Field(description="Normal or Warning.")
    reason: str
    message: str
    count: int = Field(description="How often it happened in a row.")


class EventList(Model):
    items: list[EventDocument]


class StepList(Model):
    """What steps.jsonl has of each step and each validation, with the attempt. A step redone after lost work
    is there twice; the newest may lack its loss."""

    items: list[dict[str, Any]]


class Readiness(Model):
    """Whether requests are answered and jobs carried on."""

    ready: bool
    checks: dict[str, str] = Field(description="Part to `ok`, or what is wrong with it.")
    missing: list[str] = Field(
        description="What the cluster lacks for jobs to run; they are taken, and wait until it is there."
    )
