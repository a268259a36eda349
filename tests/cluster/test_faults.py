"""Every way in which a job can be hit on a real cluster of three nodes, and what it costs.

A job of two replicas trains under DDP on two nodes and is hit by one fault after another (faults/table.py).
For each: the verdict and its reason, the budget that was spent, the steps that were lost, and that nothing of
the attempt is left. In the end the job is to be an untouched twin's equal, to the last bit of state and loss.

Three nodes and a start a fault take minutes, so it runs where FAULTS says what: `short` is a few of the
faults, `all` every one (`make test-faults`), "eviction,drain of its node" those two.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.demo.proof import Evidence, differences
from tests.cluster.cluster import Cluster, down, up
from tests.cluster.faults.table import FAULTS, GROUPS, HANG_SECONDS, Fault
from tests.cluster.faults.world import EVERY, Job, World, world
from tests.cluster.nodes import take_images
from tests.cluster.site import site
from waiting import wait_until

from holdfast_controller.jobs import TrainingJob
from holdfast_trainer.contract import RunDir, read_lines

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not os.environ.get("FAULTS"), reason="FAULTS=short hits jobs on three nodes; all: more"
    ),
]
STEPS = 1500
KINDS = ("pods", "pytorchjobs", "configmaps")
BUILD = Path(__file__).parents[2] / "build"
RESULTS = BUILD / "faults.json"
CAPTURED = BUILD / "captured"
"""The documents of each fault's pods, PyTorchJob and nodes, as they were when the verdict came."""


def chosen() -> tuple[Fault, ...]:
    """The rows to run."""
    wanted = os.environ.get("FAULTS", "")
    if wanted == "all":
        return FAULTS
    if wanted in ("", "short"):
        return tuple(fault for fault in FAULTS if fault.short)
    names = [name.strip() for name in wanted.split(",")]
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        raise ValueError(
            f"FAULTS names {sorted(unknown)}; there are: all, short, {', '.join(f.name for f in FAULTS)}"
        )
    return tuple(fault for fault in FAULTS if fault.name in names)


CHOSEN = chosen()
CHOSEN_GROUPS = tuple(group for group in GROUPS if any(fault.group == group for fault in CHOSEN))


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, trainer_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Three nodes of their own, with the images of the tests' cluster."""
    if cluster.site is None:
        pytest.skip("nodes are taken away and parts of the cluster killed: it needs one started here")
    where = site(f"faults-{uuid.uuid4().hex[:6]}")
    try:
        take_images(cluster.site, where)
        there = up(where, nodes=3, lost_seconds=5)
        with world(there, where, trainer_image, tmp_path_factory.mktemp("controllers")) as here:
            yield here
    finally:
        down(where, purge=True)


@pytest.fixture(scope="module")
def twin(nodes: World) -> Job:
    """A job that nobody touches."""
    job = Job(nodes, "twin")
    job.submit(STEPS)
    job.until("phase Succeeded", lambda status: status["phase"] == "Succeeded")
    return job


@pytest.mark.parametrize("group", CHOSEN_GROUPS)
def test_a_job_is_hit_again_and_again_and_ends_as_its_untouched_twin(
    nodes: World, twin: Job, group: str
) -> None:
    job = Job(nodes, f"hit-{group}")
    spec = {"hangSeconds": HANG_SECONDS} if group == "hangs" else {}
    job.submit(STEPS, pace=0.05, **spec)
    try:
        rows = [hit(job, fault) for fault in CHOSEN if fault.group == group]
        job.pace(0.0)
        status = job.until("its end", lambda status: status["phase"] in ("Succeeded", "Failed"))
        assert status["phase"] == "Succeeded", status["message"]
        assert differences(proof(job, twin)) == ""
        assert status["disruptions"] == sum(row["budget"] == "disruptions" for row in rows)
        assert status["failures"] == sum(row["budget"] == "failures" for row in rows)
        assert status["lostSteps"] == sum(row["lost_steps"] for row in rows)
        nothing_of_earlier_attempts_is_left(job, status["attempt"])
    finally:
        # The next job needs the room.
        nodes.kubectl("delete", "tj", job.name, "--timeout=100s")
    for kind in KINDS:
        wait_until(lambda kind=kind: nodes.items(kind, job.name) == [], f"{kind} to go", 180)
    write([{**row, "resume": "exact"} for row in rows])


