"""The controller as the chart runs it, on this machine: its arguments, its environment, its account.

There are no nodes and no operator, so no pod starts: what counts is what the apiserver allows and answers.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from processes import Processes
from tests.chart.conftest import CHART, Helm
from tests.cluster.errors import ClusterError
from tests.cluster.kubectl import Kubectl
from tests.cluster.platform import is_ready
from tests.cluster.rights import as_account, wait_until_allowed
from tests.cluster.trainingjobs import wait_served
from waiting import wait_until


@dataclass(frozen=True)
class Running:
    """The controller, and how to ask it as an account of `namespace`."""

    kubectl: Kubectl
    namespace: str
    url: str
    log: Path
    process: subprocess.Popen[str]

    def token(self, account: str, *arguments: str, namespace: str = "") -> str:
        where = f"-n={namespace or self.namespace}"
        return self.kubectl.run("create", "token", account, where, *arguments).strip()

    def call(self, account: str, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token(account)}", **options.pop("headers", {})}
        url = f"{self.url}{path}"
        return httpx.request(
            method, url, headers=headers, timeout=300, trust_env=False, verify=False, **options
        )

    def refusals(self) -> list[str]:
        """What the apiserver did not let it do, or what it said of its settings."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "forbidden" in line.lower() or "is no setting" in line]


def install(kubectl: Kubectl, helm: Helm, release: str, system: str, *arguments: str) -> None:
    """The chart, and its definition served. Raises ClusterError with helm's words."""
    at = ("-n", system, "--kubeconfig", str(kubectl.kubeconfig))
    done = helm.attempt("install", release, str(CHART), "--create-namespace", *at, *arguments)
    if done.returncode:
        raise ClusterError(f"helm install {release}: {done.stderr.strip()}")
    wait_served(kubectl, "trainingjobs.holdfast.dev")


def give(kubectl: Kubectl, namespace: str, **roles: str | None) -> None:
    """Service accounts in the namespace, each with a cluster role there, or with none."""
    for account, role in roles.items():
        kubectl.run("create", "serviceaccount", account, f"-n={namespace}")
        if role is not None:
            kubectl.run(
                *("create", "rolebinding", account, f"-n={namespace}"),
                *(f"--clusterrole={role}", f"--serviceaccount={namespace}:{account}"),
            )


def start(
    kubectl: Kubectl,
    helm: Helm,
    processes: Processes,
    directory: Path,
    *,
    release: str,
    system: str,
    namespace: str,
    **jobs: Any,
) -> Running:
    """The command of the Deployment's container; `jobs` are values of the chart. Ready when it returns."""
    documents = helm.documents(*(f"--set-json=jobs.{key}={json.dumps(value)}" for key, value in jobs.items()))
    (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (written,) = [one["data"]["jobs.yaml"] for one in documents if "jobs.yaml" in one.get("data", {})]
    settings = directory / "jobs.yaml"
    settings.write_text(written)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert env["HOLDFAST_POD_SETTINGS"] == "/etc/holdfast/jobs.yaml"
    name = f"{release}-holdfast"
    env |= {
        "HOLDFAST_LISTEN_HOST": "127.0.0.1",
        "HOLDFAST_LISTEN_PORT": str(port),
        "HOLDFAST_POD_SETTINGS": str(settings),
        "HOLDFAST_LEADER_ELECTION": name,  # what the release's Role allows
        "POD_NAME": "controller-0",
        "POD_NAMESPACE": system,
        "KUBECONFIG": str(as_account(kubectl, system, name, directory / "account.kubeconfig")),
    }
    wait_until_allowed(kubectl, system, name, "list")
    log = directory / "controller.log"
    with open(log, "w") as output:
        process = processes.start(
            [sys.executable, "-m", "holdfast_controller", *container["args"]],
            env=env,
            stdout=output,
            stderr=output,
        )
    running = Running(kubectl, namespace, f"http://127.0.0.1:{port}", log, process)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return is_ready(running.url)

    wait_until(ready, "the controller to be ready")
    return running
