"""Controllers that tests deploy on a cluster of theirs, by the manifests that their own Go modules carry.

What differs from those: each runs on the first node, whose containerd alone gets its image; it asks for
little; and the kubelet asks every second whether it is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.images import ImageStore
from tests.cluster.kubectl import Kubectl
from tests.cluster.machine import Machine
from tests.cluster.oci import Image
from tests.cluster.site import Site

PATIENCE = 400.0

Document = dict[str, Any]


def deploy(cluster: Cluster, site: Site, image: Image, documents: Sequence[Document]) -> None:
    """Until the only Deployment of `documents` is ready; these are changed. Kinds first, for they take a
    moment to be served."""
    kubectl, first = cluster.kubectl, site.node(1)
    ImageStore(first, Machine.running(first).enter).add([image])
    [deployment] = [document for document in documents if document["kind"] == "Deployment"]
    _fit(deployment, image, first.node_name)
    kinds = [one for one in documents if one["kind"] in ("CustomResourceDefinition", "Namespace")]
    kubectl.apply(*kinds)
    kubectl.apply(*(one for one in documents if one not in kinds))
    meta = deployment["metadata"]
    wait_ready(kubectl, meta["namespace"], meta["name"])


def wait_ready(kubectl: Kubectl, namespace: str, deployment: str) -> None:
    rollout = ("rollout", "status", f"-n={namespace}", f"deployment/{deployment}", f"--timeout={PATIENCE:g}s")
    kubectl.run(*rollout, seconds=PATIENCE + 10)


def _fit(deployment: Document, image: Image, node: str) -> None:
    pod = deployment["spec"]["template"]["spec"]
    pod["nodeSelector"] = {"kubernetes.io/hostname": node}
    [container] = pod["containers"]
    container |= {"image": image.name, "imagePullPolicy": "Never"}
    container["resources"] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 1}
