"""The Kubeflow Training Operator, deployed by the manifests that its own Go module carries.

Two things differ from what `kubectl apply -k` of its standalone overlay gives: the init container of
workers, which waits for rank 0's name, runs our busybox, and the kubelet asks every second whether the
operator is ready, where the manifest waits up to 25 s. Its image is built here, under the manifests' name.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.build import build
from tests.cluster.errors import ClusterError
from tests.cluster.images import BUSYBOX, TRAINING_OPERATOR
from tests.cluster.kubectl import Kubectl
from tests.cluster.tools import TRAINING_OPERATOR as MODULE
from tests.cluster.trainingjobs import wait_served
from tests.waiting import wait_until

NAMESPACE = "kubeflow"
DEPLOYMENT = "training-operator"
CRD = "pytorchjobs.kubeflow.org"
OVERLAY = "manifests/overlays/standalone"


def manifests(kubectl: Kubectl) -> list[dict[str, Any]]:
    """What the overlay renders to, with the init container's image set. Raises ClusterError."""
    documents: list[dict[str, Any]] = json.loads(_rendered(kubectl.binary))
    deployments = [document for document in documents if document["kind"] == "Deployment"]
    containers = [one for each in deployments for one in each["spec"]["template"]["spec"]["containers"]]
    if len(containers) != 1 or containers[0]["image"] != TRAINING_OPERATOR.removeprefix("docker.io/"):
        found = [container["image"] for container in containers]
        raise ClusterError(
            f"{OVERLAY} of the operator starts {found}, and the cluster has {TRAINING_OPERATOR}"
        )
    containers[0]["args"] = [f"--pytorch-init-container-image={BUSYBOX}"]
    containers[0]["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 1}
    return documents


@functools.cache
def _rendered(kubectl: Path) -> str:
    """The overlay as JSON, by this program and no cluster: 3 MB of YAML take seconds to render and parse."""
    rendered = Kubectl(Path(os.devnull), kubectl).run("kustomize", str(build(MODULE) / OVERLAY))
    return json.dumps([document for document in yaml.load_all(rendered, yaml.CSafeLoader) if document])


def crd(kubectl: Kubectl) -> dict[str, Any]:
    """The definition of PyTorchJobs alone; enough for a control plane without nodes, and a sixth of all."""
    named = (document for document in manifests(kubectl) if document["metadata"]["name"] == CRD)
    return next(named)


def serve_crd(kubectl: Kubectl) -> None:
    """Apply that definition, and wait until PyTorchJobs can be asked for."""
    kubectl.apply(crd(kubectl))
    wait_served(kubectl, CRD)


def install(kubectl: Kubectl) -> None:
    """Apply all; kinds first, for they take a moment to be served."""
    everything = manifests(kubectl)
    kinds = [
        document for document in everything if document["kind"] in ("CustomResourceDefinition", "Namespace")
    ]
    kubectl.apply(*kinds)
    kubectl.apply(*(document for document in everything if document not in kinds))


def wait_until_asked(kubectl: Kubectl) -> None:
    """Until the apiserver reaches its webhook, a moment after it is ready: it refuses what is not valid."""
    nameless = {"template": {"spec": {"containers": [{"name": "main", "image": BUSYBOX}]}}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "nameless", "namespace": "default"},
        "spec": {"pytorchReplicaSpecs": {"Worker": nameless}},
    }

    def refused() -> bool:
        done = kubectl.attempt("create", "-f", "-", document=json.dumps(job))
        if done.returncode == 0:
            kubectl.run("delete", "pytorchjob", "nameless", "-n=default")
        return "must have at least one container with name pytorch" in done.stderr

    wait_until(refused, "the operator's webhook to be asked")
