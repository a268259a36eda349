"""Every way in which a job can be hit on a real cluster of several nodes, and what it costs.

A job of two replicas trains under DDP on two nodes and is hit by one fault after another (faults/table.py).
For each: the verdict and its reason, the budget that was spent, the steps that were lost, and that nothing of
the attempt is left. In the end the job is to be an untouched twin's equal, to the last bit of state and loss.

The nodes and a start a fault take minutes, so it runs where FAULTS says what: `short` is a few of the
faults on one job, `all` every one (`make test-faults`), "eviction,drain of its node" those two. A fault that
goes wrong is told, and the next one is tried all the same. With JOBS_KIND=TrainJob attempts are TrainJobs,
under Kubeflow Trainer on JobSet.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from scripts.demo.proof import Evidence, differences
from tests.cluster.buildkit import build_image, image_name
from tests.cluster.cluster import down, up
from tests.cluster.errors import ClusterError
from tests.cluster.faults import results
from tests.cluster.faults.grounds import ground
from tests.cluster.faults.kinds import JOBS_KIND, KIND
from tests.cluster.faults.table import FAULTS, PACE, Fault
from tests.cluster.faults.witness import Witness, nameless, witness
from tests.cluster.faults.world import PATIENCE, Job, World, record, world
from tests.cluster.machine import Machine, why_no_node
from tests.cluster.nodes import take_images
from tests.cluster.platform import holdfast
from tests.cluster.site import DEFAULT_NAME, MOST_NODES, Site, site, site_apart
from tests.cluster.users import used
from waiting import wait_until

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.pod_settings import JobsKind
from holdfast_controller.policy.half_placed import PLACE_SECONDS
from holdfast_trainer.contract import RunDir, read_lines

WANTED = os.environ.get("FAULTS", "")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not WANTED, reason="FAULTS=short hits jobs on a cluster of several nodes; all: more"),
]
STEPS = 800


def chosen(wanted: str) -> dict[str, list[Fault]]:
    """The rows to run, by the job that is hit."""
    if wanted in ("", "short"):
        return {"short": [fault for fault in FAULTS if fault.short]}
    names = [name.strip() for name in wanted.split(",")]
    if wanted != "all" and (unknown := set(names) - {fault.name for fault in FAULTS}):
        raise ValueError(
            f"FAULTS names {sorted(unknown)}; there are: all, short, {', '.join(f.name for f in FAULTS)}"
        )
    found: dict[str, list[Fault]] = {}
    for fault in FAULTS:
        if wanted == "all" or fault.name in names:
            found.setdefault(fault.group, []).append(fault)
    return found


def left_out(fault: Fault) -> str:
    """Why this one is not tried in the kind in which attempts are made; empty: it is."""
    return fault.not_as_train_jobs if JOBS_KIND is JobsKind.TRAIN_JOB else ""


CHOSEN = chosen(WANTED)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, gathered: list[Site]) -> Iterator[World]:
    """A cluster of its own, with the trainer's image of the tests' one: nodes are taken away from it."""
    if os.environ.get("KUBECONFIG_UNDER_TEST"):
        pytest.skip("nodes are taken away and parts of the cluster killed: it needs one started here")
    if reason := why_no_node():
        pytest.skip(reason)
    where = site_apart("faults")
    gathered.append(where)
    spare = any(fault.spare for faults in CHOSEN.values() for fault in faults)
    try:
        image = with_trainer_image(where)
        there = up(where, nodes=3 if spare else 2, operator=KIND.install is None, lost_seconds=5)
        if KIND.install is not None:
            KIND.install(there, where)
        with world(there, where, image, tmp_path_factory.mktemp("controllers")) as here:
            yield here
    finally:
        down(where, purge=True)


def with_trainer_image(where: Site) -> str:
    """The image's name. It is built where the other tests build it, which then need not stay up."""
    builder = site(DEFAULT_NAME)
    with used(builder, print):
        name = build_image(Machine.running(builder), "trainer.Dockerfile", image_name("trainer")).name
    take_images(builder, where)
    return name


@pytest.fixture(scope="module")
def twin(nodes: World) -> Job:
    """A job that nobody touches."""
    job = Job(nodes, "twin")
    job.submit(STEPS)
    job.until("phase Succeeded", lambda status: status["phase"] == "Succeeded")
    return job


