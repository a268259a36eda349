"""The TrainingJob CRD on a test's apiserver, a fresh start on it for each test; what is done to its jobs."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.waiting import wait_until

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
        wait_served(kubectl, crd["metadata"]["name"])
    there = {one["metadata"]["name"] for one in kubectl.get("namespaces")["items"]}
    for namespace in namespaces:
        if namespace not in there:
            kubectl.run("create", "namespace", namespace)


def wait_served(kubectl: Kubectl, crd: str) -> None:
    """Until a CRD's objects can be asked for; its kind is in discovery a moment after it is established.

    No `kubectl wait`: it fails on a definition that has no conditions yet.
    """
    wait_until(lambda: kubectl.attempt("get", crd, "-A").returncode == 0, f"{crd} to be served")


def remove_namespaces(kubectl: Kubectl, *names: str) -> None:
    """Until they are gone, for somebody else may need the names; while the CRD of jobs is still there."""
    for name in names:
        release(kubectl, name)
        kubectl.attempt("delete", "pods", f"-n={name}", "--all", "--force", "--grace-period=0")
    kubectl.run("delete", "namespace", *names, "--ignore-not-found", "--timeout=300s")


def clear(kubectl: Kubectl) -> None:
    """Remove all TrainingJobs, whatever holds them, and all Events."""
    for item in kubectl.get("trainingjobs", "-A")["items"]:
        meta = item["metadata"]
        where = [f"-n={meta['namespace']}", "trainingjob", meta["name"]]
        if meta.get("finalizers"):
            kubectl.attempt("patch", *where, "--type=merge", '-p={"metadata":{"finalizers":null}}')
        kubectl.attempt("delete", *where, "--ignore-not-found")
    if kubectl.get("events", "-A")["items"]:
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
