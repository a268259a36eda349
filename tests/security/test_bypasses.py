"""Ways round the rules that other platforms were taken by, each tried here on a real apiserver.

Named after what went wrong elsewhere: a job API without authentication (CVE-2023-48022, CVE-2026-2652),
default passwords (CVE-2026-2635), path traversal (CVE-2026-2033), missing namespace checks (CVE-2026-77596),
cluster roles too wide (CVE-2025-10725). What a job may say of its pods is in test_job_is_no_pod.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.chart.conftest import CHART, Helm
from tests.cluster.kubectl import Kubectl
from tests.security.conftest import OTHER, SYSTEM, TEAM, Live, a_job
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
JOBS = f"/v1/namespaces/{TEAM}/jobs"


# ---------------------------------------------------- an API that asks nobody (CVE-2023-48022, CVE-2026-2652)


def test_a_job_cannot_be_submitted_by_nobody(live: Live) -> None:
    with live.http(None) as client:
        for headers in ({}, {"Content-Type": "application/yaml"}, {"Idempotency-Key": "k"}):
            for query in ({}, {"dryRun": "true"}):
                answer = client.post(JOBS, json=a_job("mine"), headers=headers, params=query)
                assert answer.status_code == 401
    assert live.plane.kubectl.attempt("get", "tj", "mine", f"-n={TEAM}").returncode == 1


# -------------------------------------------------------------------------- default passwords (CVE-2026-2635)


def test_the_chart_brings_no_secret_and_no_password(helm: Helm) -> None:
    documents = helm.documents()
    assert not [one for one in documents if one["kind"] == "Secret"]
    (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
    words = re.compile("password|secret|token|credential", re.IGNORECASE)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert not [one for one in container["env"] if words.search(one["name"])]
    assert "no-token" not in json.dumps(container)
    written = (CHART / "values.yaml").read_text()
    assert {
        found.lower() for found in re.findall(r"^\s*\w*(?:password|token)\w*:", written, re.MULTILINE)
    } == set()


# ----------------------------------------------------------------------------- path traversal (CVE-2026-2033)

UP = ("..", "../x", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e", "a%2fb", "a%00b", "gpt%0a", "..%5c..",
      "%c0%ae%c0%ae", "gpt%2flogs", "gpt;x", "~root", "$(id)", "A", "-a", "a" * 51)  # fmt: skip


@pytest.mark.parametrize("name", UP)
def test_no_name_leads_out_of_its_namespace(live: Live, name: str) -> None:
    """A name becomes a path of the apiserver and a directory of the run's storage."""
    submitted_to = f"{JOBS}/{name}"
    with live.http("editor") as client:
        for path in (submitted_to, f"{submitted_to}/logs", f"{submitted_to}/ledger"):
            answer = client.get(path)
            assert answer.status_code in (400, 403, 404, 422), f"{path}: {answer.status_code} {answer.text}"
            assert "root:" not in answer.text
        assert client.get(f"/v1/namespaces/{name}/jobs").status_code in (400, 403, 404, 422)
        assert client.post(JOBS, json=a_job(name)).status_code == 422


@pytest.mark.parametrize(
    "query",
    [
        {"attempt": "../../../../etc/passwd"},
        {"attempt": "0"},
        {"attempt": "99999999999999999999"},
        {"rank": "../rank-0"},
        {"rank": "-1"},
        {"rank": "99999999999999999999"},
        {"file": "/etc/passwd"},
        {"tail": "1e9"},
    ],
)
def test_no_query_leads_out_of_a_log(live: Live, query: dict[str, str]) -> None:
    with live.http("editor") as client:
        client.post(JOBS, json=a_job("logged"))
        answer = client.get(f"{JOBS}/logged/logs", params=query)
        assert answer.status_code in (404, 422), answer.text


@pytest.mark.parametrize(
    ("storage", "told"),
    [
        ({"claim": "runs/../../etc"}, "storage.claim"),
        ({"claim": "../runs"}, "storage.claim"),
        ({"claim": "runs", "data": "/etc"}, "storage.data"),
        ({"claim": "runs", "subPath": "../other-job"}, "unknown key"),
        ({"hostPath": "/"}, "unknown key"),
    ],
)
def test_storage_is_a_claim_and_nothing_else(live: Live, storage: dict[str, str], told: str) -> None:
    with live.http("editor") as client:
        answer = client.post(JOBS, json=a_job("stored", storage=storage))
    assert answer.status_code == 422
    assert told in answer.text


# ------------------------------------------------------------------------- namespace checks (CVE-2026-77596)


def test_a_body_cannot_name_another_namespace_than_the_path(live: Live) -> None:
    body = a_job("smuggled")
    body["metadata"]["namespace"] = OTHER
    with live.http("editor") as client:
        answer = client.post(JOBS, json=body)
        assert answer.status_code == 422
        assert "metadata.namespace is 'team-b', but the job was sent to namespace 'team-a'" in answer.text
        assert client.post(f"/v1/namespaces/{OTHER}/jobs", json=body).status_code == 403
    assert live.plane.kubectl.attempt("get", "tj", "smuggled", "-A").returncode == 1


