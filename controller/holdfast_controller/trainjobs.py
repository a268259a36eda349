"""Attempts as TrainJobs of Kubeflow Trainer v2 (2.3 or later); all that is TrainJob's own is here. Pure.

A TrainJob says little itself: it names a runtime, from which Trainer makes a JobSet, that an indexed Job,
and that the pods. Each attempt brings its own runtime, a TrainingRuntime of its name that holds the pods'
whole template. Its policy is `numNodes` alone: with one for torch, Trainer would set a rendezvous of its own.

Nothing is ever restarted in place. A pod that fails, fails its index alone (`backoffLimitPerIndex: 0`): a
limit for the whole Job would have its peers deleted, and that looks as if somebody had taken them. A pod
that is going is not replaced before it has failed (`podReplacementPolicy: Failed`), and then its index has.
The JobSet starts no Job again.

The pods' names end at random; JobSet's headless Service, which is named as the attempt is, finds replica 0
at `<attempt>-node-0-0.<attempt>`, and a pod's number is in a label of the Job's.

So a TrainJob whose pods have all ended is over, and is left in place until the next attempt. It is not
deleted in the foreground: Trainer makes a JobSet anew, and its pods, that goes while its TrainJob is still
going. Nor does its runtime go before it: Trainer's webhook refuses every change of a TrainJob without one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from .attempt_kind import AttemptKind, Document, Resource
from .jobs import TrainingJob

NODE = "node"
"""Of the pods' Job within the JobSet, and of their container, as Trainer wants it."""
RESOURCE = Resource("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs")
RUNTIMES = Resource("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", "trainingruntimes")


def _documents(job: TrainingJob, metadata: Document, template: Document) -> tuple[Document, ...]:
    template["spec"]["restartPolicy"] = "Never"
    marks = template["metadata"]["labels"]
    pods = {
        "name": NODE,
        "replicas": 1,
        "template": {
            "metadata": {"labels": {**marks, "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "completionMode": "Indexed",
                "backoffLimitPerIndex": 0,
                "podReplacementPolicy": "Failed",
                "template": template,
            },
        },
    }
    runtime = {
        "apiVersion": RUNTIMES.api_version,
        "kind": RUNTIMES.kind,
        "metadata": copy.deepcopy(metadata),
        "spec": {
            "mlPolicy": {"numNodes": job.spec.replicas},
            "template": {
                "metadata": {"labels": {**marks}},
                "spec": {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": [pods]},
            },
        },
    }
    group, _, _ = RUNTIMES.api_version.partition("/")
    train_job = {
        "apiVersion": RESOURCE.api_version,
        "kind": RESOURCE.kind,
        "metadata": metadata,
        "spec": {"runtimeRef": {"apiGroup": group, "kind": RUNTIMES.kind, "name": metadata["name"]}},
    }
    return runtime, train_job


def _has_made(status: Mapping[str, Any]) -> bool:
    """JobSet counts its Job as ready when all pods of it are."""
    jobs = status.get("jobsStatus") or ()
    return any(job.get(count) for job in jobs for count in ("ready", "succeeded", "failed"))


TRAIN_JOB = AttemptKind(
    resource=RESOURCE,
    operator="Kubeflow Trainer",
    beside=(RUNTIMES,),
    index_label="batch.kubernetes.io/job-completion-index",
    container=NODE,
    port="rendezvous",
    longest_suffix=f"-{NODE}-0-9999-abcde",
    address=lambda name: f"{name}-{NODE}-0-0.{name}",
    suspend=("suspend",),
    maker=lambda name: ("Job", f"{name}-{NODE}-0"),
    refused="FailedCreate",
    nameless="",  # JobSet makes the one Service of all replicas before their Job
    has_made=_has_made,
    documents=_documents,
    ends_with_pods=True,
    beneath="JobSet",
    late="must be created before the TrainJob is created",
)