@pytest.mark.parametrize("group", CHOSEN)
def test_a_job_is_hit_again_and_again_and_ends_as_its_untouched_twin(
    nodes: World, twin: Job, group: str
) -> None:
    for fault in CHOSEN[group]:
        if reason := left_out(fault):
            pytest.skip(f"{fault.name}: {reason}")
    with ground(nodes, group) as given:
        job = Job(nodes, f"hit-{group}", given.runs)
        job.submit(STEPS, pace=PACE, **given.spec)
        is_hit_and_ends_as(twin, job, group)


def is_hit_and_ends_as(twin: Job, job: Job, group: str) -> None:
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(tried(job, fault) for fault in CHOSEN[group])
        job.pace(0.0)
        status = job.until("its end", lambda status: status["phase"] in ("Succeeded", "Failed"))
        assert status["phase"] == "Succeeded", status["message"]
        difference = differences(proof(job, twin))
        for row in rows:
            row["resume"] = difference or "exact"
        assert difference == ""
        assert not (wrong := [row for row in rows if "wrong" in row]), wrong
        evictions = sum(fault.follows for fault in CHOSEN[group])
        assert status["disruptions"] == evictions + sum(row["budget"] == "disruptions" for row in rows)
        assert status["failures"] == sum(row["budget"] == "failures" for row in rows)
        assert status["lostSteps"] == sum(row["lost_steps"] for row in rows)
        assert left_behind(job, status["attempt"]) == []
    finally:
        results.write(rows)
        # The next job needs the room.
        job.world.kubectl("delete", "tj", job.name, "--timeout=300s")
    for kind in KIND.made:
        wait_until(lambda kind=kind: job.world.items(kind, job.name) == [], f"{kind} to go")


def test_a_job_that_can_never_run_is_not_tried_again(nodes: World) -> None:
    """The ranks say so; what they leave is kept as of the faults, under a name of its own."""
    job = Job(nodes, "misconfigured")
    command = ["python", "-m", "holdfast_trainer", "train"]
    job.submit(STEPS, command=command, config={"optim": {"learnin_rate": 0.1}})
    with witness(nodes.api, nodes.namespace, job.name, nodes.directory / job.name) as watched:
        status = job.until("its end", lambda status: status["phase"] in ("Succeeded", "Failed"))
        keep(job, "configuration error", watched, 1)
    assert (status["phase"], status["attempt"], status["failures"]) == ("Failed", 1, 1)
    [judged] = status["attempts"]
    assert judged["verdict"] == "ConfigError"
    assert "optim.learnin_rate: unknown key; did you mean 'learning_rate'?" in judged["reason"], judged
    nodes.kubectl("delete", "tj", job.name, "--timeout=300s")


def test_a_job_is_suspended_and_resumed_and_every_rank_tells_its_log(nodes: World) -> None:
    """By the command line; logs of what runs, of what is over, and of what is followed to its end."""
    nodes.kubectl("create", "serviceaccount", "user")
    account = f"--serviceaccount={nodes.namespace}:user"
    nodes.kubectl("create", "rolebinding", "user", "--clusterrole=cluster-admin", account)
    token = nodes.kubectl("create", "token", "user").strip()

    def told(*words: str) -> str:
        return holdfast(nodes.url, token, *words, "-n", nodes.namespace, seconds=PATIENCE)

    job = Job(nodes, "told")
    job.submit(STEPS, pace=PACE)
    job.trains(1)
    for rank in ("0", "1"):
        assert re.search(r"^clock [\d.]+$", told("logs", job.name, f"--rank={rank}"), re.MULTILINE)
    with witness(nodes.api, nodes.namespace, job.name, nodes.directory / job.name) as watched:
        told("suspend", job.name)
        stopped = job.until("to be suspended", lambda now: now["phase"] == "Suspended")
        assert record(stopped, 1, "verdict") == "Suspended", stopped
        wait_until(lambda: job.world.items("pods", job.name) == [], "its pods to go", PATIENCE)
        told("resume", job.name)
        job.trains(2)
        seen = [one["metadata"] for one in watched.told("pods")]
        first = {meta["name"] for meta in seen if meta["labels"]["holdfast.dev/attempt"] == "1"}
        assert len(first) == 2, "no pod of an attempt that was ended is made again"
    wait_until(lambda: left_behind(job, 2) == [], "attempt 1 to be cleared away")
    assert job.steps_of(job.run_directory(), 1) > 0
    assert record(job.status(), 2, "resumedStep") == record(stopped, 1, "lastStep"), "it was given notice"
    job.pace(0.0)
    assert "clock" in told("logs", job.name, "--follow", "--attempt=2", "--rank=1")
    job.until("its end", lambda now: now["phase"] == "Succeeded")
    for rank in ("0", "1"):
        assert "clock" in told("logs", job.name, "--attempt=2", f"--rank={rank}")
    nodes.kubectl("delete", "tj", job.name, "--timeout=300s")


