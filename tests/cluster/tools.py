"""Which programs the cluster is made of, and which Go module pins each.

A module of its own for every tool keeps their dependencies apart. What is built is kept under a key of
what we decide of its bytes: the module's files (which name the release of Go), flags, platform.
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.site import cache_directory

TOOLCHAIN = Path(__file__).parent / "toolchain"
BUILD_FLAGS = ("-trimpath", "-buildvcs=false")


@dataclass(frozen=True)
class Module:
    """A directory below toolchain/ and the programs that are built from it."""

    name: str
    programs: dict[str, str]
    """Program's name to its Go package."""
    stamp: str = ""
    """`-X` setting that tells the program its version, with VERSION in place of that."""
    main: str = ""
    """The Go module whose version counts as the programs'; empty: their code is ours."""
    keep: tuple[str, ...] = ()
    """Directories of `main` that are kept beside the programs."""
    cgo: bool = False
    """Linked against libc: for what loads libraries at run time. The others are static."""

    @property
    def directory(self) -> Path:
        return TOOLCHAIN / self.name

    @property
    def version(self) -> str:
        """As go.mod pins it, e.g. `v1.36.3`; empty where the code is ours."""
        pin = rf"^(?:require )?\s*{re.escape(self.main)} (v\S+)"
        found = re.search(pin, self._read("go.mod"), re.MULTILINE)
        return found[1] if self.main and found else ""

    @property
    def flags(self) -> tuple[str, ...]:
        stamp = f" -X {self.stamp.replace('VERSION', self.version)}" if self.stamp else ""
        return (*BUILD_FLAGS, f"-ldflags=-s -w{stamp}")

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits; the same for the same sources, flags and platform."""
        digest = hashlib.sha256()
        for path in sorted(self.directory.rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(self.directory)}\0".encode() + path.read_bytes() + b"\0")
        decided = (self.flags, sorted(self.programs), self.keep, platform.machine())
        # Only where it is so: the keys of all that was built before stay.
        digest.update(repr((*decided, "cgo") if self.cgo else decided).encode())
        return digest.hexdigest()[:16]

    @property
    def built(self) -> Path:
        """Where its programs lie once they are built."""
        return cache_directory() / "bin" / self.key

    def _read(self, name: str) -> str:
        return (self.directory / name).read_text()


KUBERNETES = Module(
    "kubernetes",
    {
        name: f"k8s.io/kubernetes/cmd/{name}"
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubectl",
            "kubelet",
            "kube-proxy",
        )
    },
    # Without it kubectl and helm cannot read the server's version.
    stamp="k8s.io/component-base/version.gitVersion=VERSION",
    main="k8s.io/kubernetes",
)
COREDNS = Module("coredns", {"coredns": "."}, main="github.com/coredns/coredns")
TRAINING_OPERATOR = Module(
    "training-operator",
    {"training-operator": "github.com/kubeflow/training-operator/cmd/training-operator.v1"},
    main="github.com/kubeflow/training-operator",
    keep=("manifests",),
)
KUEUE = Module(
    "kueue",
    {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
    stamp="sigs.k8s.io/kueue/pkg/version.GitVersion=VERSION",
    main="sigs.k8s.io/kueue",
    keep=("config",),
)
JOBSET = Module(
    "jobset",
    {"jobset": "sigs.k8s.io/jobset"},
    stamp="sigs.k8s.io/jobset/pkg/version.GitVersion=VERSION",
    main="sigs.k8s.io/jobset",
    keep=("config",),
)
TRAINER = Module(
    "trainer",
    {"trainer-controller-manager": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"},
    main="github.com/kubeflow/trainer/v2",
    keep=("manifests",),
)
BUILDKIT = Module(
    "buildkit",
    {name: f"github.com/moby/buildkit/cmd/{name}" for name in ("buildkitd", "buildctl")},
    stamp="github.com/moby/buildkit/version.Version=VERSION",
    main="github.com/moby/buildkit",
)
BUILDX = Module(
    "buildx",
    {"buildx": "github.com/docker/buildx/cmd/buildx"},
    stamp="github.com/docker/buildx/version.Version=VERSION",
    main="github.com/docker/buildx",
)
SMALL = Module("small", {name: f"./{name}" for name in ("pause", "nslookup", "wget")})
HELM = Module(
    "helm",
    {"helm": "helm.sh/helm/v3/cmd/helm"},
    stamp="helm.sh/helm/v3/internal/version.version=VERSION",
    main="helm.sh/helm/v3",
)
HELM4 = Module(
    "helm4",
    {"helm4": "helm.sh/helm/v4/cmd/helm"},
    stamp="helm.sh/helm/v4/internal/version.version=VERSION",
    main="helm.sh/helm/v4",
)
KUBECONFORM = Module(
    "kubeconform",
    {"kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"},
    main="github.com/yannh/kubeconform",
)
KWOK = Module(
    "kwok",
    {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
    stamp="sigs.k8s.io/kwok/pkg/consts.Version=VERSION",
    main="sigs.k8s.io/kwok",
)
DEVICE_PLUGIN = Module(
    "device-plugin",
    {"nvidia-device-plugin": "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"},
    main="github.com/NVIDIA/k8s-device-plugin",
    cgo=True,
)

MODULES = (
    SMALL,
    KUBERNETES,
    COREDNS,
    TRAINING_OPERATOR,
    BUILDKIT,
    BUILDX,
    HELM,
    HELM4,
    KUBECONFORM,
    KWOK,
    DEVICE_PLUGIN,
    KUEUE,
    JOBSET,
    TRAINER,
)
FOR_TESTS = tuple(module for module in MODULES if module not in (KUEUE, JOBSET, TRAINER))
"""What tests of the cluster may need. Builds of the others take minutes: the fault suite alone asks Kueue and
Trainer, and that and bench-recovery JobSet."""

BUILT_FOR = {
    "helm": (HELM,),
    "each_helm": (HELM, HELM4),
    "kubeconform": (KUBECONFORM,),
    "buildx": (BUILDX,),
    "control_plane": (KUBERNETES,),
    "live": (KUBERNETES, TRAINING_OPERATOR, HELM),
    "cluster": FOR_TESTS,
    "short_lived": FOR_TESTS,
    "jobset_controller": (JOBSET,),
}
"""What tests' fixtures stand on."""
NEED_NODES = ("cluster", "short_lived", "jobset_controller")
"""Those that start nodes here, where that is possible."""


def module_of(program: str) -> Module:
    """The module that `program` is built from. Raises KeyError for a program that none builds."""
    for module in MODULES:
        if program in module.programs:
            return module
    raise KeyError(program)
