"""Holdfast as users install it: `helm install` of the chart with both of our images, then REST and CLI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from tests.cluster.build import program
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.forwarding import forwarded
from tests.cluster.rights import wait_until_allowed
from tests.waiting import wait_until

CHART = Path(__file__).parents[2] / "helm" / "holdfast"
RELEASE = "holdfast"


@dataclass(frozen=True)
class Platform:
    """A release of the chart."""

    cluster: Cluster
    namespace: str
    """The release's; jobs may be in any."""
    url: str
    """Of its REST API, reachable from here."""
    values: tuple[str, ...]
    """What it was installed with, beside the chart's own values."""

    def install(self) -> None:
        """`helm install`, until it answers. Raises ClusterError."""
        self.helm(
            "install", RELEASE, str(CHART), "--create-namespace",
            # Other tests put the definition of TrainingJobs there without helm.
            "--take-ownership", "--wait", "--timeout=600s", *self.values,
        )  # fmt: skip

    def helm(self, *words: str, seconds: float = 660) -> str:
        """Output of helm. Raises ClusterError with its words."""
        return _helm(self.cluster, self.namespace, *words, seconds=seconds)

    def token(self, namespace: str, account: str, role: str) -> str:
        """Of a service account of `namespace` that has the cluster role `role` there; made where missing."""
        where = f"-n={namespace}"
        self.cluster.kubectl.attempt("create", "serviceaccount", account, where)
        self.cluster.kubectl.attempt(
            "create", "rolebinding", account, where, f"--clusterrole={role}",
            f"--serviceaccount={namespace}:{account}",
        )  # fmt: skip
        wait_until_allowed(self.cluster.kubectl, namespace, account, "list")
        return self.cluster.kubectl.run("create", "token", account, where).strip()

    def holdfast(self, token: str, *words: str, seconds: float = 300) -> str:
        """Output of the command line, with this token. Raises ClusterError with its words."""
        return holdfast(self.url, token, *words, seconds=seconds)


def holdfast(url: str, token: str, *words: str, seconds: float = 300) -> str:
    """Output of the command line at this server. Raises ClusterError with its words."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("holdfast")), *words],
        env={**os.environ, "HOLDFAST_SERVER": url, "HOLDFAST_TOKEN": token},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    if done.returncode:
        raise ClusterError(f"holdfast {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextmanager
def installed(
    cluster: Cluster, namespace: str, *, controller_image: str, trainer_image: str
) -> Iterator[Platform]:
    """`helm install`, until it answers; `helm uninstall` at the end, until its last pod is gone.

    No second controller may run on the cluster at the same time: each would take the other's jobs.
    """
    repository, _, tag = controller_image.rpartition(":")
    values = (
        f"--set=image.repository={repository},image.tag={tag}",
        f"--set=jobs.defaultImage={trainer_image}",
    )
    platform = Platform(cluster, namespace, "", values)
    reach = ExitStack()
    try:
        platform.install()
        platform = replace(platform, url=reach.enter_context(_reached(cluster, namespace)))
        wait_until(lambda: is_ready(platform.url), "the installed controller to be ready")
        yield platform
    except BaseException as error:
        logs = cluster.kubectl.attempt("logs", f"-n={namespace}", f"deployment/{RELEASE}", "--tail=40")
        error.add_note(f"the controller said:\n{logs.stdout}")
        raise
    finally:
        reach.close()
        _helm(cluster, namespace, "uninstall", RELEASE, "--wait", "--timeout=300s", "--ignore-not-found")
        cluster.kubectl.attempt("delete", "namespace", namespace, "--wait=false")
        wait_until(
            lambda: cluster.kubectl.get("pods", f"-n={namespace}")["items"] == [],
            "the controllers to end",
        )


@contextmanager
def _reached(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Base URL of the release's API as this machine reaches it."""
    spec = cluster.kubectl.get("service", RELEASE, f"-n={namespace}")["spec"]
    port = spec["ports"][0]["port"]
    if cluster.site is not None:
        yield f"http://{spec['clusterIP']}:{port}"
        return
    with forwarded(cluster.kubectl, namespace, RELEASE, port) as url:
        yield url


def is_ready(url: str) -> bool:
    """Whether the API at `url` answers, and says that it is ready."""
    try:
        return (
            httpx.get(f"{url}/readyz", trust_env=False, verify=False, timeout=5).status_code == httpx.codes.OK
        )
    except httpx.HTTPError:
        return False


def _helm(cluster: Cluster, namespace: str, *words: str, seconds: float = 660) -> str:
    where = [f"--kubeconfig={cluster.kubectl.kubeconfig}", f"--namespace={namespace}"]
    done = subprocess.run(
        [str(program("helm")), *words, *where],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    if done.returncode:
        raise ClusterError(f"helm {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
