"""A control plane of its own, with fake nodes, the operator's part, and a controller to be measured.

kwok plays the nodes: what is bound to one runs at once, and stays. Nothing places, collects or evicts
anything here, so Kubernetes' own controllers and scheduler, which a real cluster has on other machines,
end as soon as they have set up the namespaces: the cores are left to what is measured. All processes carry
the site's mark and end with the block, whatever happens in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from bench.controlling.api import account
from bench.controlling.jobs import NAMESPACES, POD_SETTINGS, namespace_of, raw_crd
from bench.report import ROOT, ReportError
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster import training_operator, trainingjobs
from tests.cluster.build import program
from tests.cluster.cluster import down, up
from tests.cluster.component import Component, end_all, environment, start
from tests.cluster.control_plane import start_control_plane
from tests.cluster.kubectl import Kubectl
from tests.cluster.machine import erase
from tests.cluster.rights import as_account
from tests.cluster.site import Site, site_apart

CRD = ROOT / "helm" / "holdfast" / "templates" / "crd.yaml"
ACCOUNT = "bench"
READY_SECONDS = 120
IDLE = ("leases", "reviews")
FAKE = "kwok.x-k8s.io/node"
UNWATCHED = 40_000
"""Seconds of a node's lease where nobody watches over nodes: it is renewed for nobody."""

STAGES = Path(__file__).parent / "stages.yaml"
"""A pod runs as soon as its node sees it. Nobody listens at its address, so asking it for progress fails
at once: how far a fake job is would be made up. Trainers that answer (trainers.py) are named by ADDRESS."""


@dataclass(frozen=True)
class Figures:
    """What a controller has spent and done since it started; reading them is no part of it."""

    cpu_seconds: float
    reading_seconds: float
    """CPU that it takes to tell its metrics: of a span it is taken off (`cpu_between`)."""
    memory_mib: float
    requests: float
    writes: float
    passes: float
    waiting: float


def cpu_between(before: Figures, after: Figures) -> float:
    """Seconds that the controller took between two readings, without what reading took."""
    return after.cpu_seconds - before.cpu_seconds - before.reading_seconds


@dataclass(frozen=True)
class Controller:
    """A running one."""

    url: str
    token: str
    process: psutil.Process
    log: Path

    def check(self) -> None:
        """Raises ReportError where it has ended."""
        self._cpu_seconds()

    def _cpu_seconds(self) -> float:
        try:
            if self.process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(self.process.pid)
            times = self.process.cpu_times()
        except psutil.Error:
            raise ReportError(f"the controller has ended; {self.log}:\n{_end_of(self.log)}") from None
        return times.user + times.system

    def figures(self) -> Figures:
        """Raises ReportError where it has ended."""
        cpu = self._cpu_seconds()
        text = self.metrics()
        reading, memory = self._cpu_seconds() - cpu, self.process.memory_info()
        requests = writes = passes = waiting = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "holdfast_apiserver_requests_total":
                    requests += sample.value
                    # The lease is renewed and callers are reviewed whatever the jobs do.
                    if sample.labels["method"] != "GET" and not sample.labels["resource"].endswith(IDLE):
                        writes += sample.value
                elif sample.name == "holdfast_reconcile_seconds_count":
                    passes = sample.value
                elif sample.name == "holdfast_queue_depth":
                    waiting = sample.value
        return Figures(cpu, reading, memory.rss / 2**20, requests, writes, passes, waiting)

    def metrics(self) -> str:
        """In the text format. Raises ReportError."""
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            answer = httpx.get(f"{self.url}/metrics", headers=headers, trust_env=False, timeout=30)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ReportError(f"the controller's metrics: {error}; {_end_of(self.log)}") from None
        return answer.text


@dataclass(frozen=True)
class OperatorPart:
    """The running process of operator.py."""

    process: subprocess.Popen[str]
    log: Path

    def pace(self, per_second: float) -> None:
        """PyTorchJobs that it may take a second; 0 for no limit."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{per_second}\n")
        self.process.stdin.flush()

    def check(self) -> None:
        """Raises ReportError where it has ended."""
        if self.process.poll() is not None:
            raise ReportError(f"the operator's part has ended; {self.log}:\n{_end_of(self.log)}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class World:
    """What a benchmark finds there."""

    site: Site
    kubectl: Kubectl
    nodes: int
    kubeconfig: Path
    """Of the account, by its token, as a pod of a cluster has: a certificate is checked at each request."""

    def operator(self, trainers: int = 0) -> OperatorPart:
        """Start what plays the operator's part; close it in the end. The first jobs have `trainers`."""
        words = [sys.executable, "-m", "bench.controlling.operator", str(self.kubeconfig)]
        log = self.site.logs / "operator-part.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*words, str(self.nodes), str(trainers)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                cwd=ROOT,
                env=environment(self.site),
            )
        return OperatorPart(process, log)

    def controller(self, *, prefix: tuple[str, ...] = ()) -> Controller:
        """Start one, and wait until it leads and is ready."""
        settings = self.site.state / "jobs.yaml"
        settings.write_text(yaml.safe_dump(POD_SETTINGS), encoding="utf-8")
        command = [
            *prefix,
            sys.executable, "-m", "holdfast_controller", "controller", "--engine", "kubernetes",
            f"--kubeconfig={self.kubeconfig}", "--host=127.0.0.1", "--port=0", "--log-level=warning",
            f"--pod-settings={settings}", "--lease=bench", "--namespace=default", "--identity=bench",
            "--log-format=json",
        ]  # fmt: skip
        started = start(self.site, "controller", command)
        process = psutil.Process(started.process.pid)
        token = account(self.kubeconfig).token
        found: list[Controller] = []

        def ready() -> bool:
            ports = [one.laddr.port for one in process.net_connections("tcp") if one.status == "LISTEN"]
            if not ports:
                return False
            found[:] = [Controller(f"http://127.0.0.1:{ports[0]}", token, process, started.log)]
            return "holdfast_leader 1.0" in found[0].metrics()

        started.wait_ready(ready, READY_SECONDS)
        return found[0]


