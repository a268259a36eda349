"""Two machines that share a directory over NFS: kernels of User Mode Linux, and NFS-Ganesha between them.

Each has Linux' own NFS client, which is what matters here: it remembers, and appends, by itself. Both have
the host's files but for that directory, one core, and a network that ends with the test: it is a namespace.
"""

from __future__ import annotations

import shlex
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from processes import Processes
from tests.cluster.system import install
from waiting import wait_until

PACKAGES = {
    "linux.uml": "user-mode-linux",
    "ganesha.nfsd": "nfs-ganesha",
    "/usr/share/doc/nfs-ganesha-vfs": "nfs-ganesha-vfs",
    "mount.nfs4": "nfs-common",
    "modprobe": "kmod",
    "ip": "iproute2",
    "ss": "iproute2",
}
SERVER, MEMORY = "10.0.0.1", "3G"
ADDRESSES = ("10.0.0.2", "10.0.0.3")
MODULES = Path("/usr/lib/uml/modules")

GANESHA = """
NFS_CORE_PARAM {{ Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Bind_addr = {server}; }}
NFSv4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = {state}; }}
EXPORT {{
    Export_Id = 1; Path = {path}; Pseudo = /shared; Protocols = 4; Transports = TCP; SecType = sys;
    Access_Type = RW; Squash = No_root_squash; Attr_Expiration_Time = 0;
    FSAL {{ Name = VFS; }}
}}
LOG {{ Default_Log_Level = WARN; }}
"""
INIT = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
name={name} shared={shared} log={log}
hostname $name
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs run /run
ip link set lo up; ip address add {address}/24 dev eth0; ip link set eth0 up
mkdir -p /run/kernel/lib; ln -s {modules} /run/kernel/lib/modules
modprobe --dirname /run/kernel nfsv4
if mount -t nfs4 -o vers=4.1,proto=tcp {server}:/shared $shared; then
    cd $shared
    env - {environment} {command} > $log 2>&1 &
    rank=$!
    ( until ls | grep -q "^signal-$name$"; do sleep 0.1; done; kill -$(cat signal-$name) $rank ) &
    wait $rank
    echo $? > $log.status
fi
echo o > /proc/sysrq-trigger
sleep 60
"""


@dataclass
class Machine:
    """One that runs a command, and is switched off when that ends."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    """On the host's disk, beside `.status`."""
    shared: Path

    def signal(self, number: int) -> None:
        """Send it to the command."""
        new = self.shared / f".{self.name}"
        new.write_text(str(number))
        new.rename(self.shared / f"signal-{self.name}")

    def wait(self, seconds: float = 300) -> int:
        """The command's exit status, as a shell has it. Raises AssertionError where it was not even run."""
        self.process.wait(seconds)
        (self.shared / f"signal-{self.name}").unlink(missing_ok=True)
        status = self.log.with_suffix(f"{self.log.suffix}.status")
        assert status.exists(), f"{self.name} has not mounted {self.shared}"
        return int(status.read_text())


@dataclass
class Machines:
    """The two, one command each at a time."""

    processes: Processes
    namespace: str
    directory: Path
    shared: Path
    """What they share, by this name on both; the host sees it too, as the server's own."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, number: int, command: Sequence[str | Path], environment: Mapping[str, str]) -> Machine:
        """On machine 0 or 1, in the shared directory, once it has booted."""
        name, mark = f"node-{number}", uuid.uuid4().hex[:8]
        init, log = self.directory / f"{name}-{mark}.sh", self.directory / f"{name}-{mark}.log"
        words = {
            "name": name,
            "address": ADDRESSES[number],
            "modules": MODULES,
            "server": SERVER,
            "shared": self.shared,
            "environment": shlex.join(f"{key}={value}" for key, value in environment.items()),
            "command": shlex.join(map(str, command)),
            "log": log,
        }
        init.write_text(INIT.format(**words))
        init.chmod(0o755)
        kernel = ["linux.uml", f"mem={MEMORY}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw"]
        kernel += [f"init={init}", f"eth0=tuntap,tap{number}", "con=null", "con0=null,fd:1", "quiet"]
        with (self.directory / f"{name}-{mark}.console").open("w") as console:
            process = self.processes.start(
                ["ip", "netns", "exec", self.namespace, *kernel],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return Machine(name, process, log, self.shared)


@contextmanager
def two_machines(processes: Processes, directory: Path) -> Iterator[Machines]:
    """`directory` is on the host, and absolute."""
    install(PACKAGES)
    namespace = f"nfs-{uuid.uuid4().hex[:8]}"
    shared, state = directory / "shared", directory / "ganesha"
    shared.mkdir()
    state.mkdir()
    shared.chmod(0o777)
    configuration = directory / "ganesha.conf"
    configuration.write_text(GANESHA.format(server=SERVER, path=shared, state=state))
    within = ["ip", "netns", "exec", namespace]
    machines = Machines(processes, namespace, directory, shared)
    _do("ip", "netns", "add", namespace)
    try:
        _do(*within, "ip", "link", "set", "lo", "up")
        _do(*within, "ip", "link", "add", "bridge", "type", "bridge")
        _do(*within, "ip", "address", "add", f"{SERVER}/24", "dev", "bridge")
        _do(*within, "ip", "link", "set", "bridge", "up")
        for tap in ("tap0", "tap1"):
            _do(*within, "ip", "tuntap", "add", "dev", tap, "mode", "tap")
            _do(*within, "ip", "link", "set", tap, "master", "bridge", "up")
        log = directory / "ganesha.log"
        server = [
            *within,
            "ganesha.nfsd",
            "-F",
            "-f",
            configuration,
            "-L",
            log,
            "-p",
            directory / "ganesha.pid",
        ]
        ganesha = processes.start(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        machines.started.append(ganesha)

        def listens() -> bool:
            assert ganesha.poll() is None, log.read_text()
            told = subprocess.run([*within, "ss", "-ltnH"], capture_output=True, text=True, check=True)
            return ":2049" in told.stdout

        wait_until(listens, "the NFS server")
        yield machines
    finally:
        processes.end_all()
        for process in machines.started:
            process.wait()
        _do("ip", "netns", "delete", namespace)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
