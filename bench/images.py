"""What it costs to build the images of docker/, beside the same content in one layer.

BuildKit of the tests builds into a containerd of its own, in a network namespace of its own: what comes in
over its cable is what a build downloads, to the byte. Every subject begins with empty caches, in this order:

  cold             nothing but the base image is there
  nothing changed  the same again
  source edit      a comment in one file of the package
  new dependency   one more small package in pyproject.toml and uv.lock; another version of it each time

Subjects follow one another instead of taking turns, because two images with CUDA and their caches do not
fit on a small disk; ours go first, so what a proxy on the way keeps serves the other. The one-layer images
(bench/one_layer) install what uv.lock pins, without pip's cache in the image. When something changes they
build everything again: that is measured fewer times. A build ends when the image's layers are stored, not
compressed and not unpacked. The base image is the tests' own Debian; importing it is no part of a build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from scripts import lock
from tests.cluster import base_image
from tests.cluster.buildkit import Built, build_image, copy_context, prune
from tests.cluster.cluster import down
from tests.cluster.errors import ClusterError
from tests.cluster.images import ImageStore
from tests.cluster.locks import locked
from tests.cluster.machine import Machine, why_no_node
from tests.cluster.node import start_containerd
from tests.cluster.site import Site, cache_directory, site
from tests.cluster.tools import BUILDKIT

from .report import ROOT, Report, ReportError, refuse_unwritable, run

SITE = "bench-images"
MIB = 1 << 20
FREE_GIB = 22
"""The trainer's layers, the same as an image, uv's cache of them: 17 GB. And room for others."""

EDITED = {
    "trainer": "trainer/holdfast_trainer/train.py",
    "controller": "controller/holdfast_controller/api/app.py",
}
ADDED = {
    "trainer": ("einops==0.8.0", "einops==0.8.1", "einops==0.7.0"),
    "controller": ("humanize==4.11.0", "humanize==4.12.0", "humanize==4.10.0"),
}
TORCH = re.compile(r"Downloading torch \(([\d.]+)(M|G)iB\)")
"""As uv says it, once a download."""


@dataclass
class Subject:
    """One way of building an image, measured in one place."""

    kind: str
    one_layer: bool
    report: Report
    machine: Machine
    checkout: Path
    """A copy of the sources that this subject may change."""
    torch_downloads: dict[str, list[float]] = field(default_factory=dict)
    """Stage to the sizes of the PyTorch wheels that uv told of downloading in all its builds, MiB."""

    @property
    def name(self) -> str:
        return f"{self.kind}, one layer" if self.one_layer else self.kind

    @property
    def image(self) -> str:
        return f"docker.io/holdfast/{self.kind}:bench"

    def build(self, stage: str, *, compiler: bool = False) -> Built:
        """Build once; a sample of its seconds and of the bytes that came in meanwhile."""
        before = received(self.machine.site)
        built = build_image(
            self.machine,
            f"{self.kind}.Dockerfile",
            self.image,
            arguments={"COMPILER": "1"} if compiler else {},
            context=self.checkout,
            directory=ROOT / "bench" / "one_layer" if self.one_layer else None,
            unpack=False,
        )
        subject = f"{self.name}, COMPILER=1" if compiler else self.name
        self.report.add(subject, stage, "s", built.seconds)
        self.report.add(subject, f"{stage}, downloaded", "MiB", (received(self.machine.site) - before) / MIB)
        told = [float(size) * (1024 if unit == "G" else 1) for size, unit in TORCH.findall(built.log)]
        self.torch_downloads.setdefault(stage, []).extend(told)
        return built

    def weigh(self, built: Built, subject: str = "") -> None:
        """A sample of the image's size, unpacked."""
        size = ImageStore(self.machine.site, self.machine.enter).size(built.digest)
        self.report.add(subject or self.name, "image", "MiB", size / MIB)

    def edit(self, number: int) -> None:
        """Change the source, each time otherwise."""
        path = self.checkout / EDITED[self.kind]
        path.write_text(f"{path.read_text(encoding='utf-8')}\n# Edit {number}.\n", encoding="utf-8")

    def depend(self, requirement: str) -> None:
        """Add one dependency, in place of the one that was added before. Raises ReportError."""
        project = self.checkout / "pyproject.toml"
        project.write_text(with_dependency(self.kind, requirement), encoding="utf-8")
        if lock.update(self.checkout, ["--quiet"]):
            raise ReportError(
                f"{requirement} cannot be locked beside what uv.lock pins: see uv's words above"
            )
        if self.one_layer:
            self.write_requirements()

    def write_requirements(self) -> None:
        """requirements.txt of a one-layer image: the very versions that ours installs. Raises ReportError."""
        command = [sys.executable, "-m", "uv", "export", "--frozen", "--quiet", "--no-emit-project"]
        command += ["--no-header", "--no-annotate", "--no-hashes", "--extra", self.kind]
        command += ["--output-file", "requirements.txt"]
        if subprocess.run(command, cwd=self.checkout, check=False, stdout=subprocess.DEVNULL).returncode:
            raise ReportError(
                f"{self.name}: requirements.txt cannot be made of uv.lock: see uv's words above"
            )

    def make_room(self) -> None:
        """Give back the disk that a one-layer build has taken: it reuses nothing of it."""
        if self.one_layer:
            prune(self.machine)


