"""A claim on a directory of this machine, which all pods of the one node may share and a test may read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.site import Site


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
