"""JobSet's controller, deployed by the manifests that its own Go module carries; its image is built here.

It makes the certificate of its webhooks itself, and these are asked of its own kind and its own pods alone.
It stays until the cluster goes.
"""

from __future__ import annotations

import json

import yaml
from tests.cluster.build import build, program
from tests.cluster.cluster import Cluster
from tests.cluster.controllers import PATIENCE, Document, deploy
from tests.cluster.images import BUSYBOX
from tests.cluster.kubectl import Kubectl
from tests.cluster.oci import Image
from tests.cluster.site import Site
from tests.cluster.tools import JOBSET as MODULE
from tests.waiting import wait_until

NAMESPACE = "jobset-system"
DEPLOYMENT = "jobset-controller-manager"
DEFAULT = "config/default"


def image() -> Image:
    """Its manifests start `/manager`."""
    name = f"docker.io/holdfast/jobset:{MODULE.version}"
    return Image(name, files={"manager": program("jobset")}, directories=("tmp",), entrypoint=("/manager",))


def manifests(kubectl: Kubectl) -> list[Document]:
    """What the kustomization renders to."""
    rendered = kubectl.run("kustomize", str(build(MODULE) / DEFAULT))
    return [document for document in yaml.safe_load_all(rendered) if document]


def install(cluster: Cluster, site: Site) -> None:
    """Until its webhooks answer."""
    kubectl = cluster.kubectl
    deploy(cluster, site, image(), manifests(kubectl))
    # Its certificates are there a moment before the apiserver trusts them.
    wait_until(lambda: _takes(kubectl), "JobSet's webhooks to be asked", PATIENCE)


def _takes(kubectl: Kubectl) -> bool:
    """Whether a JobSet would be admitted; none is made."""
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": BUSYBOX}]}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "asked", "namespace": "default"},
        "spec": {
            "replicatedJobs": [{"name": "main", "template": {"spec": {"template": {"spec": pod}}}}],
        },
    }
    return (
        kubectl.attempt("create", "--dry-run=server", "-f", "-", document=json.dumps(jobset)).returncode == 0
    )
