"""One run on the cluster: submitted, hit as the trace says, followed to its end, cleared away."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from bench.recovering.account import Hit, Line
from bench.recovering.jobs import TOLD, Document, Work, job_set, lone_pod, pytorch_job, training_job
from bench.report import ReportError
from tests.cluster.faults.world import World, processes_of
from tests.cluster.trainingjobs import evict

from holdfast_controller.breakdown import Breakdown
from holdfast_trainer.contract import read_lines

POLL_SECONDS = 0.1
PATIENCE = 900.0
"""Seconds without a further step after which a run is given up."""


@dataclass(frozen=True)
class Planned:
    """After so many seconds that steps have rested, each counted once, a replica is taken."""

    after: float
    notice: bool
    replica: int


def trace(seed: int, mean: float, until: float) -> tuple[Planned, ...]:
    """A Poisson process: `mean` seconds between two interruptions; half of them come with a notice."""
    chance = random.Random(seed)
    planned, now = [], chance.expovariate(1 / mean)
    while now < until:
        planned.append(Planned(now, chance.random() < 0.5, chance.randrange(2)))
        now += chance.expovariate(1 / mean)
    return tuple(planned)


def shares(whole: tuple[Planned, ...], rounds: int, seconds: float) -> list[tuple[Planned, ...]]:
    """One process goes on over all rounds: each begins `seconds` after the one before, and goes on beyond."""
    begins = [number * seconds for number in range(rounds)]
    return [
        tuple(replace(one, after=one.after - begin) for one in whole if one.after >= begin)
        for begin in begins
    ]


@dataclass(frozen=True)
class Told:
    """What came of a run: lines of its rank 0, the hits, and when it was submitted."""

    lines: list[Line]
    hits: list[Hit]
    submitted: float
    finished: bool
    stages: list[dict[str, float]] = field(default_factory=list)
    """Of each recovery, in seconds, as the ledger has them; of other kinds nobody tells any."""


@dataclass
class Bench:
    """The cluster, and what is trained on it."""

    world: World
    work: Work
    image: str

    def holdfast(self, name: str, planned: tuple[Planned, ...]) -> Told:
        return self._run(name, "tj", training_job(name, self.work), planned, f"holdfast.dev/job={name}")

    def usual(self, name: str, planned: tuple[Planned, ...]) -> Told:
        document = pytorch_job(name, self.work, self.image)
        label = f"training.kubeflow.org/job-name={name}"
        return self._run(name, "pytorchjob", document, planned, label)

    def job_set(self, name: str, planned: tuple[Planned, ...]) -> Told:
        document = job_set(name, self.work, self.image)
        return self._run(name, "jobset", document, planned, f"jobset.sigs.k8s.io/jobset-name={name}")

    def alone(self, name: str) -> list[list[Line]]:
        """Two processes at once, as on this node a gang's are; what each told."""
        names = [f"{name}-{rank}" for rank in range(2)]
        few = Work(3, self.work.every, self.work.pace)
        with self._cleared("pod", names):
            self.world.api.apply(
                *(lone_pod(each, few, self.image) for each in names), namespace=self.world.namespace
            )
            self._until(lambda: all(len(self._told(each)) > few.steps for each in names), "processes alone")
            return [self._told(each) for each in names]

    # ------------------------------------------------------------------ a run

    def _run(
        self, name: str, kind: str, document: Document, planned: tuple[Planned, ...], label: str
    ) -> Told:
        with self._cleared(kind, [name]):
            submitted = time.time()
            self.world.api.apply(document, namespace=self.world.namespace)
            self._until(lambda: _steps(self._told(name)) > 0, f"the first step of {name}")
            lines, hits = self._to_the_end(name, planned, label)
            stages = self._stages(name) if kind == "tj" else []
            return Told(lines, hits, submitted, self._has_all(lines), stages)

    def _hit(self, one: Planned, label: str) -> bool:
        """Take the replica, or the other where it is not there; False where no pod runs just now."""
        pods = self.world.api.get("pods", f"-n={self.world.namespace}", f"-l={label}")["items"]
        running = [
            pod
            for pod in pods
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        if not running:
            return False
        running.sort(key=lambda pod: pod["metadata"]["name"])
        pod = running[min(one.replica, len(running) - 1)]
        victim = pod["metadata"]["name"]
        if one.notice:
            evict(self.world.api, self.world.namespace, victim)
            return True
        # As with a node that is gone: a kubelet that is told to delete without grace gives two seconds.
        for process in processes_of(pod):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.world.kubectl("delete", "pod", victim, "--grace-period=0", "--force", "--wait=false")
        return True

    def _to_the_end(
        self, name: str, planned: tuple[Planned, ...], label: str
    ) -> tuple[list[Line], list[Hit]]:
        """Hit as planned, until all steps are done, or none is for too long: what it told, and the hits."""
        hits: list[Hit] = []
        upcoming = list(planned)
        steps, since = -1, time.monotonic()
        while True:
            lines = self._told(name)
            if self._has_all(lines):
                return lines, hits
            if (now := _steps(lines)) != steps:
                steps, since = now, time.monotonic()
            if time.monotonic() - since > PATIENCE:
                return lines, hits
            if upcoming and _farthest(lines) * self.work.pace >= upcoming[0].after:
                one = upcoming.pop(0)
                if self._hit(one, label):
                    hits.append(Hit(time.time(), one.notice))
            time.sleep(POLL_SECONDS)

    # ------------------------------------------------------------------- what it told

    def _stages(self, name: str) -> list[dict[str, float]]:
        job = self.world.api.get("tj", name, f"-n={self.world.namespace}")
        return [
            Breakdown.model_validate(attempt["breakdown"]).stages()
            for attempt in job["status"]["attempts"]
            if attempt.get("recoverySeconds") is not None and attempt.get("breakdown")
        ]

    def _file(self, name: str) -> Path | None:
        """A TrainingJob has a directory of its own, with a part of its uid in the name."""
        places = [self.world.runs / name, *self.world.runs.glob(f"{self.world.namespace}/{name}-*")]
        return next((place / TOLD for place in places if (place / TOLD).exists()), None)

    def _told(self, name: str) -> list[Line]:
        path = self._file(name)
        return [] if path is None else read_lines(path)

    def _has_all(self, lines: list[Line]) -> bool:
        return any(line["event"] == "step" and line["step"] == self.work.steps for line in lines)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > ends:
                pods = self.world.kubectl("get", "tj,pytorchjobs,jobsets,pods", "-o=wide")
                raise ReportError(f"{what}: not within {PATIENCE:g} s\n{pods}\n{self.world.controller_log}")
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _cleared(self, kind: str, names: list[str]) -> Iterator[None]:
        """Nothing of these is left afterwards: the next run has the machine to itself."""
        for name in names:
            (self.world.runs / name).mkdir()
            (self.world.runs / name).chmod(0o777)
        try:
            yield
        finally:
            self.world.kubectl("delete", kind, *names, "--timeout=100s")
            gone = ("wait", "pods", "--all", "--for=delete", "--timeout=100s")
            self.world.api.attempt(*gone, f"-n={self.world.namespace}", seconds=110)
            for name in names:
                shutil.rmtree(self.world.runs / name, ignore_errors=True)


def _farthest(lines: list[Line]) -> int:
    return max((line["step"] for line in lines if line["event"] == "step"), default=0)


def _steps(lines: list[Line]) -> int:
    """How many were done, those done again included."""
    return sum(line["event"] == "step" for line in lines)
