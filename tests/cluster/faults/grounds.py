"""What a group of faults needs beside three nodes, and how its job is then hit: storage of its own, a queue,
another time of day.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import kueue
from tests.cluster.claims import ClaimedDisk, host_claim
from tests.cluster.clocks import at_another_time
from tests.cluster.component import nodes_of
from tests.cluster.faults import figures
from tests.cluster.faults.hits import Hit, evicted, name_of
from tests.cluster.faults.world import Document, Job, World
from tests.disks import fill, fill_whole
from waiting import wait_until

HANG_SECONDS = 20
SLOW_LOG = 120.0
"""Seconds that a line may take from a rank to its pod's log."""
SMALL, DISK_BYTES = "small", 64 << 20
"""The claim that is a file system of its own, and its size."""
QUOTA = "2500m"
"""Room for one job of the suite, and for none beside it."""


@dataclass(frozen=True)
class Ground:
    """What a group's job is given."""

    spec: dict[str, Any] = field(default_factory=dict)
    runs: Path | None = None
    """Where the claim of its run directory is, if not the world's."""


@contextmanager
def small_disk(world: World) -> Iterator[Ground]:
    """The run directory's claim is a file system of its own."""
    with host_claim(world.cluster, world.site, world.namespace, SMALL, size=DISK_BYTES) as runs:
        yield Ground({"storage": {"claim": SMALL, "data": "data"}}, runs)


@contextmanager
def full_disk(job: Job, attempt: int) -> Iterator[None]:
    """Somebody else's file takes all that is left of the claim, until a save has failed, and goes again."""
    job.saves()
    others = job.run_directory().path.with_name("others")
    fill(others)
    try:
        job.fails_to_save(attempt)
        before = job.status()["progress"]["step"]
        job.until("steps on a full disk", lambda status: status["progress"]["step"] > before)
        job.until("why a save failed", lambda status: "No space left" in status["progress"]["saveFault"])
    finally:
        others.unlink()
    job.saves()
    [failed, *_] = job.ledger(attempt, "checkpoint_failed")
    assert "No space left on device" in failed["error"], failed
    yield


@contextmanager
def evicted_onto_a_full_disk(job: Job, attempt: int) -> Iterator[None]:
    """Somebody else's files take all that is left of the claim once the evicted ranks have saved."""
    others = job.run_directory().path.with_name("others")
    others.mkdir()
    try:
        with evicted(job, attempt):
            wait_until(lambda: job.ledger(attempt, "stop"), "the evicted ranks to have saved")
            fill_whole(others)
            yield
    finally:
        shutil.rmtree(others)


@contextmanager
def evicted_from_a_failed_disk(job: Job, attempt: int) -> Iterator[None]:
    """The claim's disk fails, as a kernel has it then: what trains cannot save, and nobody can begin."""
    disk = _disk_of(job)
    disk.fail()
    job.fails_to_save(attempt)
    before = job.status()["progress"]["step"]
    job.until("steps on a failed disk", lambda status: status["progress"]["step"] > before)
    job.until("why a save failed", lambda status: "Read-only file" in status["progress"].get("saveFault", ""))
    try:
        with evicted(job, attempt):
            yield
    finally:
        wait_until(lambda: not _has_pods(job), "the attempt that could not begin to end")
        disk.mend()


@contextmanager
def evicted_without_its_volume(job: Job, attempt: int) -> Iterator[None]:
    """The claim's volume is mounted nowhere any more once the evicted ranks have saved: what pods get is the
    directory below it."""
    disk = _disk_of(job)
    with evicted(job, attempt):
        wait_until(lambda: job.ledger(attempt, "stop"), "the evicted ranks to have saved")
        disk.unmount()
        try:
            yield
        finally:
            wait_until(lambda: not _has_pods(job), "the attempt that could not begin to end")
            disk.mount()