def tried(job: Job, fault: Fault) -> dict[str, Any]:
    """The row of a fault; where it went otherwise than it should, with what was wrong."""
    try:
        return hit(job, fault)
    except (AssertionError, ClusterError) as error:
        print(f"{fault.name}: {error}", flush=True)
        return {"fault": fault.name, "wrong": str(error).splitlines()[0][:300]}


def hit(job: Job, fault: Fault) -> dict[str, Any]:
    """Hit the job once, and see what comes of the attempt that runs; the row of the report."""
    before = job.until("an attempt that runs", lambda status: status["phase"] == "Running")
    attempt = before["attempt"]
    job.pace(fault.pace)
    if fault.verdict and not fault.notice:
        job.saves()  # so that it goes on from there, and not from the start
    job.trains(attempt)
    began = time.monotonic()
    if not fault.verdict:
        with fault.hit(job, attempt):
            job.trains(attempt)
            return row(job, fault, before, job.status(), {})
    api, directory = job.world.api, job.world.directory / fault.name.replace(" ", "-")
    with witness(api, job.world.namespace, job.name, directory) as watched, ExitStack() as broken:
        broken.enter_context(fault.hit(job, attempt))
        if fault.follows:
            before = job.until("the eviction's verdict", lambda now: record(now, attempt, "verdict"))
            attempt += 1
        patience = PATIENCE + (PLACE_SECONDS if fault.follows else 0)
        after = job.until(
            f"a verdict after {fault.name}", lambda now: record(now, attempt, "verdict"), patience
        )
        keep(job, fault.name, watched, attempt)
        judged = record(after, attempt)
        assert judged["verdict"] == fault.verdict, judged
        said = re.sub(r"^replica \d+: ", "", judged["reason"])
        assert re.match(fault.says, said), judged
        if fault.follows:  # what keeps this attempt from starting would keep the next one too
            broken.close()
        then = job.until(
            "the next attempt to train",
            lambda now: now["attempt"] > attempt and now["phase"] == "Running",
        )
        recovered = time.monotonic() - began
    wait_until(lambda: left_behind(job, then["attempt"]) == [], f"attempt {attempt} to be cleared away")
    told = row(job, fault, before, then, record(then, attempt))
    resumed = record(then, attempt + 1, "resumedStep")
    trained = record(then, attempt - 1) if fault.follows else judged
    told["lost_steps"] = trained["lostSteps"]  # one that follows did none
    assert told["lost_steps"] == trained["lastStep"] - resumed, (trained, resumed)
    if fault.notice:
        assert told["lost_steps"] == 0, judged
    return nameless({**told, "recovery_seconds": round(recovered, 1)}, {})


def keep(job: Job, fault: str, watched: Witness, attempt: int) -> None:
    """What the verdict was made of, for tests of the policy alone."""
    documents = wait_until(lambda: watched.of_verdict(attempt), "what was watched to be told")
    where = job.world.site
    names = {where.node(number).node_name: f"node-{number}" for number in range(1, MOST_NODES + 1)}
    results.keep(fault, nameless(documents, {**names, job.world.namespace: "team"}))


def row(
    job: Job, fault: Fault, before: dict[str, Any], after: dict[str, Any], judged: dict[str, Any]
) -> dict[str, Any]:
    spent = [name for name in ("disruptions", "failures") if after[name] > before[name]]
    free = not judged or fault.follows or judged["verdict"] == "Suspended"
    assert len(spent) == (0 if free else 1), (before, after)
    return {
        "fault": fault.name,
        "verdict": judged.get("verdict", "goes on"),
        "reason": judged.get("reason", ""),
        "budget": spent[0] if spent else "none",
        "notice": fault.notice,
        "lost_steps": judged.get("lostSteps", 0),
        "left_behind": len(left_behind(job, after["attempt"])),
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


def left_behind(job: Job, attempt: int) -> list[str]:
    """What attempts before this one have left on the cluster: but their ledgers, which go with the job."""
    names = [item["metadata"]["name"] for kind in KIND.made for item in job.world.items(kind, job.name)]
    old = [name for name in names if not name.startswith(f"{job.name}-{attempt}")]
    return [name for name in old if not name.endswith("-ledger")]
