"""What the operator of a cluster decides about the pods of all jobs.

The chart writes its value `jobs` into a file, and the controller reads it here: the names in values.yaml
are the ones below, and an unknown one is an error. Nothing of it can be set by a job.
"""

from __future__ import annotations

import difflib
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from .cluster import HoldfastError
from .policy.gpu_request import SLICES_LABEL
from .policy.half_placed import PLACE_SECONDS
from .policy.placement import DISRUPTED, Provider
from .prices import Prices
from .spec import LOG_LIMIT, LOG_LIMIT_SAYS, FrozenModel, Quantity, Size


class PodSettingsError(HoldfastError):
    """The file cannot be used; the message names it, the key and the remedy."""


class JobsKind(StrEnum):
    """A kind in which attempts can be made; its value is the kind's name in Kubernetes."""

    PYTORCH_JOB = "PyTorchJob"
    TRAIN_JOB = "TrainJob"


class Limits(FrozenModel):
    """The most that one job may ask for; not given means no limit of ours (a ResourceQuota may have one)."""

    replicas: int | None = Field(default=None, ge=1, description="Pods of one job.")
    gpus: int | None = Field(default=None, ge=0, description="GPUs of one replica.")
    cpu: Quantity | None = Field(default=None, description="Cores of one replica.")
    memory: Size | None = Field(default=None, description="Memory of one replica.")


class Toleration(FrozenModel):
    """Of one taint, as in a pod. None is of all taints: with it a pod would be placed on nodes that are just
    being taken back, and stay on those that fail."""

    key: str = Field(min_length=1, description="Of the taint.")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = Field(default="", description="Of the taint, where the operator is Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Of the taint; none: all."
    )
    toleration_seconds: int | None = Field(
        default=None, description="How long NoExecute is put up with; none: for ever."
    )

    @field_validator("key")
    @classmethod
    def _not_of_a_node_that_goes(cls, key: str) -> str:
        if key == DISRUPTED:
            raise ValueError("Karpenter puts this taint on a node that it takes away: leave it out")
        return key

    @model_validator(mode="after")
    def _as_kubernetes_has_it(self) -> Self:
        if self.operator == "Exists" and self.value:
            raise ValueError("with operator Exists it may have no value")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds is for the effect NoExecute")
        return self

    def document(self) -> dict[str, Any]:
        """As it stands in a pod."""
        return self.model_dump(by_alias=True, exclude_defaults=True) | {"operator": self.operator}


class PodSettings(FrozenModel):
    """Frozen; the defaults fit any cluster that enforces the restricted Pod Security Standard."""

    kind: JobsKind = Field(
        default=JobsKind.PYTORCH_JOB,
        description="Of what attempts are made: PyTorchJobs of the Kubeflow Training Operator, TrainJobs of "
        "Kubeflow Trainer v2. Those of the other kind that are at work run on.",
    )
    provider: Provider = Field(
        default=Provider.AUTO,
        description="Who takes spot nodes back: gke, eks, karpenter, aks or generic; auto knows all marks.",
    )
    spot_notice_seconds: float | None = Field(
        default=None, ge=1, description="Notice that spot nodes really give; by default the provider's."
    )
    place_seconds: float = Field(
        default=PLACE_SECONDS,
        gt=0,
        le=3600,
        description="How long a part of a gang runs and waits for places for the others, or a replica has a "
        "node and cannot start there, before the gang gives its places back; longer than it takes to add a "
        "node.",
    )
    default_image: str = Field(default="", description="For jobs that name no image.")
    allowed_images: tuple[str, ...] = Field(
        default=(), description="Patterns such as registry.example.org/team/*; none: every image."
    )
    allowed_priorities: tuple[str, ...] = Field(
        default=(), description="Kueue's WorkloadPriorityClasses that jobs may name; none: every one."
    )
    pod_labels: tuple[str, ...] = Field(
        default=(),
        description="Labels of a job that its pods get, by name: team, or cost.example.org/* for all of that "
        "domain; none: no label.",
    )
    image_pull_secrets: tuple[str, ...] = Field(default=(), description="Names of Secrets beside the jobs.")
    node_selector: dict[str, str] = Field(
        default_factory=lambda: {"kubernetes.io/os": "linux"},
        description="Labels of the nodes that jobs may have, besides what they ask for.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), description="Taints that jobs put up with, besides those of spot nodes and of GPUs."
    )
    default_claim: str = Field(
        default="", description="PersistentVolumeClaim for jobs that name none, in their own namespace."
    )
    limits: Limits = Field(default_factory=Limits)
    nccl_environment: dict[str, str] = Field(
        default_factory=dict, description="For jobs on GPUs, such as NCCL_SOCKET_IFNAME; a job's env wins."
    )
    rdma_resources: dict[str, str] = Field(
        default_factory=dict, description="Extended resources for jobs of several replicas on GPUs."
    )
    shared_memory: Size = Field(default="8Gi", description="Most that /dev/shm may hold.")
    scratch: Size = Field(default="20Gi", description="Most that /tmp may hold, on the node's disk.")
    log_limit: Size = Field(default=LOG_LIMIT, description=LOG_LIMIT_SAYS)
    slices_label: str = Field(
        default=SLICES_LABEL,
        description="Node label that says into how many slices a GPU is cut; empty: any slice will do.",
    )
    read_nodes: bool = Field(
        default=True,
        description="Whether the controller may get nodes; else no attempt's capacity or cost is known.",
    )
    drill_nodes: bool = Field(
        default=False,
        description="Whether a drill may cordon a node (`--kind node`), which others may use too.",
    )
    exec_in_pods: bool = Field(
        default=False,
        description="Whether the controller may run programs of its own in jobs' pods: for drills freeze and "
        "oom, and for the stacks of a gang that it ends as hung.",
    )
    prices: Prices = Field(
        default_factory=Prices, description="Of nodes, for what jobs cost; without them no cost is shown."
    )
    user_id: int = Field(default=65532, ge=1, description="User, group and file-system group of the pods.")


def load_pod_settings(path: Path) -> PodSettings:
    """Read YAML. Raises PodSettingsError for a file that is missing, torn, or says what cannot be."""
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PodSettingsError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # also of bytes that are no UTF-8, a date that is none
        raise PodSettingsError(f"{path} is not YAML: {error}") from error
    try:
        return PodSettings.model_validate(document if document is not None else {})
    except ValidationError as error:
        raise PodSettingsError("; ".join(_sentence(path, fault) for fault in error.errors())) from None


def _sentence(path: Path, fault: Any) -> str:
    place = ".".join(str(part) for part in fault["loc"]) or "the document"
    if fault["type"] == "extra_forbidden":
        inside: dict[str, type[FrozenModel]] = {"limits": Limits, "tolerations": Toleration, "prices": Prices}
        model = inside[fault["loc"][0]] if len(fault["loc"]) > 1 else PodSettings
        known = [field.alias or name for name, field in model.model_fields.items()]
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        return f"{path}: {place} is no setting" + (f"; did you mean {near[0]}?" if near else "")
    return f"{path}: {place} is {fault['input']!r}: {fault['msg']}"
