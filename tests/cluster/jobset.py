"""JobSet's controller, deployed by the manifests that its own Go module carries; its image is built here.

Two things differ from what `kubectl apply -k` of its default kustomization gives: it asks for little, and the
kubelet asks every second whether it is ready. It makes the certificate of its webhooks itself, and these are
asked of its own kind and its own pods alone. It stays until the cluster goes.
"""

from __future__ import annotations

import json
from typing import Any

import yaml
from tests.cluster.build import build, program
from tests.cluster.cluster import Cluster
from tests.cluster.images import BUSYBOX, ImageStore
from tests.cluster.kubectl import Kubectl
from tests.cluster.machine import Machine
from tests.cluster.oci import Image
from tests.cluster.site import Site
from tests.cluster.tools import JOBSET as MODULE
from tests.waiting import wait_until

NAMESPACE = "jobset-system"
DEPLOYMENT = "jobset-controller-manager"
DEFAULT = "config/default"
PATIENCE = 400.0

Document = dict[str, Any]


def image() -> Image:
    """Its manifests start `/manager`."""
    name = f"docker.io/holdfast/jobset:{MODULE.version}"
    return Image(name, files={"manager": program("jobset")}, directories=("tmp",), entrypoint=("/manager",))


def manifests(kubectl: Kubectl, node: str) -> list[Document]:
    """What the kustomization renders to, with what differs here."""
    rendered = kubectl.run("kustomize", str(build(MODULE) / DEFAULT))
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    [deployment] = [document for document in documents if document["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    pod["nodeSelector"] = {"kubernetes.io/hostname": node}
    [container] = pod["containers"]
    container |= {"image": image().name, "imagePullPolicy": "Never"}
    container["resources"] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 1}
    return documents


def install(cluster: Cluster, site: Site) -> None:
    """Until its webhooks answer. On the first node, whose containerd alone gets the image."""
    kubectl, first = cluster.kubectl, site.node(1)
    ImageStore(first, Machine.running(first).enter).add([image()])
    everything = manifests(kubectl, first.node_name)
    kinds = [one for one in everything if one["kind"] in ("CustomResourceDefinition", "Namespace")]
    kubectl.apply(*kinds)
    kubectl.apply(*(one for one in everything if one not in kinds))
    rollout = ("rollout", "status", f"-n={NAMESPACE}", f"deployment/{DEPLOYMENT}", f"--timeout={PATIENCE:g}s")
    kubectl.run(*rollout, seconds=PATIENCE + 10)
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
