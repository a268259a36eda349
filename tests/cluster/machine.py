"""The walls of a node: namespaces of its own for processes, mounts and network, on a cable to the host.

One process, `pause`, is the first of the new namespaces. When it ends, for whatever reason, the kernel
ends every process inside, and with the last of them go all mounts, interfaces, addresses and iptables
rules that Kubernetes made: there is nothing to remember and nothing to undo. What lies outside, and is
undone by name: the cgroup, the host's NAT rule, forwarding and a few of the kernel's settings.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path

import psutil
from tests.cluster.build import program
from tests.cluster.component import MACHINE, on_node, start
from tests.cluster.errors import CannotRunNode, ClusterError, ComponentFailed
from tests.cluster.settings import KUBELET, remember_settings, write_setting
from tests.cluster.site import MOST_NODES, Site
from tests.cluster.system import NODE_PACKAGES, find, install, is_root, run

CAP_SYS_ADMIN = 21


def why_no_node() -> str:
    """Why this machine cannot run pods; empty where it can, as far as one can tell beforehand."""
    if not is_root():
        return "pods need root, and this is user id " + str(os.geteuid())
    if not has_capability(CAP_SYS_ADMIN):
        return "pods need CAP_SYS_ADMIN, which root lacks here (a container without --privileged?)"
    if find("apt-get") is None and any(find(name) is None for name in NODE_PACKAGES):
        return f"pods need {', '.join(sorted(set(NODE_PACKAGES.values())))}, and there is no apt-get"
    return ""


def has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


class Machine:
    """The namespaces of one node. `start()` makes them."""

    def __init__(self, site: Site, pid: int):
        self.site = site
        self.pid = pid

    @classmethod
    def start(cls, site: Site) -> Machine:
        """Namespaces, cable, cgroup. Raises CannotRunNode, MissingTool, ComponentFailed."""
        if reason := why_no_node():
            raise CannotRunNode(reason)
        install(NODE_PACKAGES)
        remember_settings(site)
        site.node_state.mkdir(exist_ok=True)
        command = ["unshare", "--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--net", "--ipc"]
        component = start(site, "machine", [*command, program(MACHINE)])
        component.wait_ready(lambda: "ready" in component.tail(), 300)
        children = psutil.Process(component.process.pid).children()
        if len(children) != 1:
            raise ComponentFailed(f"unshare has {len(children)} children, not one:\n{component.tail()}")
        machine = cls(site, children[0].pid)
        machine._mounts()
        machine._cable()
        machine._cgroup()
        return machine

    @classmethod
    def running(cls, site: Site) -> Machine:
        """A node's machine, of a cluster that is up. Raises ComponentFailed where it is not."""
        for process in on_node(site, MACHINE):
            return cls(site, process.pid)
        raise ComponentFailed(f"cluster {site.name} has no node {site.node_name}; `make cluster` starts it")

    @property
    def enter(self) -> list[str]:
        """The command that runs what follows it inside."""
        return ["nsenter", f"--target={self.pid}", "--pid", "--mount", "--net", "--ipc", "--"]

    def run(self, script: str, what: str) -> str:
        """Output of a shell script inside. Raises ClusterError."""
        return run([*self.enter, "sh", "-ec", script], what)

    def _mounts(self) -> None:
        """A /run of its own, names resolved by servers it can reach, the kubelet's usual directory."""
        resolv = self.site.node_state / "resolv.conf"
        resolv.write_text(_reachable_name_servers())
        target = os.path.realpath("/etc/resolv.conf")
        kubelet = self.site.node_state / "kubelet"
        kubelet.mkdir()
        self.run(
            f"resolv={shlex.quote(str(resolv))} target={shlex.quote(target)}\n"
            f"kubelet={shlex.quote(str(kubelet))}\n"
            "mount --make-rshared /\n"
            "mount -t tmpfs -o mode=755 holdfast /run && mkdir /run/lock\n"
            'mkdir -p "$(dirname "$target")" && touch "$target" && mount --bind "$resolv" "$target"\n'
            f'mount --bind "$kubelet" {KUBELET} && mount --make-rshared {KUBELET}',
            "mounting in the node",
        )

    def _cable(self) -> None:
        """A veth pair; routes to pods and Services from the host; NAT from the node to the world.

        Nodes reach each other through the host, each with addresses and pods of its own.
        """
        site = self.site
        run(
            ["ip", "link", "add", site.link, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid)],
            "laying the cable to the node",
        )
        run(["ip", "address", "add", f"{site.host_address}/30", "dev", site.link], "addressing the host")
        run(["ip", "link", "set", site.link, "up"], "raising the cable")
        self.run(
            "ip link set lo up\n"
            f"ip address add {site.node_address}/30 dev eth0 && ip link set eth0 up\n"
            f"ip route add default via {site.host_address}\n"
            "echo 1 >/proc/sys/net/ipv4/ip_forward",
            "addressing the node",
        )
        first = site.number == 1
        for network in (site.node_pods, site.services) if first else (site.node_pods,):
            run(["ip", "route", "add", str(network), "via", site.node_address], "routing to the pods")
        write_setting("net/ipv4/ip_forward", "1")
        for rule in nat_rules(site) if first else ():
            run(["iptables", "-w", "-I", *rule], "letting the node reach the world")

    def _cgroup(self) -> None:
        """One below every hierarchy's root, for the kubelet to put all pods in."""
        for root in cgroup_roots():
            group = root / self.site.cgroup
            group.mkdir(exist_ok=True)
            # In cgroup v1 a new cpuset is empty, and nothing can run in it.
            for name in ("cpuset.mems", "cpuset.cpus"):
                if (group / name).exists() and not (group / name).read_text().strip():
                    (group / name).write_text((root / name).read_text())


