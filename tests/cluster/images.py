"""The small images that a cluster needs to run anything, made here and imported into containerd.

Names are in full and nothing is ever pulled: there is no registry in the tests.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.cluster.build import program
from tests.cluster.oci import Image, write_image
from tests.cluster.site import Site
from tests.cluster.system import find, run
from tests.cluster.tools import COREDNS

NAMESPACE = "k8s.io"
"""Of containerd's namespaces the one that the kubelet sees."""

PAUSE = "docker.io/holdfast/pause:1"
BUSYBOX = "docker.io/holdfast/busybox:1"
TRAINING_OPERATOR = "docker.io/kubeflow/training-operator:v1-04f9f13"
"""As the operator's own manifests name it; here it is built from the module that carries them."""

APPLETS = (
    "cat cp date df env false grep head hostname httpd id ip kill ln ls mkdir mv ps pwd rm sed seq sleep "
    "sort stat tail tar tee test timeout top touch true vi wc xargs"
)


def coredns_name() -> str:
    return f"docker.io/coredns/coredns:{COREDNS.version.removeprefix('v')}"


def pause() -> Image:
    """What a pod's sandbox runs."""
    return Image(PAUSE, files={"pause": program("pause")}, entrypoint=("/pause",))


def busybox() -> Image:
    """A shell and small programs, for tests and for the operator's init container.

    The shell is dash: busybox's own prefers its built-in nslookup to the one on the PATH.
    """
    dash = Path(find("dash") or "/bin/dash")
    return Image(
        BUSYBOX,
        files={
            "bin/busybox": Path(find("/bin/busybox") or "/bin/busybox"),
            "bin/sh": dash,
            **{str(path).lstrip("/"): path for path in libraries(dash)},
            **{f"bin/{name}": program(name) for name in ("nslookup", "wget")},
        },
        links={f"bin/{name}": "busybox" for name in APPLETS.split()},
        texts={
            "etc/passwd": "root:x:0:0:root:/:/bin/sh\nnobody:x:65532:65532:nobody:/tmp:/bin/sh\n",
            "etc/group": "root:x:0:\nnobody:x:65532:\n",
        },
        directories=("tmp", "proc", "sys", "dev", "var"),
        command=("sh",),
        user="",
    )


def libraries(binary: Path) -> list[Path]:
    """The shared libraries that a program loads, and the loader itself, as ldd finds them."""
    words = run(["ldd", binary], f"looking for the libraries of {binary}").split()
    return [Path(word) for word in words if word.startswith("/")]


def coredns() -> Image:
    return Image(coredns_name(), files={"coredns": program("coredns")}, entrypoint=("/coredns",))


def training_operator() -> Image:
    """Its manifests start `/manager`."""
    return Image(
        TRAINING_OPERATOR,
        files={"manager": program("training-operator")},
        directories=("tmp",),
        entrypoint=("/manager",),
    )


def _second_name(name: str) -> bool:
    return name.startswith("sha256:")


class ImageStore:
    """containerd's images in the namespace that the kubelet sees."""

    def __init__(self, site: Site, enter: list[str]):
        self.site = site
        self.enter = enter
        ctr = find("ctr") or "ctr"
        self.command = [*enter, ctr, f"--address={site.containerd_socket}", f"-n={NAMESPACE}"]
        """ctr, without its verb."""

    def run(self, *words: str | Path) -> str:
        """Output of ctr. Raises ClusterError."""
        return run([*self.command, *words], "talking to containerd")

    def digests(self) -> dict[str, str]:
        """Image name to digest."""
        lines = [line.split() for line in self.run("images", "list").splitlines()[1:]]
        return {words[0]: words[2] for words in lines}

    def add(self, images: list[Image]) -> None:
        """Import those that are not there already."""
        there = self.digests()
        for image in images:
            with tempfile.TemporaryDirectory(prefix="holdfast-image-") as scratch:
                archive = Path(scratch) / "image.tar"
                if write_image(image, archive) != there.get(image.name):
                    self.run("images", "import", archive)

    def add_archive(self, name: str, archive: Path, digest: str) -> None:
        """Import an image from its archive, unless it is there already."""
        if self.digests().get(name) != digest:
            self.run("images", "import", archive)

    def forget_replaced(self) -> None:
        """Remove images whose name has gone to a newer one.

        The CRI plugin gives each image a second name, its configuration's digest, and keeps it under that;
        the kubelet, which would collect it, is told not to. A trainer's takes 11 GB.
        """
        there = self.digests()
        named = {digest for name, digest in there.items() if not _second_name(name)}
        if replaced := [name for name, digest in there.items() if digest not in named]:
            self.run("images", "remove", "--sync", *replaced)

    def manifest(self, digest: str) -> dict[str, Any]:
        """An image's manifest, by the image's digest."""
        return dict(json.loads(self.run("content", "get", digest)))

    def config(self, digest: str) -> dict[str, Any]:
        """What an image says of itself: user, entry point, environment, labels."""
        text = self.run("content", "get", self.manifest(digest)["config"]["digest"])
        return dict(json.loads(text)["config"])

    def size(self, digest: str) -> int:
        """Bytes of an image's layers, unpacked: what is built here is not compressed."""
        return sum(layer["size"] for layer in self.manifest(digest)["layers"])

    def remove_containers(self) -> None:
        """Forget containers that an earlier life has left; their processes ended with it."""
        for name in self.run("containers", "list", "-q").split():
            self.run("containers", "delete", name)
