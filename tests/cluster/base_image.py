"""The base image of the tests: Debian, made by debootstrap and kept as an archive in the cache.

The Dockerfiles take any base with apt and a Python; this one needs no registry.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cluster.locks import locked
from tests.cluster.oci import write_file_layer
from tests.cluster.site import cache_directory
from tests.cluster.system import BASE_IMAGE_PACKAGES, install, run

SUITE = "bookworm"
NAME = f"docker.io/holdfast/debian:{SUITE}"
INCLUDED = ("ca-certificates", "python3")


def archive() -> tuple[Path, str]:
    """(archive to import, digest of the image in it), made where it is missing. Needs root.

    Raises MissingTool, or ClusterError with debootstrap's words.
    """
    path = cache_directory() / "images" / f"{SUITE}-{'-'.join(INCLUDED)}.tar"
    digest = path.with_suffix(".digest")
    with locked(path.with_suffix(".lock")):
        if not digest.exists():
            install(BASE_IMAGE_PACKAGES)
            print(f"cluster: bootstrapping Debian {SUITE} for images", flush=True)
            digest.write_text(_bootstrap(path))
    return path, digest.read_text()


def _bootstrap(path: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="holdfast-debian-") as scratch:
        root, layer = Path(scratch) / "root", Path(scratch) / "layer.tar"
        include = f"--include={','.join(INCLUDED)}"
        run(["debootstrap", "--variant=minbase", include, SUITE, root], "bootstrapping Debian")
        # What apt has fetched is of no use to those who build on it, and is half of the size.
        for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*", "var/log/*.log"):
            for left in root.glob(pattern):
                left.unlink()
        command = ["tar", "--create", "--file", str(layer), "--numeric-owner", "--xattrs", "--sort=name"]
        run([*command, "--exclude=./dev/*", "--directory", root, "."], "packing Debian")
        config = {
            "Cmd": ["bash"],
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        }
        return write_file_layer(NAME, config, layer, path)