@contextmanager
def world(nodes: int) -> Iterator[World]:
    """Up with so many fake nodes. Raises the cluster's own errors (MissingTool, ComponentFailed)."""
    where = site_apart("bench")
    try:
        plane = start_control_plane(where)
        install(plane.kubectl)
        for component in plane.components:
            if component.name in ("kube-controller-manager", "kube-scheduler"):
                component.process.terminate()
        start_nodes(where, plane.kubectl, nodes)
        yield World(where, plane.kubectl, nodes, _account(where, plane.kubectl))
    finally:
        end_all(where)
        erase(where.home)


@contextmanager
def real_world(nodes: int) -> Iterator[World]:
    """A whole cluster with the real Training Operator and scheduler; jobs' pods still go to fake nodes.

    Needs root. Raises the cluster's own errors.
    """
    where = site_apart("bench")
    try:
        kubectl = up(where).kubectl
        install(kubectl, operator=False)
        for number in range(NAMESPACES):
            kubectl.apply(*storage(namespace_of(number)))
        kubectl.run("cordon", "--selector=!type")  # its own node keeps what runs there, and takes no more
        start_nodes(where, kubectl, nodes, lease_seconds=40)
        yield World(where, kubectl, nodes, _account(where, kubectl))
    finally:
        down(where, purge=True)


def storage(namespace: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(volume, claim) for a namespace: the scheduler places no pod without. Nothing is written there."""
    claim = POD_SETTINGS["defaultClaim"]
    size, mode, volume = {"storage": "1Gi"}, ["ReadWriteMany"], f"{claim}-{namespace}"
    persistent = {
        "capacity": size,
        "accessModes": mode,
        "storageClassName": "",
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"namespace": namespace, "name": claim},
    }
    wanted = {
        "accessModes": mode,
        "storageClassName": "",
        "volumeName": volume,
        "resources": {"requests": size},
    }
    return (
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": persistent},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": wanted,
        },
    )


def install(kubectl: Kubectl, *, operator: bool = True) -> None:
    """CRDs, namespaces, and an account that may do everything; with `operator` its kinds too."""
    crd = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    namespaces = tuple(namespace_of(number) for number in range(NAMESPACES))
    crds = (crd, raw_crd(crd), *([training_operator.crd(kubectl)] if operator else []))
    trainingjobs.install(kubectl, *crds, namespaces=namespaces)
    kubectl.run("create", "serviceaccount", ACCOUNT, "-n=default")
    kubectl.run(
        "create", "clusterrolebinding", ACCOUNT, "--clusterrole=cluster-admin",
        f"--serviceaccount=default:{ACCOUNT}",
    )  # fmt: skip
    for namespace in namespaces:
        kubectl.run("wait", f"-n={namespace}", "--for=create", "serviceaccount/default", "--timeout=60s")


def start_nodes(where: Site, kubectl: Kubectl, nodes: int, lease_seconds: int = UNWATCHED) -> Component:
    """kwok, and its nodes, all ready; their leases last so long.

    With an etcd before 3.5 kwok 0.7 loses its watches and opens them again after up to half a minute: pods
    run that much later than they could, so when they run is not measured.
    """
    kwok = start(
        where,
        "kwok",
        [
            program("kwok"),
            f"--kubeconfig={where.kubeconfig}",
            f"--config={STAGES}",
            f"--manage-nodes-with-annotation-selector={FAKE}=fake",
            f"--node-lease-duration-seconds={lease_seconds}",
        ],
    )
    marks = {"annotations": {FAKE: "fake"}, "labels": {"kubernetes.io/os": "linux"}}
    documents: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{n}", **marks}} for n in range(nodes)
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    kubectl.run("create", "-f", "-", document=text, seconds=300)
    ready = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'

    def all_ready() -> bool:
        """In one request: `kubectl wait` makes two for each, at five a second."""
        told = kubectl.run("get", "nodes", f"-o=jsonpath={ready}").splitlines()
        return len(told) >= nodes and set(told) == {"True"}

    kwok.wait_ready(all_ready, 300)
    return kwok


def _account(where: Site, kubectl: Kubectl) -> Path:
    return as_account(kubectl, "default", ACCOUNT, where.state / "account.kubeconfig", "--duration=4h")


def _end_of(log: Path) -> str:
    return re.sub(r"\s+$", "", log.read_text(errors="replace"))[-2000:]
