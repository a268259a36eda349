"""BuildKit beside the node's containerd: what it builds from docker/, the kubelet can run.

Its containerd worker keeps images in the kubelet's own namespace, so nothing is pushed, pulled or
imported. Its cache is kept in the cluster's image store and outlives the cluster. It is started when the
first image is built, and ends with the cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import base_image
from tests.cluster.build import program
from tests.cluster.component import environment, running, start
from tests.cluster.errors import BuildFailed
from tests.cluster.images import NAMESPACE, ImageStore
from tests.cluster.locks import locked
from tests.cluster.machine import Machine
from tests.cluster.room import CLUSTER, TRAINER, need_room
from tests.cluster.site import Site
from tests.cluster.system import run

ROOT = Path(__file__).parents[2]
# Of what no image has: downloads and builders are 7.5 GB, and a change of what the trainer needs leaves
# layers of 12 GB that no image has any more. What is above goes, the longest unused first.
CACHE = "9GB"
MINIMUM_FREE = "8GB"


@dataclass(frozen=True)
class Built:
    """An image that containerd has."""

    name: str
    digest: str
    seconds: float
    log: str
    """What BuildKit said, one line a step."""

    @property
    def cached(self) -> frozenset[str]:
        """The steps that were not run again, as the Dockerfile names them: `[dependencies 1/2] RUN ...`."""
        names = dict(re.findall(r"^(#\d+) (\[.*)$", self.log, re.MULTILINE))
        again = re.findall(r"^(#\d+) CACHED$", self.log, re.MULTILINE)
        return frozenset(names[step] for step in again if step in names)


def image_name(kind: str) -> str:
    """Name of the trainer's or controller's image, in full."""
    return f"docker.io/library/holdfast-{kind}:test"


def build_image(
    machine: Machine,
    dockerfile: str,
    name: str,
    *,
    arguments: Mapping[str, str] | None = None,
    context: Path = ROOT,
    directory: Path | None = None,
    target: str = "runtime",
    unpack: bool = True,
) -> Built:
    """Build `dockerfile` into the node's containerd as `name`, which is in full.

    Without `unpack` its layers are stored alone, which no pod can start from yet. `dockerfile` lies in
    `directory`, by default in the context's docker/.
    Raises NoRoom, and BuildFailed with the end of BuildKit's log.
    """
    site = machine.site
    first = "trainer" in dockerfile and not any("holdfast-trainer" in name for name in _names(machine))
    need_room(site.images, TRAINER if first else CLUSTER, f"an image of {dockerfile}")
    metadata = site.state / f"{target}-{os.getpid()}.metadata.json"
    command = [
        *_build(machine, dockerfile, arguments or {}, context, directory, target),
        # Compressing costs more than it saves where nothing is sent anywhere.
        f"--output=type=image,name={name},unpack={str(unpack).lower()},compression=uncompressed",
        f"--metadata-file={metadata}",
    ]
    began = time.monotonic()
    done = subprocess.run(
        command,
        env=environment(site),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise BuildFailed(f"{dockerfile} does not build:\n{done.stdout[-4000:]}")
    digest = json.loads(metadata.read_text())["containerimage.digest"]
    metadata.unlink()
    return Built(name, digest, seconds, done.stdout)


def lint(
    machine: Machine,
    dockerfile: str,
    *,
    arguments: Mapping[str, str] | None = None,
    context: Path = ROOT,
    directory: Path | None = None,
    target: str = "runtime",
) -> str:
    """What BuildKit's own checks have to say of a Dockerfile and target; empty where all is well.

    Raises BuildFailed where they cannot be made.
    """
    command = _build(machine, dockerfile, arguments or {}, context, directory, target)
    done = subprocess.run(
        [*command, "--opt=requestid=frontend.lint"],
        env=environment(machine.site),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildFailed(f"{dockerfile} cannot be checked:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def _build(
    machine: Machine,
    dockerfile: str,
    arguments: Mapping[str, str],
    context: Path,
    directory: Path | None,
    target: str,
) -> list[str]:
    """buildctl's command, up to what comes of it; buildkitd is there then."""
    _start(machine)
    bundle = certificates()
    given = {"BASE_IMAGE": base_image.NAME, **arguments}
    return [
        str(program("buildctl")),
        f"--addr=unix://{machine.site.buildkit_socket}",
        "build",
        "--progress=plain",
        "--frontend=dockerfile.v0",
        f"--local=context={context}",
        f"--local=dockerfile={directory or context / 'docker'}",
        f"--opt=filename={dockerfile}",
        f"--opt=target={target}",
        "--opt=image-resolve-mode=local",
        *(f"--opt=build-arg:{key}={value}" for key, value in given.items()),
        *([f"--secret=id=ca,src={bundle}"] if bundle else []),
    ]


def _names(machine: Machine) -> list[str]:
    return list(ImageStore(machine.site, machine.enter).digests())


def prune(machine: Machine) -> None:
    """Remove every image but the base, and all that BuildKit keeps. Raises ClusterError."""
    store = ImageStore(machine.site, machine.enter)
    # An image has a second name, its digest, given by the CRI plugin; both hold on to its layers.
    names = [name for name in _names(machine) if name != base_image.NAME]
    store.run("images", "remove", "--sync", *names)
    address = f"--addr=unix://{machine.site.buildkit_socket}"
    run([program("buildctl"), address, "prune", "--all"], "emptying BuildKit's cache")


def copy_context(target: Path) -> Path:
    """`target` with a copy of what the images are built from, to be changed."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in [*allowed, ".dockerignore", "docker"]:
        source, copied = ROOT / name, target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copied)
    return target


def certificates() -> Path | None:
    """The machine's bundle of trusted authorities, which downloads during a build need to trust too."""
    found = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    return Path(found) if found and Path(found).exists() else None


def _start(machine: Machine) -> None:
    """buildkitd, unless it runs, and the base image for it to build on."""
    site = machine.site
    with locked(site.home / "buildkit.lock"):
        if running(site, "buildkitd"):
            return
        archive, digest = base_image.archive()
        ImageStore(site, machine.enter).add_archive(base_image.NAME, archive, digest)
        config = site.state / "buildkit.toml"
        config.write_text(_config(site))
        daemon = program("buildkitd")
        component = start(site, "buildkitd", [daemon, f"--config={config}"], prefix=machine.enter)
        component.wait_ready(lambda: "running server on" in component.tail(200), 300)


def _config(site: Site) -> str:
    return f"""root = "{site.images / "buildkit"}"
[grpc]
  address = ["unix://{site.buildkit_socket}"]
[worker.oci]
  enabled = false
[worker.containerd]
  enabled = true
  address = "{site.containerd_socket}"
  namespace = "{NAMESPACE}"
  snapshotter = "overlayfs"
  networkMode = "host"
  defaultCgroupParent = "/{site.cgroup}/buildkit"
  gc = true
  maxUsedSpace = "{CACHE}"
  minFreeSpace = "{MINIMUM_FREE}"
"""
