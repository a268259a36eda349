"""Kubeflow Trainer v2 on JobSet (jobset.py), deployed by the manifests that its own Go module carries; its
image is built here.

Of its overlay one thing is left out: JobSet, which that would fetch. It makes the certificate of its webhooks
itself. It stays until the cluster goes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import yaml
from tests.cluster import jobset
from tests.cluster.build import build, carried, program
from tests.cluster.cluster import Cluster
from tests.cluster.controllers import PATIENCE, Document, deploy
from tests.cluster.kubectl import Kubectl
from tests.cluster.oci import Image
from tests.cluster.site import Site
from tests.cluster.tools import TRAINER as MODULE
from tests.cluster.trainingjobs import wait_served
from tests.waiting import wait_until

NAMESPACE = "kubeflow-system"
DEPLOYMENT = "kubeflow-trainer-controller-manager"
OVERLAY = "manifests/overlays/manager"
CRDS = "manifests/base/crds"
NAMES = ("trainjobs.trainer.kubeflow.org", "trainingruntimes.trainer.kubeflow.org")


def image() -> Image:
    """Its manifests leave what is started to the image."""
    return Image(
        f"docker.io/holdfast/kubeflow-trainer:{MODULE.version}",
        files={"manager": program("trainer-controller-manager")},
        directories=("tmp",),
        entrypoint=("/manager",),
    )


def manifests(kubectl: Kubectl) -> list[Document]:
    """What the overlay renders to, without JobSet."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(build(MODULE) / "manifests", Path(scratch) / "manifests")
        overlay = Path(scratch) / OVERLAY / "kustomization.yaml"
        kustomization = yaml.safe_load(overlay.read_text())
        kustomization["resources"].remove("../../third-party/jobset")
        overlay.write_text(yaml.safe_dump(kustomization))
        rendered = kubectl.run("kustomize", str(overlay.parent))
    return [document for document in yaml.load_all(rendered, yaml.CSafeLoader) if document]


def serve_crds(kubectl: Kubectl) -> None:
    """Apply the definitions alone, enough for a control plane, and wait until TrainJobs can be asked for."""
    definitions = (carried(MODULE) / CRDS).glob("trainer.kubeflow.org_*.yaml")
    kubectl.apply(*(yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(definitions)))
    for name in NAMES:
        wait_served(kubectl, name)


def install(cluster: Cluster, site: Site) -> None:
    """Until its webhooks answer."""
    jobset.install(cluster, site)
    deploy(cluster, site, image(), manifests(cluster.kubectl))
    wait_until_asked(cluster.kubectl)


def wait_until_asked(kubectl: Kubectl) -> None:
    """Until the apiserver reaches its webhooks, a moment after it is ready: they miss a runtime."""
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "asked", "namespace": "default"},
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "none"}},
    }

    def refused() -> bool:
        done = kubectl.attempt("create", "--dry-run=server", "-f", "-", document=json.dumps(job))
        return "must be created before the TrainJob is created" in done.stderr

    wait_until(refused, "Trainer's webhooks to be asked", PATIENCE)
