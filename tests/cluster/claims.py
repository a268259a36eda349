"""Claims that all pods of a job share, and whose files a test may read.

On a cluster that was started here a claim is a directory of this machine. Elsewhere the cluster provides
it, by its default storage class or the one that STORAGE_CLASS_UNDER_TEST names, and its files are copied
here through a pod.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.site import Site

Files = Callable[[str], Path]
"""From a path within the claim to where its files, as they are now, can be read here."""

USER = 65532
"""The one that our pods run as."""


@contextmanager
def claim(cluster: Cluster, namespace: str, name: str, scratch: Path) -> Iterator[Files]:
    """PersistentVolumeClaim `name` in `namespace`; copies go under `scratch`. Gone afterwards."""
    if cluster.site is not None:
        with host_claim(cluster, cluster.site, namespace, name) as directory:
            yield directory.joinpath
        return
    cluster.kubectl.apply(_provided(name), namespace=namespace)
    cluster.kubectl.apply(_reader(cluster, name), namespace=namespace)
    reader = f"read-{name}"
    cluster.kubectl.run(
        "wait", f"-n={namespace}", f"pod/{reader}", "--for=condition=Ready", "--timeout=300s", seconds=310
    )

    def files(path: str) -> Path:
        target = scratch / name / path
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        cluster.kubectl.run(
            "cp", f"{namespace}/{reader}:/claim/{path}", str(target), "--retries=3", seconds=300
        )
        return target

    try:
        yield files
    finally:
        cluster.kubectl.attempt("delete", "pod", reader, f"-n={namespace}", "--wait=false")
        cluster.kubectl.attempt("delete", "pvc", name, f"-n={namespace}", "--wait=false")


def _provided(name: str) -> dict[str, Any]:
    named = os.environ.get("STORAGE_CLASS_UNDER_TEST")
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            **({"storageClassName": named} if named else {}),
        },
    }


def _reader(cluster: Cluster, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"read-{name}"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "reader",
                    "image": cluster.busybox,
                    "command": ["sleep", "86400"],
                    "volumeMounts": [{"name": "claim", "mountPath": "/claim", "readOnly": True}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": name}}],
        },
    }


@contextmanager
def host_claim(cluster: Cluster, site: Site, namespace: str, name: str) -> Iterator[Path]:
    """PersistentVolumeClaim `name` in `namespace`, bound to the directory that is given; gone afterwards."""
    directory = site.state / "claims" / namespace / name
    directory.mkdir(parents=True)
    directory.chmod(0o777)  # hostPath knows no fsGroup
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
    }
    volume = f"{name}-{namespace}"
    cluster.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **spec,
                "capacity": {"storage": "1Gi"},
                "hostPath": {"path": str(directory)},
                "claimRef": {"namespace": namespace, "name": name},
            },
        },
    )
    cluster.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {**spec, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
        },
        namespace=namespace,
    )
    try:
        yield directory
    finally:
        cluster.kubectl.attempt("delete", "pv", volume, "--wait=false")
        shutil.rmtree(directory, ignore_errors=True)
