"""What the suite has to know of the kind in which attempts are made: JOBS_KIND names it, as the chart's value
`jobs.kind` does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster import jobset, trainer, training_operator
from tests.cluster.cluster import Cluster
from tests.cluster.site import Site

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.pod_settings import JobsKind
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB


@dataclass(frozen=True)
class Kind:
    """One of the two, on a cluster of the suite."""

    attempt: AttemptKind
    install: Callable[[Cluster, Site], None] | None
    """On a cluster that is up; None where every cluster has its operator."""
    operators: dict[str, str]
    """The Deployments of those that make the pods, by namespace."""
    made: tuple[str, ...]
    """All that is made for an attempt and has its labels."""


KINDS = {
    JobsKind.PYTORCH_JOB: Kind(
        PYTORCH_JOB,
        None,
        {training_operator.NAMESPACE: training_operator.DEPLOYMENT},
        ("pods", "pytorchjobs", "configmaps"),
    ),
    JobsKind.TRAIN_JOB: Kind(
        TRAIN_JOB,
        trainer.install,
        {trainer.NAMESPACE: trainer.DEPLOYMENT, jobset.NAMESPACE: jobset.DEPLOYMENT},
        ("pods", "jobs", "jobsets", "trainjobs", "trainingruntimes", "configmaps"),
    ),
}
JOBS_KIND = JobsKind(os.environ.get("JOBS_KIND") or JobsKind.PYTORCH_JOB)
KIND = KINDS[JOBS_KIND]
