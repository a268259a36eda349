"""The base image of the tests: Debian, made by debootstrap and kept as an archive in the cache.

The Dockerfiles take any base with apt and a Python; this one needs no registry.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from tests.cluster.locks import locked
from tests.cluster.oci import write_file_layer
from tests.cluster.site import cache_directory
from tests.cluster.system import BASE_IMAGE_PACKAGES, install, run

SUITE = "bookworm"
NAME = f"docker.io/holdfast/debian:{SUITE}"
INCLUDED = ("ca-certificates", "python3")
EXCLUDED = ("usr/share/doc", "usr/share/locale", "usr/share/man", "usr/share/info")
"""As images called slim leave them out; dpkg is told to, also when more is installed on top."""


def archive() -> tuple[Path, str]:
    """(archive to import, digest of the image in it), made where it is missing. Needs root.

    Raises MissingTool, or ClusterError with debootstrap's words.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    path = cache_directory() / "images" / f"{SUITE}-{recipe}.tar"
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
        for directory in EXCLUDED:
            shutil.rmtree(root / directory)
        rules = "".join(f"path-exclude=/{directory}/*\n" for directory in EXCLUDED)
        (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(rules)
        command = ["tar", "--create", "--file", str(layer), "--numeric-owner", "--xattrs", "--sort=name"]
        run([*command, "--exclude=./dev/*", "--directory", root, "."], "packing Debian")
        config = {
            "Cmd": ["bash"],
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        }
        return write_file_layer(NAME, config, layer, path)
