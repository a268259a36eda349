"""Claims that all pods of a job share, and whose files a test may read.

On a cluster that was started here a claim is a directory of this machine. Elsewhere the cluster provides
it, by its default storage class or the one that STORAGE_CLASS_UNDER_TEST names, and its files are copied
here through a pod.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.component import nodes_of
from tests.cluster.machine import Machine
from tests.cluster.site import Site
from tests.cluster.system import find, run

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
def host_claim(cluster: Cluster, site: Site, namespace: str, name: str, *, size: int = 0) -> Iterator[Path]:
    """PersistentVolumeClaim `name` in `namespace`, bound to the directory that is given; gone afterwards.

    With `size` it is a file system of its own, of so many bytes, on the nodes that the cluster has now.
    """
    directory = site.state / "claims" / namespace / name
    directory.mkdir(parents=True)
    try:
        with _small_disk(site, directory, size) if size else nullcontext(directory) as seen:
            seen.chmod(0o777)  # hostPath knows no fsGroup
            with _bound(cluster, namespace, name, directory):
                yield seen
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def lost_claim(cluster: Cluster, namespace: str, name: str) -> Iterator[None]:
    """One that is bound to a directory which no node has: whoever mounts it does not start."""
    with _bound(cluster, namespace, name, Path("/no/such/directory"), kind="Directory"):
        yield


@contextmanager
def _small_disk(site: Site, directory: Path, size: int) -> Iterator[Path]:
    """An ext4 in a file, mounted at `directory` in every node: one file system, as on shared storage.

    Yields where it is seen from here. Nothing is mounted outside the nodes, so it goes with them too.
    """
    image = directory.with_name(f"{directory.name}.img")
    with image.open("wb") as file:
        file.truncate(size)
    run([find("mkfs.ext4") or "mkfs.ext4", "-q", "-m", "0", image], "making a small file system")
    machines = [Machine.running(site.node(number)) for number in nodes_of(site)]
    mount = f"mount -o loop {shlex.quote(str(image))} {shlex.quote(str(directory))}"
    try:
        for machine in machines:
            machine.run(mount, "mounting a small file system")
        yield Path(f"/proc/{machines[0].pid}/root") / directory.relative_to("/")
    finally:
        for machine in machines:
            machine.run(f"umount --lazy {shlex.quote(str(directory))} || true", "unmounting it")
        image.unlink()


@contextmanager
def _bound(cluster: Cluster, namespace: str, name: str, directory: Path, kind: str = "") -> Iterator[None]:
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
                "hostPath": {"path": str(directory), "type": kind},
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
        yield
    finally:
        cluster.kubectl.attempt("delete", "pv", volume, "--wait=false")
