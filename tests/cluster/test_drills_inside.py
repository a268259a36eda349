"""Drills that run something in a job's pods, where the operator of the cluster lets the controller do that: a
gang that stands still as a whole says where, and a replica that outgrows its memory is found to have done so.

The trainer's own image and real ranks; the controller is a process beside the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.faults.world import Job, World, world
from tests.cluster.rights import wait_until_allowed

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(2400)]
HANG_SECONDS = 10


@pytest.fixture
def here(cluster: Cluster, trainer_image: str, tmp_path: Path) -> Iterator[World]:
    if cluster.site is None:
        pytest.skip("its claims are directories of a node that was started here")
    with world(cluster, cluster.site, trainer_image, tmp_path, execInPods=True) as there:
        yield there


def drill(job: Job, replica: int, kind: str) -> None:
    """By REST, as one who may do everything in the namespace."""
    here = job.world
    here.api.attempt("create", "serviceaccount", "boss", f"-n={here.namespace}")
    here.api.attempt(
        "create", "rolebinding", "boss", f"-n={here.namespace}", "--clusterrole=cluster-admin",
        f"--serviceaccount={here.namespace}:boss",
    )  # fmt: skip
    wait_until_allowed(here.api, here.namespace, "boss", "update")
    token = here.kubectl("create", "token", "boss").strip()
    answer = httpx.post(
        f"{here.url}/v1/namespaces/{here.namespace}/jobs/{job.name}/drill",
        json={"replica": replica, "kind": kind},
        headers={"Authorization": f"Bearer {token}"},
        trust_env=False,
        timeout=300,
    )
    assert answer.status_code == httpx.codes.ACCEPTED, answer.text


def verdict(job: Job, attempt: int) -> dict[str, Any]:
    """The record of an attempt, once it is judged."""

    def judged(status: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in status["attempts"] if one["number"] == attempt and one.get("verdict")]

    (record,) = judged(job.until(f"the verdict on attempt {attempt}", judged))
    return record


def test_a_gang_is_frozen_and_tells_its_stacks_and_a_replica_runs_out_of_memory(here: World) -> None:
    job = Job(here, "drilled")
    resources = {"cpu": "100m", "memory": "1Gi"}
    job.submit(100_000, pace=0.2, resources=resources, hangSeconds=HANG_SECONDS)

    # Nobody is left to say that all stand still: the controller finds it, and asks before it ends them.
    job.trains(1)
    drill(job, 0, "freeze")
    drill(job, 1, "freeze")
    hung = verdict(job, 1)
    assert (hung["verdict"], hung["reason"][:11]) == ("Hung", "no step for"), hung
    assert "rank 0 takes connections and answers none" in hung["reason"]
    for rank in (0, 1):
        log = job.run_directory().rank_log(1, rank).read_text()
        # What ends it once it is let go is whoever comes first: the signal, a timer long past, its peer.
        assert "(most recent call first):\n" in log, log[-6000:]
        assert "in main\n" in log, log[-6000:]

    job.trains(2)
    drill(job, 1, "oom")
    starved = verdict(job, 2)
    assert starved["verdict"] == "OutOfMemory", starved
    assert "replica 1: OutOfMemory: the container reached its limit of 1Gi" in starved["reason"]
    assert job.status()["failures"] == 2
