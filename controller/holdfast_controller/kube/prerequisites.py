"""What a cluster must have before jobs can run, and what of it this one lacks.

The controller stays up without either: it goes on asking, and carries jobs on when the last is there.
"""

from __future__ import annotations

from .pieces import Pieces
from .reflector import Reflector

NO_DEFINITION = (
    "the CRD trainingjobs.holdfast.dev: no job can be submitted; install the chart, which brings it"
)
NO_OPERATOR = (
    "the Kubeflow Training Operator: the CRD pytorchjobs.kubeflow.org is not there; jobs are taken and wait; "
    "install the operator (k8s/README.md), nothing has to be restarted"
)


def missing(jobs: Reflector, pieces: Pieces) -> tuple[str, ...]:
    """A sentence for each kind that the apiserver does not serve."""
    lacks = ((jobs.missing, NO_DEFINITION), (pieces.operator_missing, NO_OPERATOR))
    return tuple(sentence for gone, sentence in lacks if gone)
