"""Jobs that come by kubectl, past REST and its checks: they get no more than by REST, and a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.security.conftest import TEAM, Live, a_job
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
JOBS = f"/v1/namespaces/{TEAM}/jobs"
Status = dict[str, Any]


def apply(live: Live, name: str, **spec: Any) -> None:
    body = {**a_job(name, **spec), "metadata": {"name": name, "namespace": TEAM}}
    live.plane.kubectl.run("apply", "-f", "-", document=json.dumps(body))


def status_of(live: Live, name: str, what: str, holds: Callable[[Status], object]) -> Status:
    """Once the controller has seen the newest spec and the condition holds."""
    kubectl = live.plane.kubectl

    def seen() -> Status | None:
        job = kubectl.get("tj", name, f"-n={TEAM}")
        status: Status = job.get("status") or {}
        if status.get("observedGeneration") != job["metadata"]["generation"]:
            return None
        return status if holds(status) else None

    return wait_until(seen, f"{name}: {what}") or {}


def attempts(live: Live, name: str) -> list[str]:
    words = ("get", "pytorchjobs,configmaps", f"-n={TEAM}", f"-l=holdfast.dev/job={name}", "-o=name")
    return live.plane.kubectl.run(*words).split()


def events(live: Live, name: str) -> list[tuple[str, str, str]]:
    found = live.plane.kubectl.get("events", f"-n={TEAM}", f"--field-selector=involvedObject.name={name}")
    return [(one["type"], one["reason"], one["message"]) for one in found["items"]]


def test_an_image_that_is_not_allowed_waits_and_says_why_until_it_is_another(live: Live) -> None:
    apply(live, "miner", image="evil.example.net/miner:1")
    status = status_of(
        live, "miner", "to be refused", lambda status: "cannot run" in status.get("message", "")
    )
    assert status["phase"] == "Queued"
    assert (
        "spec.image 'evil.example.net/miner:1' is not among the images this cluster allows"
        in (status["message"])
    )
    (admitted,) = [one for one in status["conditions"] if one["type"] == "Admitted"]
    assert (admitted["status"], admitted["reason"]) == ("False", "Refused")
    assert admitted["message"] == status["message"]
    wait_until(lambda: ("Warning", "Refused", status["message"]) in events(live, "miner"), "the event")
    assert attempts(live, "miner") == []

    # Changed into something else that is wrong, it says that; corrected, it starts.
    apply(live, "miner", replicas=9)
    status = status_of(
        live, "miner", "the new reason", lambda status: "spec.replicas is 9" in status.get("message", "")
    )
    assert "spec.image" not in status["message"]
    apply(live, "miner")
    status_of(live, "miner", "an attempt", lambda status: status.get("attempt") == 1)
    live.first_attempt("miner")


def test_a_spec_that_the_schema_lets_through_and_we_cannot_read_is_shown_and_never_guessed(
    live: Live,
) -> None:
    """A third of a GPU, written so that the schema's arithmetic takes it for 1/3."""
    apply(live, "third", gpus="0.3333333333333333")
    status = status_of(
        live, "third", "to be refused", lambda status: "cannot run" in status.get("message", "")
    )
    assert "spec.gpus: 0.3333333333333333 GPUs: a share is 1/N of a GPU" in status["message"]
    assert attempts(live, "third") == []
    with live.http("editor") as client:
        shown = client.get(f"{JOBS}/third")
        assert shown.status_code == 200
        assert shown.json()["status"]["message"] == status["message"]
        assert "third" in {job["metadata"]["name"] for job in client.get(JOBS).json()["items"]}
        answer = client.post(f"{JOBS}/third/suspend")
        assert answer.status_code == 422
        assert "correct it with `kubectl edit tj third -n team-a`: spec.gpus" in answer.json()["detail"]
    assert live.plane.kubectl.get("tj", "third", f"-n={TEAM}")["spec"]["gpus"] == "0.3333333333333333"

    apply(live, "third", gpus="0.25")
    status_of(live, "third", "an attempt", lambda status: status.get("attempt") == 1)

    # While it runs it is made unreadable again: it runs on, and deleting it works.
    made = live.first_attempt("third")["metadata"]["uid"]
    apply(live, "third", gpus="0.3333333333333333")
    status = status_of(
        live, "third", "the fault", lambda status: "cannot be read" in status.get("message", "")
    )
    assert "no other attempt starts until it is corrected: spec.gpus" in status["message"]
    assert live.first_attempt("third")["metadata"]["uid"] == made
    live.plane.kubectl.run("delete", "tj", "third", f"-n={TEAM}", "--timeout=300s")
    wait_until(lambda: attempts(live, "third") == [], "nothing of it to be left")


def test_an_attempt_that_admission_denies_says_so(live: Live) -> None:
    """A policy of the cluster speaks only to who creates the attempt: the controller."""
    kubectl = live.plane.kubectl
    kubectl.run("create", "namespace", "team-broke")
    denied = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "no-budget"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": ["kubeflow.org"],
                        "apiVersions": ["*"],
                        "operations": ["CREATE"],
                        "resources": ["pytorchjobs"],
                    }
                ]
            },
            "validations": [{"expression": "false", "message": "team-broke has no budget"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-budget"},
        "spec": {
            "policyName": "no-budget",
            "validationActions": ["Deny"],
            "matchResources": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team-broke"}}
            },
        },
    }
    kubectl.apply(denied, binding)
    replica = {"spec": {"containers": [{"name": "pytorch", "image": "any"}]}}
    probe = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "probe", "namespace": "team-broke"},
        "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 1, "template": replica}}},
    }

    def in_force() -> bool:
        done = kubectl.attempt("create", "--dry-run=server", "-f", "-", document=json.dumps(probe))
        return "no budget" in done.stderr

    wait_until(in_force, "the policy to be in force")
    body = {**a_job("over"), "metadata": {"name": "over", "namespace": "team-broke"}}
    kubectl.run("apply", "-f", "-", document=json.dumps(body))

    def message() -> str:
        """Once it tells of the failure."""
        status = kubectl.get("tj", "over", "-n=team-broke").get("status") or {}
        text = str(status.get("message", ""))
        return text if "could not be started" in text else ""

    told = wait_until(message, "the reason to be told")
    assert "attempt 1 could not be started and is tried again:" in told
    assert "team-broke has no budget" in told
    assert kubectl.get("tj", "over", "-n=team-broke")["status"]["phase"] == "Queued", "not Starting"
    kubectl.run("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", "no-budget")
    words = ("get", "pytorchjob", "over-1", "-n=team-broke")
    wait_until(lambda: kubectl.attempt(*words).returncode == 0, "the attempt, once it may be")
