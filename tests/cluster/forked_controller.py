"""Controllers that start in a moment: forked from a process that has everything imported already.

Each is a process of its own, with the composition root that `holdfast controller` starts, and can be
killed as any other.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from holdfast_controller import on_cluster
from holdfast_controller.kube.connection import Connection
from holdfast_controller.logs import configure_logging
from holdfast_controller.settings import load_cluster_settings

_FORKS = multiprocessing.get_context("forkserver")
LEADS = '"leads"'
"""What its log says when it has begun to act."""
DIES = "dies of "
"""What the log of one that `dies_writing` says last, before the method and the path of its write."""


def start(
    kubeconfig: Path, pod_settings: Path, identity: str, lease: str, log: Path, *, dies_writing: bool = False
) -> ForkServerProcess:
    """Start one; its Lease lies in `default`. One that `dies_writing` is killed as soon as the apiserver has
    taken its first write, before it hears of it."""
    _FORKS.set_forkserver_preload([__name__])
    arguments = (str(kubeconfig), str(pod_settings), identity, lease, str(log), dies_writing)
    process = _FORKS.Process(target=_control, args=arguments, name=identity)
    process.start()
    return process


def _control(
    kubeconfig: str, pod_settings: str, identity: str, lease: str, log: str, dies_writing: bool
) -> None:
    if dies_writing:
        _die_writing()
    with Path(log).open("a", buffering=1) as output:
        sys.stdout = sys.stderr = output
        settings = load_cluster_settings(
            kubeconfig=kubeconfig,
            listen_host="127.0.0.1",
            listen_port=0,
            pod_settings=Path(pod_settings),
            leader_election=lease,
            pod_namespace="default",
            pod_name=identity,
            log_format="json",
        )
        configure_logging(settings.log_level, settings.log_format)
        asyncio.run(on_cluster.run(settings))


def _die_writing() -> None:
    """The first write that the apiserver takes, but for those of the Lease, is the end of this process."""
    send = Connection._send

    async def last(self: Connection, api: Any, method: str, path: str, *rest: Any) -> Any:
        answer = await send(self, api, method, path, *rest)
        if method != "GET" and "/leases" not in path and answer.status < 300:
            print(f"{DIES}{method} {path}")
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    Connection._send = last  # type: ignore[assignment,method-assign]
