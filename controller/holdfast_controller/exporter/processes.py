"""Where a process belongs, as /proc tells: its pod and container by cgroup, its job by environment.

pids are those of the driver's host. In a container that needs the host's pid namespace (`hostPID`).
The environment of another user's process needs CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH; without them a
pod's processes are still told apart by container, only the rank is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_trainer.contract import ENV_ATTEMPT, ENV_JOB, ENV_REPLICA

PROC = Path("/proc")
ENV_RANK = "RANK"
_NAMES = (ENV_JOB, ENV_ATTEMPT, ENV_REPLICA, ENV_RANK)

# cgroupfs: .../kubepods/burstable/pod<uid>/<id>
# systemd:  .../kubepods-burstable-pod<uid with _>.slice/cri-containerd-<id>.scope
# A static pod's uid is 32 digits without dashes.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?:/|$)")
_CONTAINER = re.compile(r"(?:^|[/-])([0-9a-f]{64})(?:\.scope)?(?:/|$)")


@dataclass(frozen=True)
class Origin:
    """Where one process belongs. All is empty for a process of the machine itself."""

    pod_uid: str = ""
    container_id: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What of a job's names it carries; a process may write there what it likes."""


def pod_of_cgroup(text: str) -> tuple[str, str]:
    """(pod's uid, container's id) from /proc/PID/cgroup, of either version of cgroups; "" where none."""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        pod = _POD.search(path)
        if pod is None:
            continue
        container = _CONTAINER.search(path, pod.end() - 1)
        return pod[1].replace("_", "-"), container[1] if container else ""
    return "", ""


def job_names(environ: bytes) -> dict[str, str]:
    """The names of a job among the variables of /proc/PID/environ."""
    found = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if (text := name.decode(errors="replace")) in _NAMES:
            found[text] = value.decode(errors="replace")
    return found


def origins(pids: Iterable[int], proc: Path = PROC) -> dict[int, Origin]:
    """Of each process that is still there."""
    found = {}
    for pid in pids:
        directory = proc / str(pid)
        try:
            uid, container = pod_of_cgroup((directory / "cgroup").read_text(errors="replace"))
        except OSError:
            continue  # it ended meanwhile
        try:
            environment = job_names((directory / "environ").read_bytes())
        except OSError:
            environment = {}  # another user's
        found[pid] = Origin(uid, container, environment)
    return found