def with_dependency(kind: str, requirement: str) -> str:
    """pyproject.toml with `requirement` in the extra called `kind`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changed = text.replace(f"\n{kind} = [\n", f'\n{kind} = [\n    "{requirement}",\n', 1)
    if changed == text:
        raise ReportError(f"pyproject.toml has no extra {kind!r} to which {requirement} could be added")
    return changed


def received(site: Site) -> int:
    """Bytes that have come to the node of `site` over its cable: the host's end has sent them."""
    return int(Path(f"/sys/class/net/{site.link}/statistics/tx_bytes").read_text())


@contextmanager
def cold_machine() -> Iterator[Machine]:
    """Namespaces, containerd and BuildKit with nothing in any cache; all of it goes afterwards."""
    where = site(SITE)
    down(where, purge=True)  # what a killed run has left
    try:
        with locked(where.home / "lock"):
            machine = Machine.start(where)
            start_containerd(machine)
        yield machine
    finally:
        down(where, purge=True)


def measure(report: Report, console: Console, kind: str, one_layer: bool, rounds: int) -> Subject:
    """All stages of one subject. `rounds` of what is cheap; what builds everything again, once."""
    with cold_machine() as machine, tempfile.TemporaryDirectory(prefix="holdfast-images-") as scratch:
        subject = Subject(kind, one_layer, report, machine, copy_context(Path(scratch)))
        if one_layer:
            (subject.checkout / ".dockerignore").unlink()
            subject.write_requirements()

        def said(what: str) -> None:
            console.print(f"{subject.name}: {what}", highlight=False)

        said("cold")
        subject.weigh(subject.build("cold"))
        for _ in range(rounds):
            subject.build("nothing changed")
        said("source edits")
        for number in range(1 if one_layer else rounds):
            subject.make_room()
            subject.edit(number)
            subject.build("source edit")
        for requirement in ADDED[kind][: 1 if one_layer else None]:
            said(f"new dependency {requirement}")
            subject.make_room()
            subject.depend(requirement)
            subject.build("new dependency")
        if kind == "trainer" and not one_layer:
            said("COMPILER=1")
            subject.weigh(subject.build("compiler added", compiler=True), f"{subject.name}, COMPILER=1")
    return subject


def torch_again(report: Report, subject: Subject) -> int:
    """How often builds with a new dependency downloaded PyTorch; the log and the cable must agree.

    Raises ReportError where they do not, or where the log would not have told.
    """
    cold = subject.torch_downloads["cold"]
    if len(cold) != 1:
        raise ReportError(
            f"{subject.name}: the log of the cold build tells of {len(cold)} downloads of PyTorch, not one: "
            "uv's words have changed, see TORCH in bench/images.py"
        )
    rows = {(row.subject, row.metric): row for row in report.rows()}
    most = rows[subject.name, "new dependency, downloaded"].max
    told = len(subject.torch_downloads["new dependency"])
    if (most >= cold[0]) != (told > 0):
        raise ReportError(
            f"{subject.name}: the log tells of {told} downloads of PyTorch ({cold[0]:.0f} MiB) after a new "
            f"dependency, and {most:.0f} MiB came in"
        )
    return told


def conclude(report: Report, ours: Subject, naive: Subject) -> None:
    """The ratios of one kind of image."""
    prefix = "" if ours.kind == "trainer" else f"{ours.kind}_"
    for stage, name in (("cold", "cold"), ("source edit", "source_edit"), ("new dependency", "dependency")):
        report.ratio(f"{prefix}{name}_speedup_vs_naive", stage, naive.name, ours.name)
    report.ratios[f"{prefix}source_edit_seconds"] = report.median(ours.name, "source edit")
    report.ratios[f"{ours.kind}_image_mib"] = report.median(ours.name, "image")
    if ours.kind == "trainer":
        report.ratios["dependency_change_redownloads_torch"] = torch_again(report, ours)
        with_compiler = report.median(f"{ours.name}, COMPILER=1", "image")
        report.ratios["compiler_mib"] = with_compiler - report.median(ours.name, "image")


def refuse_small_disk() -> None:
    """Raises ReportError before anything is built."""
    place = cache_directory()
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free / (1 << 30)
    if free < FREE_GIB:
        raise ReportError(
            f"{place} has {free:.0f} GiB free and {FREE_GIB} are needed: make room, or let HOLDFAST_CACHE "
            "name a directory on a larger disk"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="builds of each cheap stage (default 7)")
    parser.add_argument("--only", choices=sorted(EDITED), help="one of the images")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least 1 is needed")
    refuse_unwritable(parser)

    console = Console()
    report = Report("images")
    report.facts["base_image"] = base_image.NAME
    report.facts["buildkit"] = BUILDKIT.version
    if reason := why_no_node():
        raise ReportError(f"images are built in namespaces of their own: {reason}")
    refuse_small_disk()
    with locked(cache_directory() / f"{SITE}.lock"):
        for kind in [given.only] if given.only else sorted(EDITED):
            ours = measure(report, console, kind, False, given.rounds)
            naive = measure(report, console, kind, True, given.rounds)
            conclude(report, ours, naive)
    report.finish(console)
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(run("images", main, ClusterError))
