"""A port of this machine that leads to a Service of a cluster whose network does not reach here."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.kubectl import Kubectl

from holdfast_controller.local.ports import free_port


@contextmanager
def forwarded(kubectl: Kubectl, namespace: str, service: str, port: int) -> Iterator[str]:
    """Base URL that leads to the Service.

    `kubectl port-forward` holds on to one pod and ends with it; another is begun then, on the same port.
    """
    local = free_port()
    command = [
        str(kubectl.binary), f"--kubeconfig={kubectl.kubeconfig}", f"-n={namespace}", "port-forward",
        f"service/{service}", f"{local}:{port}",
    ]  # fmt: skip
    over = threading.Event()
    current: list[subprocess.Popen[bytes]] = []

    def keep() -> None:
        while not over.is_set():
            current[:] = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
            if over.is_set():
                current[0].kill()
            current[0].wait()
            over.wait(0.5)

    keeper = threading.Thread(target=keep, name=f"forward-{service}")
    keeper.start()
    try:
        yield f"http://127.0.0.1:{local}"
    finally:
        over.set()
        for process in current:
            process.kill()
        keeper.join()
