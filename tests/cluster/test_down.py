"""`make cluster-down` leaves nothing behind, whatever happened before it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import gettempdir

import pytest
from processes import Processes
from tests.cluster.build import build
from tests.cluster.cluster import Cluster, down, up
from tests.cluster.component import names_of, running
from tests.cluster.machine import Machine, cgroup_roots, why_no_node
from tests.cluster.settings import KUBELET, KUBELET_MARK, NAMES
from tests.cluster.site import Site, cache_directory, sites
from tests.cluster.system import NODE_PACKAGES, find, install
from tests.cluster.tools import COREDNS, KUBERNETES, SMALL
from waiting import Deadline

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(why_no_node()), reason=why_no_node()),
]


LIMITS_MEMORY = re.compile(r"holdfast-[0-9a-f]{12}-\d+")
"""A local engine's group, see memory.py; no cluster's name makes one like it."""


@dataclass(frozen=True)
class Host:
    """What a cluster could leave on this machine. Everything is told by what carries the cluster's name."""

    processes: frozenset[str]
    mounts: frozenset[str]
    links: frozenset[str]
    routes: frozenset[str]
    rules: frozenset[str]
    cgroups: frozenset[str]
    settings: frozenset[str]
    directories: frozenset[str]


def look(site: Site) -> Host:
    """The machine now: all of its mounts, links, routes and rules, and the processes of one cluster.

    All but what a test beside this one makes and removes: see `beside`, LIMITS_MEMORY.
    """

    def lines(*command: str) -> frozenset[str]:
        words = [find(command[0]) or command[0], *command[1:]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # Counters and times change by themselves.
        return frozenset(line for line in done.stdout.splitlines() if not line.startswith(("#", ":")))

    return Host(
        processes=frozenset(f"{pid} {name}" for pid, name in names_of(site)),
        mounts=frozenset(
            line
            for line in Path("/proc/self/mounts").read_text().splitlines()
            if not beside(Path(line.split()[1]))
        ),
        links=frozenset(os.listdir("/sys/class/net")),
        routes=lines("ip", "route"),
        # The frame of a table is there from the first time that anybody looks into it.
        rules=frozenset(line for line in lines("iptables-save") if line.startswith("-A")),
        cgroups=frozenset(
            str(path)
            for root in cgroup_roots()
            for path in root.glob("*/")
            if not LIMITS_MEMORY.fullmatch(path.name)
        ),
        settings=frozenset(f"{name}={(Path('/proc/sys') / name).read_text()}" for name in NAMES),
        directories=frozenset(
            str(path) for path in (KUBELET, Path("/run/containerd"), site.state) if path.exists()
        ),
    )


def beside(mounted: Path) -> bool:
    """Whether a test has it mounted in its temporary directory; a cluster keeps its things elsewhere."""
    return mounted.is_relative_to(gettempdir()) and not mounted.is_relative_to(cache_directory())


def left(site: Site, before: Host, after: Host) -> list[str]:
    """What is there after and was not before, other clusters' things apart: those come and go meanwhile."""
    added = [
        f"{field.name}: {item}"
        for field in fields(Host)
        for item in getattr(after, field.name) - getattr(before, field.name)
    ]
    others = [other for other in sites() if other.name != site.name]
    named = [
        name for other in others for name in (other.link, other.cgroup, f"holdfast-cluster-{other.name}")
    ]
    shared = ("settings: ", f"directories: {KUBELET}") if others else ()
    return [item for item in added if not item.startswith(shared) and not any(name in item for name in named)]


@pytest.fixture
def before(short_lived: Site) -> Host:
    """The machine before the test's cluster, with all programs there: building is not what is tested."""
    install(NODE_PACKAGES)
    for module in (SMALL, KUBERNETES, COREDNS):
        build(module)
    return look(short_lived)


@pytest.mark.parametrize(
    "reached", ["containerd.toml", "kube-apiserver.log", "kubelet.json", "kube-proxy.json"]
)
def test_nothing_is_left_where_up_was_killed(
    short_lived: Site, before: Host, processes: Processes, deadline: Deadline, reached: str
) -> None:
    starting = processes.start(
        [sys.executable, "-m", "tests.cluster", "up", "--name", short_lived.name],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    deadline.wait_until(lambda: list(short_lived.state.rglob(reached)), f"{reached} of a starting cluster")
    os.kill(starting.pid, signal.SIGKILL)
    starting.wait()
    assert running(short_lived), "the killed command leaves what it had started"

    down(short_lived)
    assert left(short_lived, before, look(short_lived)) == []


def test_another_cluster_is_not_disturbed(cluster: Cluster, namespace: str, short_lived: Site) -> None:
    """Both have nodes on this machine, and share its kernel and its directories' names.

    Not by one whose machine dies either; `up` begins that anew.
    """
    before = look(short_lived)
    up(short_lived, operator=False, say=lambda _: None)
    os.kill(Machine.running(short_lived).pid, signal.SIGKILL)
    again = up(short_lived, operator=False, say=lambda _: None)
    assert again.kubectl.get("nodes")["items"][0]["metadata"]["name"] == short_lived.name
    down(short_lived)
    assert left(short_lived, before, look(short_lived)) == []

    # A pod with a volume: the node's own directory is still mounted where its kubelet writes.
    there = cluster.kubectl
    there.run(
        "run", "after", f"-n={namespace}", f"--image={cluster.busybox}", "--restart=Never", "--", "true"
    )
    phase = "--for=jsonpath={.status.phase}=Succeeded"
    there.run("wait", f"-n={namespace}", "pod/after", phase, "--timeout=300s")
    assert os.listdir(KUBELET) in ([], [KUBELET_MARK.name])
    assert there.run("get", "--raw=/readyz") == "ok"
