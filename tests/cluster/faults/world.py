"""Where faults happen: three nodes, an operator, a controller, and a job of two replicas on them.

The controller is a process of its own beside the cluster, so that a fault of a node never takes it by chance.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import yaml
from tests.cluster import forked_controller, trainingjobs
from tests.cluster.claims import host_claim
from tests.cluster.cluster import Cluster
from tests.cluster.faults.kinds import JOBS_KIND, KIND
from tests.cluster.kubectl import Kubectl
from tests.cluster.site import Site
from tests.waiting import wait_until

from holdfast_trainer.contract import RunDir, read_lines

CRD = Path(__file__).parents[3] / "helm" / "holdfast" / "templates" / "crd.yaml"
SCRIPT = Path(__file__).with_name("train.py")
PATIENCE = 400.0
"""Seconds that nothing should need, on a machine that does much else."""
LEASE = "faults"
EVERY = 20
"""Steps between two checkpoints."""

Document = dict[str, Any]


@dataclass
class World:
    """A namespace with storage on a cluster of several nodes, and a controller at work."""

    cluster: Cluster
    site: Site
    namespace: str
    image: str
    data: Path
    runs: Path
    directory: Path
    jobs: Mapping[str, Any] = field(default_factory=dict)
    """Values of the chart's `jobs` for the controller, beside those that any of ours has."""
    _controllers: list[ForkServerProcess] = field(default_factory=list)

    @property
    def api(self) -> Kubectl:
        return self.cluster.kubectl

    def kubectl(self, *words: str, document: object = None, seconds: float = 120) -> str:
        text = None if document is None else json.dumps(document)
        return self.api.run(*words, f"-n={self.namespace}", document=text, seconds=seconds)

    def items(self, kind: str, job: str) -> list[Document]:
        found = self.api.get(kind, f"-n={self.namespace}", f"-l=holdfast.dev/job={job}")
        return list(found["items"])

    # ------------------------------------------------------------ controllers

    def start_controller(self) -> None:
        """Start one, and wait until it acts."""
        settings = self.directory / "jobs.yaml"
        values = {"kind": JOBS_KIND.value, "defaultImage": self.image, "defaultClaim": "runs", **self.jobs}
        settings.write_text(yaml.safe_dump(values))
        identity = f"faults-{len(self._controllers)}"
        log = self.directory / f"{identity}.log"
        log.touch()
        process = forked_controller.start(self.api.kubeconfig, settings, identity, LEASE, log)
        self._controllers.append(process)

        def leads() -> bool:
            assert process.is_alive(), log.read_text()[-3000:]
            return forked_controller.LEADS in log.read_text()

        wait_until(leads, "the controller to lead", PATIENCE)

    def kill_controller(self) -> None:
        """With SIGKILL; its lease goes too, or the next one would wait it out."""
        process = self._controllers[-1]
        process.kill()
        process.join()
        self.api.attempt("delete", "lease", LEASE, "-n=default")

    @property
    def url(self) -> str:
        """Of REST, as the newest controller answers it."""
        log = self.directory / f"faults-{len(self._controllers) - 1}.log"
        ports = wait_until(lambda: re.findall(r'"port": (\d+)', log.read_text()), "the controller to answer")
        return f"http://127.0.0.1:{ports[-1]}"

    @property
    def controller_log(self) -> str:
        return "".join(path.read_text()[-4000:] for path in sorted(self.directory.glob("faults-*.log")))