def test_lists_watches_and_pages_stay_in_their_namespace(live: Live) -> None:
    theirs = live.submit("theirs", "neighbour", OTHER)
    for number in range(3):
        live.submit(f"ours-{number}")
    with live.http("neighbour") as neighbour, live.http("editor") as client:
        page = neighbour.get(f"/v1/namespaces/{OTHER}/jobs", params={"limit": 1}).json()
        assert [item["metadata"]["uid"] for item in page["items"]][:1] != []
        for query in ({}, {"name": "theirs"}, {"limit": 1}, {"labelSelector": "!x"}):
            listed = client.get(JOBS, params=query).json()["items"]
            assert {item["metadata"]["namespace"] for item in listed} <= {TEAM}
        # A token of another list is a place in time, and shows nothing of that list.
        token = page["metadata"]["continue"]
        again = client.get(JOBS, params={"continue": token}) if token else None
        assert again is None or theirs["metadata"]["uid"] not in again.text
        with client.stream("GET", JOBS, params={"watch": "true"}) as stream:
            live.submit("also-theirs", "neighbour", OTHER)
            live.submit("the-last")
            told = []
            for line in stream.iter_lines():
                told.append(line)
                if '"the-last"' in line:
                    break
        assert not any("theirs" in line for line in told)


def test_an_idempotency_key_is_a_key_of_its_namespace(live: Live) -> None:
    """What one team's key made is not given to another team that guesses the key."""
    key = {"Idempotency-Key": "nightly"}
    with live.http("editor") as client, live.http("neighbour") as neighbour:
        ours = client.post(JOBS, json=a_job("nightly"), headers=key)
        other = neighbour.post(f"/v1/namespaces/{OTHER}/jobs", json=a_job("nightly"), headers=key)
    assert (ours.status_code, other.status_code) == (201, 201)
    assert ours.json()["metadata"]["uid"] != other.json()["metadata"]["uid"]
    assert other.json()["metadata"]["namespace"] == OTHER


def test_a_pod_of_another_namespace_is_no_replica(live: Live) -> None:
    """Labels are anybody's to write: a neighbour who knows a job's uid must not speak for it."""
    uid = live.submit("victim")["metadata"]["uid"]
    (replicas,) = live.first_attempt("victim")["spec"]["pytorchReplicaSpecs"].values()
    kubectl = live.plane.kubectl
    labels = {**replicas["template"]["metadata"]["labels"], "training.kubeflow.org/replica-index": "0"}
    assert uid in labels.values()
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "victim-1-worker-0", "namespace": OTHER, "labels": labels},
        "spec": {"containers": [{"name": "pytorch", "image": "any"}]},
    }
    kubectl.run("wait", f"-n={OTHER}", "--for=create", "serviceaccount/default", "--timeout=300s")
    kubectl.run("create", "-f", "-", document=json.dumps(pod))
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    status = {
        "phase": "Failed",
        "containerStatuses": [
            {
                "name": "pytorch", "image": "any", "imageID": "", "ready": False, "restartCount": 0,
                "state": {"terminated": ended},
            }
        ],
    }  # fmt: skip
    where = (f"-n={OTHER}", "pod", "victim-1-worker-0")
    kubectl.run(
        "patch", *where, "--subresource=status", "--type=merge", f"-p={json.dumps({'status': status})}"
    )
    # A write that the controller answers proves that it has looked at the job since.
    kubectl.run(
        "patch", "tj", "victim", f"-n={TEAM}", "--type=merge", '-p={"spec":{"ttlSecondsAfterFinished":9}}'
    )

    def seen() -> Any:
        job = kubectl.get("tj", "victim", f"-n={TEAM}")
        return job["status"].get("observedGeneration") == job["metadata"]["generation"] and job["status"]

    found = wait_until(seen, "the controller to look at the job")
    assert (found["failures"], found["disruptions"], found["attempt"]) == (0, 0, 1)
    with live.http("editor") as client:
        assert client.delete(f"{JOBS}/victim").status_code == 202
        wait_until(lambda: client.get(f"{JOBS}/victim").status_code == 404, "the job to go")
    assert kubectl.get("pod", "victim-1-worker-0", f"-n={OTHER}")["metadata"].get("deletionTimestamp") is None


# -------------------------------------------------------------------- cluster roles too wide (CVE-2025-10725)


def can(kubectl: Kubectl, user: str, verb: str, what: str, namespace: str = SYSTEM, *groups: str) -> bool:
    as_groups = [f"--as-group={group}" for group in groups]
    resource, _, part = what.partition("/")
    subresource = [f"--subresource={part}"] if part else []
    done = kubectl.attempt(
        "auth", "can-i", verb, resource, *subresource, f"-n={namespace}", f"--as={user}", *as_groups
    )
    return done.stdout.strip() == "yes"


def test_nobody_gets_a_right_by_being_logged_in(live: Live, helm: Helm) -> None:
    kubectl = live.plane.kubectl
    for user, group in (("system:anonymous", "system:unauthenticated"), ("jane", "system:authenticated")):
        for verb in ("list", "create", "delete"):
            assert not can(kubectl, user, verb, "trainingjobs.holdfast.dev", TEAM, group), (user, verb)
    subjects = [
        (subject["kind"], subject["name"])
        for one in helm.documents()
        if one["kind"].endswith("RoleBinding")
        for subject in one["subjects"]
    ]
    assert {kind for kind, _ in subjects} == {"ServiceAccount"}


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("get", "secrets"),
        ("list", "secrets"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("create", "pods/ephemeralcontainers"),
        ("create", "serviceaccounts/token"),
        ("impersonate", "users"),
        ("bind", "clusterroles.rbac.authorization.k8s.io"),
        ("escalate", "clusterroles.rbac.authorization.k8s.io"),
        ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
        ("update", "nodes"),
        ("create", "deployments.apps"),
        ("update", "customresourcedefinitions.apiextensions.k8s.io"),
        ("delete", "persistentvolumeclaims"),
        ("list", "configmaps"),
    ],
)
def test_who_takes_the_controller_has_not_taken_the_cluster(live: Live, verb: str, what: str) -> None:
    account = f"system:serviceaccount:{SYSTEM}:live-holdfast"
    assert can(live.plane.kubectl, account, "list", "pods"), "the account is the controller's"
    assert not can(live.plane.kubectl, account, verb, what)
