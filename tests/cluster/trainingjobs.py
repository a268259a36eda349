"""The TrainingJob CRD on a test's apiserver, a fresh start on it for each test; what is done to its jobs."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.kubectl import Kubectl

PERMISSIVE: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "trainingjobs.holdfast.dev"},
    "spec": {
        "group": "holdfast.dev",
        "scope": "Namespaced",
        "names": {
            "kind": "TrainingJob",
            "plural": "trainingjobs",
            "singular": "trainingjob",
            "shortNames": ["tj"],
        },
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}
"""Lets everything through, so that what only the controller refuses can be tested."""


def install(kubectl: Kubectl, *documents: dict[str, Any], namespaces: tuple[str, ...] = ()) -> None:
    """Apply CRDs (by default the permissive one), wait until they are served, make namespaces."""
    crds = documents or (PERMISSIVE,)
    kubectl.apply(*crds)
    for crd in crds:
        name = crd["metadata"]["name"]
        kubectl.run("wait", "--for=condition=Established", f"crd/{name}", "--timeout=300s")
    there = kubectl.run("get", "namespaces", "-o", "name").split()
    for namespace in namespaces:
        if f"namespace/{namespace}" not in there:
            kubectl.run("create", "namespace", namespace)


def clear(kubectl: Kubectl) -> None:
    """Remove all TrainingJobs, whatever holds them, and all Events."""
    for item in kubectl.get("trainingjobs", "-A")["items"]:
        meta = item["metadata"]
        where = [f"-n={meta['namespace']}", "trainingjob", meta["name"]]
        if meta.get("finalizers"):
            kubectl.attempt("patch", *where, "--type=merge", '-p={"metadata":{"finalizers":null}}')
        kubectl.attempt("delete", *where, "--ignore-not-found")
    kubectl.run("delete", "events", "-A", "--all", "--wait=false")


def release(kubectl: Kubectl, namespace: str) -> None:
    """Take off what holds jobs and pods when no controller is left to do it."""
    for kind in ("trainingjobs", "pods"):
        for item in kubectl.get(kind, f"-n={namespace}")["items"]:
            free = ["patch", kind, item["metadata"]["name"], f"-n={namespace}", "--type=merge"]
            kubectl.attempt(*free, '-p={"metadata":{"finalizers":null}}')


def evict(kubectl: Kubectl, namespace: str, pod: str) -> None:
    """As `kubectl drain` does."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    kubectl.run("create", f"--raw={path}", "-f", "-", document=json.dumps(eviction))
