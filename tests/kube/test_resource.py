"""What kubectl stored, read as far as it can be read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_controller.cluster import Invalid
from holdfast_controller.jobs import JobProgress, Phase, Spec, Status, Verdict
from holdfast_controller.kube.resource import decode, status_document


def stored(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "a",
            "namespace": "team-a",
            "uid": "u",
            "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"command": ["true"], "replicas": 2, **spec},
        "status": status or {},
    }


def test_a_job_that_can_be_read_has_no_faults() -> None:
    job = decode(stored(gpus=4, checkpoint={"every": 500}))
    assert job.faults == ()
    assert (job.spec.gpus, job.spec.checkpoint.every) == ("4", "500")


@pytest.mark.parametrize(
    ("spec", "faults"),
    [
        (
            {"gpus": "0.3333333333333333"},
            ["spec.gpus: 0.3333333333333333 GPUs: a share is 1/N of a GPU, such as 0.5, 0.25 or 0.125"],
        ),
        (
            {"gpus": 2, "processes": 3},
            ["spec: 3 processes on 2 GPU: NCCL cannot run two ranks on one device"],
        ),
        ({"mig": "1g.10gb"}, ["spec: mig 1g.10gb with 0 GPUs: a replica uses one MIG device; set gpus to 1"]),
        ({"minReplicas": 3}, ["spec: minReplicas 3 is more than replicas, which is 2"]),
        (
            {"gpus": "one", "mig": "1g.10gb"},
            ["spec.gpus: 'one' is not a number of GPUs", "spec: mig 1g.10gb with 0 GPUs"],
        ),
        ({"command": None}, ["spec.command: Input should be a valid list"]),
        ({"command": []}, ["spec.command: List should have at least 1 item"]),
        ({"fromTheFuture": {"a": 1}}, ["spec.fromTheFuture: Extra inputs are not permitted"]),
        (
            {"checkpoint": {"every": "hourly", "keep": 0}, "env": {"RANK": "1"}},
            [
                "spec.checkpoint.every: 'hourly' is none of",
                "spec.checkpoint.keep:",
                "spec.env: RANK is set by",
            ],
        ),
    ],
)
def test_what_cannot_be_read_is_left_out_and_named(spec: dict[str, Any], faults: list[str]) -> None:
    document = stored({"phase": "Running", "attempt": 3}, **spec)
    before = copy.deepcopy(document)
    job = decode(document)
    assert len(job.faults) == len(faults)
    assert all(found.startswith(words) for found, words in zip(job.faults, faults, strict=True))
    assert (job.key, job.spec.replicas, job.status.phase, job.status.attempt) == (
        "team-a/a",
        2,
        Phase.RUNNING,
        3,
    )
    assert document == before, "what the reflector holds is not ours to change"
    assert job.model_copy(update={"status": job.status}).faults == job.faults


ODD = st.none() | st.booleans() | st.integers(-3, 70) | st.text(max_size=5) | st.lists(st.text(max_size=3))
VALUES = ODD | st.sampled_from(["0.3", "1.0", "0.25", "1g.10gb"]) | st.dictionaries(st.text(max_size=5), ODD)


@given(st.dictionaries(st.sampled_from(sorted(Spec.model_json_schema(by_alias=True)["properties"])), VALUES))
def test_no_spec_whatsoever_hides_its_job(spec: dict[str, Any]) -> None:
    """A newer CRD may allow what we do not, and its jobs must be seen, and come to their end."""
    job = decode(stored({"phase": "Running", "attempt": 3}) | {"spec": spec})
    assert (job.key, job.status.attempt) == ("team-a/a", 3)
    assert Spec.model_validate(job.spec.model_dump()) == job.spec


def test_a_config_that_is_nested_without_end_does_not_hide_the_jobs_beside_it() -> None:
    """The apiserver takes thousands of levels. Nobody can write them as JSON: lists of all jobs were none."""
    config: dict[str, Any] = {}
    for _ in range(3000):
        config = {"a": [config]}
    job = decode(stored(config=config))
    assert job.faults == ("spec.config: nested deeper than 100 levels",)
    assert job.spec.config == {}
    assert job.model_dump_json()
    at_most: Any = 1
    for _ in range(100):
        at_most = [at_most]
    assert decode(stored(config={"a": at_most})).faults == ()
    assert decode(stored(config={"a": [at_most]})).faults != ()


def test_a_status_of_a_newer_controller_is_read_without_what_is_new() -> None:
    """During an upgrade and after a rollback two versions read what one wrote."""
    status = {
        "phase": "Running",
        "attempt": 2,
        "fromTheFuture": 1,
        "attempts": [{"number": 2, "alsoNew": {"x": 1}, "durableStep": 7}],
    }
    document = stored({**status, "columns": {"engine": "kubernetes"}})
    before = copy.deepcopy(document)
    job = decode(document)
    assert document == before, "what the reflector holds is not ours to change"
    assert job.faults == ()
    assert (job.status.attempt, job.status.attempts[0].durable_step) == (2, 7)


def test_a_verdict_of_a_newer_controller_hides_no_job() -> None:
    """After a rollback a job with one was in no list, went on no more, and could not be deleted."""
    attempts = [{"number": 1, "verdict": "Throttled", "reason": "its node was too hot"}, {"number": 2}]
    job = decode(stored({"phase": "Running", "attempt": 2, "attempts": attempts}))
    first, second = job.status.attempts
    assert (first.verdict, first.reason) == (Verdict.DISRUPTED, "its node was too hot")
    assert second.verdict is None
    job = decode(stored({"phase": "Recovering", "attempt": 1, "attempts": [{"number": 1, "ending": "Hot"}]}))
    assert (job.status.attempts[0].ending, job.status.attempts[0].verdict) == (Verdict.DISRUPTED, None)


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ({"attempts": [{"number": 1}]}, Phase.QUEUED),
        ({"attempts": [{"number": 1, "verdict": "Throttled"}]}, Phase.QUEUED),
        ({}, Phase.QUEUED),
        ({"finishedAt": "2026-01-01T12:00:00Z"}, Phase.FAILED),
        (
            {"finishedAt": "2026-01-01T12:00:00Z", "attempts": [{"number": 1, "verdict": "Hung"}]},
            Phase.FAILED,
        ),
        (
            {"finishedAt": "2026-01-01T12:00:00Z", "attempts": [{"number": 1, "verdict": "Finished"}]},
            Phase.SUCCEEDED,
        ),
    ],
)
def test_a_phase_of_a_newer_controller_hides_no_job(status: dict[str, Any], phase: Phase) -> None:
    """After a rollback a job in one was in no list, nobody carried it on, and it could not be deleted. What
    is over must not start again."""
    job = decode(stored({"phase": "Draining", "attempt": 1, **status}))
    assert (job.status.phase, job.status.attempt, job.faults) == (phase, 1, ())


def test_nodes_that_only_a_newer_controller_opens_attempts_for_hide_no_job() -> None:
    job = decode(stored({"phase": "Running", "attempt": 1, "attempts": [{"number": 1, "capacity": "Flex"}]}))
    assert job.status.attempts[0].capacity is None


@pytest.mark.parametrize("phase", Phase)
def test_kubectl_shows_what_time_is_left_while_the_job_trains(phase: Phase) -> None:
    """Progress stays in the status of a job that was suspended or waits; its speed was of another moment."""
    status = Status(phase=phase, progress=JobProgress(step=812, eta_seconds=7500.4))
    shown = {"eta": "2h5m"} if phase is Phase.RUNNING else {}
    assert status_document(status)["columns"] == {"engine": "kubernetes", **shown}


def test_a_status_that_means_nothing_is_no_status() -> None:
    with pytest.raises(Invalid, match=r"TrainingJob team-a/a: status\.phase: Input should be 'Queued'"):
        decode(stored({"phase": 7}))
