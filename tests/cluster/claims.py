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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.component import nodes_of
from tests.cluster.machine import Machine
from tests.cluster.site import Site
from tests.cluster.system import find, run
from tests.disks import break_device
from tests.waiting import wait_until

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
    directory = _directory_of(site, namespace, name)
    directory.mkdir(parents=True)
    try:
        with _small_disk(ClaimedDisk(site, directory), size) if size else nullcontext(directory) as seen:
            seen.chmod(0o777)  # hostPath knows no fsGroup
            with _bound(cluster, namespace, name, directory):
                yield seen
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _directory_of(site: Site, namespace: str, name: str) -> Path:
    return site.state / "claims" / namespace / name


@contextmanager
def lost_claim(cluster: Cluster, namespace: str, name: str) -> Iterator[None]:
    """One that is bound to a directory which no node has: whoever mounts it does not start."""
    with _bound(cluster, namespace, name, Path("/no/such/directory"), kind="Directory"):
        yield


@dataclass(frozen=True)
class ClaimedDisk:
    """An ext4 in a file, mounted at a claim's directory in every node: one file system, as on shared storage.

    Nothing is mounted outside the nodes, so it goes with them too.
    """

    site: Site
    directory: Path

    @classmethod
    def of(cls, site: Site, namespace: str, name: str) -> ClaimedDisk:
        """Of a host_claim that has a size."""
        return cls(site, _directory_of(site, namespace, name))

    @property
    def image(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.img")

    @property
    def _machines(self) -> list[Machine]:
        return [Machine.running(self.site.node(number)) for number in nodes_of(self.site)]

    @property
    def seen(self) -> Path:
        """Where it is seen from here."""
        return Path(f"/proc/{self._machines[0].pid}/root") / self.directory.relative_to("/")

    def _device(self) -> str:
        """Empty once nobody has it mounted."""
        words = ["--associated", str(self.image), "--noheadings", "--output", "NAME"]
        return run([find("losetup") or "losetup", *words], "looking for a small file system").strip()

    def mount(self) -> None:
        what = f"{shlex.quote(str(self.image))} {shlex.quote(str(self.directory))}"
        for machine in self._machines:
            machine.run(f"mount -o loop,errors=remount-ro {what}", "mounting a small file system")

    def unmount(self) -> None:
        """Pods that have it keep it."""
        for machine in self._machines:
            machine.run(f"umount --lazy {shlex.quote(str(self.directory))} || true", "unmounting it")

    def fail(self) -> None:
        """It can be read alone from now on, by all."""
        break_device(Path(self._device()).name)

    def mend(self) -> None:
        """Mount it anew, checked, once no pod has it any more: else it would be the same one again."""
        self.unmount()
        wait_until(lambda: not self._device(), "the last pod to let go of its volume", 120)
        mended = f"{find('e2fsck') or 'e2fsck'} -f -y {shlex.quote(str(self.image))} || test $? = 1"
        run(["sh", "-c", mended], "checking a small file system")
        self.mount()


@contextmanager
def _small_disk(disk: ClaimedDisk, size: int) -> Iterator[Path]:
    with disk.image.open("wb") as file:
        file.truncate(size)
    run([find("mkfs.ext4") or "mkfs.ext4", "-q", "-m", "0", disk.image], "making a small file system")
    try:
        disk.mount()
        yield disk.seen
    finally:
        disk.unmount()
        disk.image.unlink()


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