def hit(job: Job, fault: Fault) -> dict[str, Any]:
    """Hit the job once, and see what comes of the attempt that runs; the row of the report."""
    before = job.until("an attempt that runs", lambda status: status["phase"] == "Running")
    attempt = before["attempt"]
    job.pace(fault.pace)
    job.trains(attempt)
    began = time.monotonic()
    with fault.hit(job, attempt):
        if not fault.verdict:
            job.trains(attempt)
            return row(fault, before, job.status(), None)
        after = judged(job, fault, attempt)
        record = after["attempts"][attempt - 1]
        assert record["verdict"] == fault.verdict, record
        said = re.sub(r"^replica \d+: ", "", record["reason"])
        assert re.match(fault.says, said), record
        job.until(
            "the next attempt to train",
            lambda status: status["attempt"] > attempt and status["phase"] == "Running",
        )
        recovered = time.monotonic() - began
    told = row(fault, before, job.status(), record)
    assert told["lost_steps"] == record["lastStep"] - record["durableStep"], record
    if fault.notice:
        assert told["lost_steps"] == 0, record
    wait_until(lambda: job.pods(attempt) == [], f"pods of attempt {attempt} to be gone", 180)
    return {**told, "recovery_seconds": round(recovered, 1)}


def judged(job: Job, fault: Fault, attempt: int) -> dict[str, Any]:
    """The job's status once the attempt has its verdict; what the verdict was made of is kept."""
    evidence: dict[str, Any] = {}

    def has_verdict(status: dict[str, Any]) -> object:
        if seen := job.seen(attempt):
            evidence.update(seen)
        return status["attempts"][attempt - 1].get("verdict")

    after = job.until(f"a verdict after {fault.name}", has_verdict)
    CAPTURED.mkdir(parents=True, exist_ok=True)
    document = {"fault": fault.name, **evidence, "record": after["attempts"][attempt - 1]}
    (CAPTURED / f"{fault.name.replace(' ', '-')}.json").write_text(json.dumps(document, indent=1) + "\n")
    return after


def row(
    fault: Fault, before: dict[str, Any], after: dict[str, Any], record: dict[str, Any] | None
) -> dict[str, Any]:
    spent = [name for name in ("disruptions", "failures") if after[name] > before[name]]
    assert len(spent) == (1 if record else 0), (before, after)
    return {
        "fault": fault.name,
        "verdict": record["verdict"] if record else "goes on",
        "reason": record["reason"] if record else "",
        "budget": spent[0] if spent else "none",
        "notice": fault.notice,
        "lost_steps": record["lostSteps"] if record else 0,
        "recovery_seconds": None,
    }


def proof(job: Job, twin: Job) -> Evidence:
    """What both runs wrote on their claim."""
    ours, theirs = (written(one.run_directory()) for one in (job, twin))
    ends = [[line for line in lines if line["event"] == "stop"] for lines, _ in (ours, theirs)]
    assert all(lines and lines[-1]["digest"] for lines in ends)
    return Evidence(
        submitted=0.0,
        job=TrainingJob.model_validate(
            {**job.document(), "metadata": {"name": job.name}, "status": {}}, extra="ignore"
        ),
        ledger={"attempts": ends[0]},
        steps=ours[1],
        twin_ledger={"attempts": ends[1]},
        twin_steps=theirs[1],
    )


def written(run: RunDir) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ledger lines and steps of all attempts."""
    numbers = run.attempt_numbers()
    return (
        [line for number in numbers for line in read_lines(run.ledger(number))],
        [line for number in numbers for line in read_lines(run.steps(number))],
    )


def nothing_of_earlier_attempts_is_left(job: Job, attempt: int) -> None:
    """But their ledgers, which go with the job."""
    for kind in KINDS:
        names = [item["metadata"]["name"] for item in job.world.items(kind, job.name)]
        old = [name for name in names if not name.startswith(f"{job.name}-{attempt}")]
        assert [name for name in old if not (kind == "configmaps" and name.endswith("-ledger"))] == []


def write(rows: list[dict[str, Any]]) -> None:
    """Add to the results, in the order of the table."""
    there = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    known = {row["fault"]: row for row in [*there, *rows]}
    BUILD.mkdir(exist_ok=True)
    ordered = [known[fault.name] for fault in FAULTS if fault.name in known]
    RESULTS.write_text(json.dumps({"every": EVERY, "rows": ordered}, indent=1) + "\n")
