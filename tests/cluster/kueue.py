"""Kueue, deployed by the manifests that its own Go module carries; its image is built here.

PyTorchJobs alone are its business, so its webhooks are asked for those and for its own kinds alone. It stays
until the cluster goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from tests.cluster.build import build, program
from tests.cluster.cluster import Cluster
from tests.cluster.controllers import PATIENCE, Document, deploy
from tests.cluster.images import Image
from tests.cluster.kubectl import Kubectl
from tests.cluster.site import Site
from tests.cluster.tools import KUEUE as MODULE
from tests.waiting import wait_until

STANDALONE = "config/default"
QUEUES = Path(__file__).parents[2] / "k8s" / "kueue" / "queues.yaml"
QUEUE = "training"
"""The LocalQueue of QUEUES."""
URGENT, ROUTINE = "urgent", "routine"
"""Its priorities."""


def image() -> Image:
    """Its manifests start `/manager`."""
    name = f"docker.io/holdfast/kueue:{MODULE.version}"
    return Image(name, files={"manager": program("kueue")}, directories=("tmp",), entrypoint=("/manager",))


def manifests(kubectl: Kubectl) -> list[Document]:
    """What the kustomization renders to, with what differs here."""
    rendered = kubectl.run("kustomize", str(build(MODULE) / STANDALONE))
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    for document in documents:
        if document["metadata"]["name"] == "kueue-manager-config":
            [(name, text)] = document["data"].items()
            settings = yaml.safe_load(text)
            settings["integrations"]["frameworks"] = ["kubeflow.org/pytorchjob"]
            document["data"][name] = yaml.safe_dump(settings)
        elif document["kind"].endswith("WebhookConfiguration"):
            document["webhooks"] = [hook for hook in document["webhooks"] if _is_asked(hook)]
    return documents


def _is_asked(webhook: Document) -> bool:
    """Of pods, for one, nobody is to ask it: were it down, none could be made."""
    rules = webhook["rules"]
    return any("pytorchjobs" in rule["resources"] or "kueue.x-k8s.io" in rule["apiGroups"] for rule in rules)


def install(cluster: Cluster, site: Site) -> None:
    """Until its webhooks answer, as far as one can tell beforehand."""
    deploy(cluster, site, image(), manifests(cluster.kubectl))


def queues(kubectl: Kubectl, namespace: str, cpu: str) -> None:
    """Those of QUEUES, for the jobs of one namespace, with a quota of so much CPU."""
    documents = list(yaml.safe_load_all(QUEUES.read_text()))
    for document in documents:
        if document["kind"] == "LocalQueue":
            document["metadata"]["namespace"] = namespace
        for group in document.get("spec", {}).get("resourceGroups", []):
            [flavor] = group["flavors"]
            [quota] = [one for one in flavor["resources"] if one["name"] == "cpu"]
            quota["nominalQuota"] = cpu
    text = "\n---\n".join(json.dumps(document) for document in documents)
    # Its certificates are there a moment before the apiserver trusts them.
    wait_until(
        lambda: kubectl.attempt("apply", "--server-side", "-f", "-", document=text).returncode == 0,
        "Kueue to take its queues",
        PATIENCE,
    )

    def active() -> bool:
        status = kubectl.get("localqueue", QUEUE, f"-n={namespace}").get("status", {})
        return any(
            one["type"] == "Active" and one["status"] == "True" for one in status.get("conditions", [])
        )

    wait_until(active, "the queue to take jobs", PATIENCE)


@contextmanager
def urgent_job(cluster: Cluster, namespace: str, cpu: str) -> Iterator[None]:
    """Somebody else's PyTorchJob, of high priority in the same queue, admitted and running."""
    container = {
        "name": "pytorch",
        "image": cluster.busybox,
        "command": ["sleep", "100000"],
        "resources": {"requests": {"cpu": cpu, "memory": "16Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    user = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"terminationGracePeriodSeconds": 0, "securityContext": user, "containers": [container]}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": "urgent",
            "labels": {
                "kueue.x-k8s.io/queue-name": QUEUE,
                "kueue.x-k8s.io/priority-class": URGENT,
            },
        },
        "spec": {
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod}}
            }
        },
    }
    cluster.kubectl.apply(job, namespace=namespace)
    try:
        running = ("wait", f"-n={namespace}", "pytorchjob/urgent", "--for=condition=Running")
        cluster.kubectl.run(*running, f"--timeout={PATIENCE:g}s", seconds=PATIENCE + 10)
        yield
    finally:
        cluster.kubectl.run("delete", "pytorchjob", "urgent", f"-n={namespace}", "--wait=false")
