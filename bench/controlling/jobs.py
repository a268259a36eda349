"""The jobs that the benchmark submits, and what a bare client has to write for one of them.

A job needs four writes: itself, its status (an attempt is opened, before anything is started), the
ConfigMap and the PyTorchJob. `raw_writes` makes their bodies with the controller's own code, so that both
sides write the same bytes; the bare client's TrainingJobs are of a kind of their own (`RawJob`, the same
schema), because the controller would take any other for work.
"""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

from bench.controlling.api import JSON, JSON_PATCH

from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube.resource import new_document, status_document
from holdfast_controller.manifests import attempt_manifests
from holdfast_controller.pod_settings import PodSettings
from holdfast_controller.policy.decide import Evidence, decide

RAW_GROUP = "bench.holdfast.dev"
RAW_PLURAL = "rawjobs"
POD_SETTINGS = {"defaultImage": "holdfast-trainer:bench", "defaultClaim": "runs"}
NAMESPACES = 10

SPEC: dict[str, Any] = {
    "command": ["python", "-m", "holdfast_trainer", "train"],
    "config": {
        "model": {"layers": 12, "heads": 12, "embedding": 768, "block": 1024, "dropout": 0.0},
        "data": {"path": "/holdfast/data/openwebtext", "workers": 2},
        "optimizer": {"learning_rate": 0.0006, "weight_decay": 0.1, "warmup_steps": 2000},
        "train": {"steps": 600000, "batch": 12, "accumulate": 40, "seed": 1337},
    },
    "replicas": 1,
    "resources": {"cpu": "100m", "memory": "128Mi"},
    "env": {"OMP_NUM_THREADS": "1"},
    "graceSeconds": 30,
}

Write = tuple[str, str, bytes, str]
"""Method, path, body, content type."""


def namespace_of(number: int) -> str:
    return f"team-{number % NAMESPACES}"


def key_of(number: int) -> str:
    return f"{namespace_of(number)}/job-{number}"


def submission(number: int, replicas: int) -> tuple[str, bytes]:
    """(path, body) of the REST request that submits job `number`."""
    namespace = namespace_of(number)
    body = {
        "metadata": {"name": f"job-{number}", "namespace": namespace},
        "spec": {**SPEC, "replicas": replicas},
    }
    return f"/v1/namespaces/{namespace}/jobs", json.dumps(body).encode()


def raw_crd(crd: dict[str, Any]) -> dict[str, Any]:
    """The TrainingJobs' CRD under another name: the server checks and prunes the same."""
    raw = copy.deepcopy(crd)
    raw["metadata"] = {"name": f"{RAW_PLURAL}.{RAW_GROUP}"}
    raw["spec"]["group"] = RAW_GROUP
    raw["spec"]["names"] = {"kind": "RawJob", "plural": RAW_PLURAL, "singular": "rawjob"}
    return raw


def raw_writes(number: int, replicas: int) -> list[Write]:
    """The four writes of one job, in their order."""
    namespace = namespace_of(number)
    job = TrainingJob(
        metadata=Metadata(name=f"raw-{number}", namespace=namespace),
        spec=Spec.model_validate({**SPEC, "replicas": replicas}),
    )
    status = decide(job, None, Evidence(), datetime.now(UTC)).status
    manifests = attempt_manifests(job, 1, PodSettings.model_validate(POD_SETTINGS))
    document = {**new_document(job), "apiVersion": f"{RAW_GROUP}/v1alpha1", "kind": "RawJob"}
    patch = [{"op": "add", "path": "/status", "value": status_document(status)}]
    for manifest in manifests:
        # The controller looks at what carries its label: this is not its work.
        manifest["metadata"]["labels"].pop("app.kubernetes.io/managed-by")
    jobs = f"/apis/{RAW_GROUP}/v1alpha1/namespaces/{namespace}/{RAW_PLURAL}"
    return [
        ("POST", jobs, json.dumps(document).encode(), JSON),
        ("PATCH", f"{jobs}/{job.metadata.name}/status", json.dumps(patch).encode(), JSON_PATCH),
        (
            "POST",
            f"/api/v1/namespaces/{namespace}/configmaps",
            json.dumps(manifests.beside[0]).encode(),
            JSON,
        ),
        (
            "POST",
            f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs",
            json.dumps(manifests.attempt_object).encode(),
            JSON,
        ),
    ]