def nat_rules(site: Site) -> list[list[str]]:
    """The host's iptables rules (without the verb), each carrying the cluster's name."""
    comment = ["-m", "comment", "--comment", f"holdfast-cluster-{site.name}"]
    network = str(site.network)
    return [
        ["POSTROUTING", "-t", "nat", "-s", network, "!", "-d", network, *comment, "-j", "MASQUERADE"],
        ["FORWARD", "-s", network, *comment, "-j", "ACCEPT"],
        ["FORWARD", "-d", network, *comment, "-j", "ACCEPT"],
    ]


def cgroup_roots() -> list[Path]:
    """The root of each cgroup hierarchy that is mounted here."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(words[1]) for words in lines if words[2] in ("cgroup", "cgroup2")]


def remove_outside(site: Site) -> None:
    """Undo what lies outside the namespaces; fine where there is nothing to undo."""
    nodes = [site.node(number) for number in range(1, MOST_NODES + 1)]
    for node in nodes:
        _remove_cgroups(node)
    if find("iptables"):
        for rule in nat_rules(site):
            while _quietly(["iptables", "-w", "-D", *rule]):
                pass  # a crash between two starts may have left it twice
    if find("ip"):
        # It goes with its other end, in the node; only a crash between the two leaves it.
        for node in nodes:
            _quietly(["ip", "link", "delete", node.link])


def _quietly(command: list[str]) -> bool:
    try:
        run(list(command), "cleaning up")
    except ClusterError:
        return False
    return True


def _remove_cgroups(site: Site, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    for root in cgroup_roots():
        top = root / site.cgroup
        while top.exists():
            # Children first. What is still dying in there makes it busy for a moment.
            for path, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    _kill_members(Path(path))
            if top.exists() and time.monotonic() > end:
                raise ComponentFailed(f"{top} is still busy after {seconds:g} s; see its cgroup.procs")
            if top.exists():
                time.sleep(0.05)


def _kill_members(group: Path) -> None:
    try:
        members = (group / "cgroup.procs").read_text().split()
    except OSError:
        return
    for pid in members:
        try:
            psutil.Process(int(pid)).kill()
        except psutil.Error:
            pass


def erase(path: Path) -> None:
    """Remove a directory tree, which may be gone already."""
    if path.exists():
        shutil.rmtree(path)


def _reachable_name_servers() -> str:
    """resolv.conf for the node: loopback there is not loopback here, so systemd's stub is looked behind."""
    behind = Path("/run/systemd/resolve/resolv.conf")
    text = Path("/etc/resolv.conf").read_text()
    if "nameserver 127." in text and behind.exists():
        text = behind.read_text()
    # The host's search domains are of no use to pods, and each costs a query.
    lines = [line for line in text.splitlines() if line.startswith("nameserver") and " 127." not in line]
    return "\n".join(lines) + "\n"