@dataclass(frozen=True)
class Job:
    """One of the suite's, seen from outside."""

    world: World
    name: str
    runs: Path | None = None
    """Where the claim of its run directory is, if not the world's."""

    def submit(self, steps: int, **spec: Any) -> None:
        """By kubectl, as users do. Two replicas: each asks for more than half of a node."""
        self.pace(spec.pop("pace", 0.0))
        document = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": self.name},
            "spec": {
                "command": ["python", f"/holdfast/data/{SCRIPT.name}"],
                "replicas": 2,
                "resources": {"cpu": "1100m", "memory": "1Gi"},
                "checkpoint": {"every": str(EVERY), "keep": 2},
                "retries": {"failures": 20},
                "storage": {"claim": "runs", "data": "data"},
                "env": {"STEPS": str(steps), "PACE": self.name, "OMP_NUM_THREADS": "1"},
                "graceSeconds": 15,
                **spec,
            },
        }
        self.world.kubectl("apply", "-f", "-", document=document)

    def pace(self, seconds: float) -> None:
        """What each step rests from now on."""
        self._tell(self.name, str(seconds))

    @contextmanager
    def told_to_be(self, what: str, rank: str) -> Iterator[None]:
        """While this holds, a rank is `greedy`, or `broken`: see train.py."""
        name = f"{self.name}.{what}"
        self._tell(name, rank)
        try:
            yield
        finally:
            (self.world.data / name).unlink()

    def _tell(self, name: str, text: str) -> None:
        beside = self.world.data / f"{name}.new"
        beside.write_text(text)
        beside.rename(self.world.data / name)

    def document(self) -> Document:
        return self.world.api.get("tj", self.name, f"-n={self.world.namespace}")

    def status(self) -> Document:
        return self.document().get("status") or {}

    def run_directory(self) -> RunDir:
        uid = self.document()["metadata"]["uid"]
        runs = self.runs or self.world.runs
        return RunDir(runs / self.world.namespace / f"{self.name}-{uid[:8]}")

    def until(
        self, what: str, condition: Callable[[Document], object], seconds: float = PATIENCE
    ) -> Document:
        """The job's status once the condition holds."""
        seen: Document = {}

        def holds() -> bool:
            seen.update(self.status())
            if not seen or condition(seen):
                return bool(seen)
            assert seen["phase"] not in ("Succeeded", "Failed"), f"{self.name} has ended before: {what}"
            return False

        try:
            wait_until(holds, f"{self.name}: {what}", seconds)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{json.dumps(seen, indent=1)[-3000:]}\n{self.evidence()}"
            ) from None
        return seen

    def evidence(self) -> str:
        """What a person would look at first."""
        runs = self.runs or self.world.runs
        logs = [f"{path}\n{path.read_text()[-1500:]}" for path in sorted(runs.rglob("rank-*.log"))]
        pods = self.world.kubectl("get", ",".join(("tj", *KIND.made)), "-o=wide")
        events = self.world.kubectl("get", "events", "--sort-by=.lastTimestamp")[-3000:]
        return "\n".join([pods, events, *logs[-4:], self.world.controller_log])

    def steps_of(self, run: RunDir, attempt: int) -> int:
        """How many steps an attempt has done so far."""
        return sum("seconds" in line for line in read_lines(run.steps(attempt)))

    def trains(self, attempt: int, more: int = 8) -> None:
        """Wait until this attempt has done `more` steps from now on."""
        run = self.run_directory()
        before = self.steps_of(run, attempt)

        def on_its_way() -> bool:
            if self.steps_of(run, attempt) >= before + more:
                return True
            status = self.status()
            assert status.get("phase") not in ("Failed", "Succeeded"), status.get("message")
            newest = status.get("attempt", 0)
            assert newest <= attempt, f"attempt {attempt} ended: {status['attempts'][attempt - 1]}"
            return False

        try:
            wait_until(on_its_way, f"{more} steps of attempt {attempt} of {self.name}", PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.evidence()}") from None

    def saves(self) -> None:
        """Wait until a further checkpoint is durable."""
        before = self._durable_steps()
        wait_until(lambda: self._durable_steps() - before, f"{self.name} to save", PATIENCE)

    def ledger(self, attempt: int, event: str) -> list[Document]:
        """The lines of one kind that an attempt has told."""
        lines = read_lines(self.run_directory().ledger(attempt))
        return [line for line in lines if line["event"] == event]

    def fails_to_save(self, attempt: int) -> None:
        """Wait until a rank has said in its pod's log that a save of this attempt has failed."""

        def told() -> bool:
            logs = [self.world.kubectl("logs", pod["metadata"]["name"]) for pod in self.pods(attempt)]
            return any("failed, training goes on: " in log for log in logs)

        wait_until(told, f"{self.name} to fail to save", PATIENCE)

    def _durable_steps(self) -> set[str]:
        return {path.parent.name for path in self.run_directory().path.glob("checkpoints/*/manifest.json")}

    def clock_of(self, pod: Document) -> float:
        """By how many seconds the time that its rank sees is ahead of this machine's."""
        found = re.search(
            r"^(\S+Z) .*\bclock ([\d.]+)$",
            self.world.kubectl("logs", pod["metadata"]["name"], "--timestamps"),
            re.MULTILINE,
        )
        assert found, f"{pod['metadata']['name']} has not said what time it has"
        return float(found[2]) - datetime.fromisoformat(found[1]).timestamp()

    # --------------------------------------------------------------- replicas

    def pods(self, attempt: int) -> list[Document]:
        label = "holdfast.dev/attempt"
        pods = self.world.items("pods", self.name)
        return [pod for pod in pods if pod["metadata"]["labels"][label] == str(attempt)]

    def victim(self, attempt: int) -> Document:
        """A pod of the attempt that is not on the first node, where the cluster itself lives."""
        away = [pod for pod in self.pods(attempt) if pod["spec"].get("nodeName") != self.world.site.node_name]
        return max(away, key=lambda pod: pod["metadata"]["name"])


def record(status: Document, attempt: int, key: str | None = None) -> Any:
    """Of an attempt, or what it has of `key`; None where it has none."""
    found: Document = next((one for one in status["attempts"] if one["number"] == attempt), {})
    return found if key is None else found.get(key)


def processes_of(pod: Document) -> list[psutil.Process]:
    """All of the pod's, as this machine sees them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if pod["metadata"]["uid"] in Path(f"/proc/{process.pid}/cgroup").read_text():
                found.append(process)
    return found


def rank_of(pod: Document) -> psutil.Process:
    """The process of the pod's rank that trains, as this machine sees it; what that starts is none."""

    def trains(process: psutil.Process | None) -> bool:
        words = process.cmdline() if process is not None else []
        return len(words) > 1 and words[1].endswith(SCRIPT.name)

    for process in processes_of(pod):
        with suppress(psutil.Error):
            if trains(process) and not trains(process.parent()):
                return process
    raise AssertionError(f"{pod['metadata']['name']} has no rank that trains")


@contextmanager
def world(cluster: Cluster, site: Site, image: str, directory: Path, **jobs: Any) -> Iterator[World]:
    """On a cluster that is up; all gone afterwards. `jobs` are values of the chart."""
    namespace = f"faults-{uuid.uuid4().hex[:6]}"
    kubectl = cluster.kubectl
    trainingjobs.install(kubectl, yaml.safe_load(CRD.read_text()))
    kubectl.run("create", "namespace", namespace)
    kubectl.run("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with (
        host_claim(cluster, site, namespace, "data") as data,
        host_claim(cluster, site, namespace, "runs") as runs,
    ):
        shutil.copy(SCRIPT, data)
        here = World(cluster, site, namespace, image, data, runs, directory, jobs)
        try:
            here.start_controller()
            yield here
            here.kubectl("delete", "tj", "--all", "--timeout=300s")
        finally:
            for process in here._controllers:
                if process.is_alive():
                    process.kill()
                    process.join()
            trainingjobs.release(kubectl, namespace)
            kubectl.attempt("delete", "namespace", namespace, "--wait=false")