def _disk_of(job: Job) -> ClaimedDisk:
    return ClaimedDisk.of(job.world.site, job.world.namespace, SMALL)


def _has_pods(job: Job) -> bool:
    """Some that have not ended: they may have its volume."""
    phases = [pod["status"].get("phase") for pod in job.world.items("pods", job.name)]
    return not all(phase in ("Succeeded", "Failed") for phase in phases)


@contextmanager
def queued(world: World) -> Iterator[Ground]:
    """Kueue admits the job."""
    kueue.install(world.cluster, world.site)
    kueue.queues(world.api, world.namespace, QUOTA)
    yield Ground({"queue": kueue.QUEUE, "priority": kueue.ROUTINE})


@contextmanager
def preempted_in_its_queue(job: Job, attempt: int) -> Iterator[None]:
    """Kueue gives the job's quota to one of higher priority, and gives it back when that has gone."""
    world = job.world
    with kueue.urgent_job(world.cluster, world.namespace, "1"):
        said = f"waits in its queue {kueue.QUEUE!r}: ", "insufficient unused quota for cpu in flavor any"

        def waits(now: Document) -> bool:
            return now["attempt"] > attempt and all(words in now["message"] for words in said)

        job.until("to wait for quota", waits)
    yield


@contextmanager
def made_inactive_in_its_queue(job: Job, attempt: int) -> Iterator[None]:
    """Who looks after the queue stops the job's Workload, and its user resumes the job later."""
    world = job.world
    uid = world.kubectl("get", "pytorchjob", f"{job.name}-{attempt}", "-o=jsonpath={.metadata.uid}")
    workloads = ("workloads.kueue.x-k8s.io", f"-l=kueue.x-k8s.io/job-uid={uid}")
    [name] = world.kubectl("get", *workloads, "-o=name").split()
    world.kubectl("patch", name, "--type=merge", '-p={"spec":{"active":false}}')

    def rests(now: Document) -> bool:
        return now["phase"] == "Suspended" and "was made inactive" in now["message"]

    job.until("to be suspended", rests)
    world.kubectl("patch", "tj", job.name, "--type=merge", '-p={"spec":{"suspend":false}}')
    yield


def node_at_another_time(seconds: int) -> Callable[[World], AbstractContextManager[Ground]]:
    """What pods of the second node take for the time is so many seconds ahead; none is put elsewhere but on
    the first."""

    @contextmanager
    def given(world: World) -> Iterator[Ground]:
        others = [world.site.node(number).node_name for number in nodes_of(world.site)[2:]]
        with at_another_time(world.site.node(2), seconds):
            for name in others:
                world.api.run("cordon", name)
            try:
                yield Ground()
            finally:
                for name in others:
                    world.api.run("uncordon", name)

    return given


def evicted_at_another_time(seconds: int) -> Hit:
    """One replica's node has another time than all others: no figure may show it."""

    @contextmanager
    def hit(job: Job, attempt: int) -> Iterator[None]:
        victim, began = name_of(job.victim(attempt)), time.time()
        for pod in job.pods(attempt):
            wrong = job.clock_of(pod) - (seconds if name_of(pod) == victim else 0)
            assert abs(wrong) < SLOW_LOG, f"{name_of(pod)} is {wrong:+.0f} s off"
        with evicted(job, attempt):
            yield
        figures.hold(job, attempt + 1, began)

    return hit


GROUNDS: dict[str, Callable[[World], AbstractContextManager[Ground]]] = {
    "hangs": lambda world: nullcontext(Ground({"hangSeconds": HANG_SECONDS})),
    "storage": small_disk,
    "disk": small_disk,
    "ahead": node_at_another_time(600),
    "behind": node_at_another_time(-600),
    "queue": queued,
}
"""By the group's name; the others need none."""


def ground(world: World, group: str) -> AbstractContextManager[Ground]:
    return GROUNDS.get(group, lambda world: nullcontext(Ground()))(world)
