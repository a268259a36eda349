"""A job is never a pod: what a submitter may say is a narrow list, whichever way he says it.

Elsewhere a submitter's `secretKeyRef` was enough (CVE-2026-83495). Here env is literal, storage is a claim,
images come from a list, and what a job leaves out counts against the caps too.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.security.conftest import TEAM, Live, a_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
JOBS = f"/v1/namespaces/{TEAM}/jobs"


SECRET = {"secretKeyRef": {"name": "registry", "key": "password"}}
DETOURS: list[dict[str, Any]] = [
    {"env": {"PASSWORD": {"valueFrom": SECRET}}},
    {"env": [{"name": "PASSWORD", "valueFrom": SECRET}]},
    {"envFrom": [{"secretRef": {"name": "registry"}}]},
    {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
    {"volumeMounts": [{"name": "host", "mountPath": "/host"}]},
    {"hostPath": "/"},
    {"hostNetwork": True},
    {"hostPID": True},
    {"privileged": True},
    {"securityContext": {"privileged": True, "runAsUser": 0}},
    {"serviceAccountName": "holdfast"},
    {"automountServiceAccountToken": True},
    {"initContainers": [{"image": "registry.example.org/team/trainer:1"}]},
    {"template": {"spec": {"hostNetwork": True}}},
    {"nodeName": "control-plane"},
    {"nodeSelector": {"node-role.kubernetes.io/control-plane": ""}},
    {"tolerations": [{"operator": "Exists"}]},
    {"resources": {"cpu": "1", "nvidia.com/gpu": "8"}},
    {"imagePullSecrets": [{"name": "registry"}]},
    {"priorityClassName": "system-node-critical"},
    {"env": {"HOLDFAST_RUN_DIR": "/"}},
    {"env": {"PET_NNODES": "1"}},
]


@pytest.mark.parametrize("spec", DETOURS, ids=lambda spec: json.dumps(spec)[:50])
def test_a_job_is_no_pod(live: Live, spec: dict[str, Any]) -> None:
    with live.http("editor") as client:
        for query in ({}, {"dryRun": "true"}):
            answer = client.post(JOBS, json=a_job("detour", **spec), params=query)
            assert answer.status_code == 422, answer.text
    refused = live.plane.kubectl.attempt(
        "create", "--validate=strict", f"-n={TEAM}", "-f", "-", document=json.dumps(a_job("detour", **spec))
    )
    assert refused.returncode
    # Who tells kubectl not to look gets a job without it.
    done = live.plane.kubectl.attempt(
        *("create", "--validate=ignore", "--dry-run=server", "-o=json", f"-n={TEAM}", "-f", "-"),
        document=json.dumps(a_job("detour", **spec)),
    )
    if done.returncode == 0:
        kept = json.loads(done.stdout)["spec"]
        (key,) = spec
        assert key not in kept or "nvidia.com/gpu" not in kept[key]


def test_the_pods_of_a_job_hold_no_credential_and_touch_no_host(live: Live) -> None:
    """What is literal stays literal: `$(NAME)` would be put together by the kubelet."""
    live.submit("plain", env={"A": "$(HOLDFAST_JOB) $$ $(secret)", "LD_PRELOAD": "/x.so"}, replicas=2)
    (replicas,) = live.first_attempt("plain")["spec"]["pytorchReplicaSpecs"].values()
    template = replicas["template"]
    pod = template["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert not {
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "serviceAccountName",
        "nodeName",
        "initContainers",
    } & set(pod)
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"persistentVolumeClaim", "configMap", "emptyDir"}
    (container,) = pod["containers"]
    assert "envFrom" not in container
    assert {kind for one in container["env"] for kind in one.get("valueFrom", {})} <= {"fieldRef"}
    (literal,) = [one["value"] for one in container["env"] if one["name"] == "A"]
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", literal), f"the kubelet would expand {literal!r}"
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_labels_of_a_job_are_not_labels_of_its_pods(live: Live) -> None:
    """Or a submitter could put his pods behind another team's Service, or out of a NetworkPolicy."""
    body = a_job("labelled")
    body["metadata"]["labels"] = {"app": "payments", "app.kubernetes.io/managed-by": "somebody"}
    body["metadata"]["annotations"] = {"holdfast.dev/idempotency-key": "0" * 40}
    with live.http("editor") as client:
        assert client.post(JOBS, json=body).status_code == 201
    (replicas,) = live.first_attempt("labelled")["spec"]["pytorchReplicaSpecs"].values()
    labels = replicas["template"]["metadata"]["labels"]
    assert "app" not in labels
    assert labels["app.kubernetes.io/managed-by"] == "holdfast"


# ------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize(
    "image",
    [
        "registry.example.org.evil.com/team/trainer:1",
        "evil.com/registry.example.org/team/trainer:1",
        "evil.com/team/trainer@sha256:" + "0" * 64,
        "registry.example.org/team/../other/trainer:1",
        "registry.example.org/other/trainer:1",
        "registry.example.org:443/team/trainer:1",
        "registry.example.org@evil.com/team/trainer:1",
        "REGISTRY.example.org.evil.com/team/x",
        "Registry.Example.Org/team/trainer:1",
        "registry.example.org/Team/trainer:1",
        "team/trainer:1",
        "registry.example.org/team/trainer:1 --privileged",
        "registry.example.org/team/trainer:1\n",
        "https://registry.example.org/team/trainer:1",
        "registry.example.org/team/trainer@sha256:" + "0" * 8,
    ],
)
def test_no_trick_of_writing_makes_an_image_allowed(live: Live, image: str) -> None:
    with live.http("editor") as client:
        answer = client.post(JOBS, json=a_job("image", image=image))
        assert answer.status_code == 422, answer.text
        assert "spec.image" in answer.text
        plan = client.post(JOBS, json=a_job("image", image=image), params={"dryRun": "true"}).json()
    assert plan["feasible"] is False
    assert plan["manifests"] == []


def test_caps_hold_for_what_a_job_leaves_out(live: Live) -> None:
    with live.http("editor") as client:
        for spec, told in (
            ({"replicas": 5}, "spec.replicas is 5 and this cluster allows at most 4"),
            ({"resources": {}}, "spec.resources.memory is missing and this cluster allows at most 64Gi"),
            ({"processes": 64}, "spec.resources.cpu (not given: one a rank) is 64"),
        ):
            answer = client.post(JOBS, json=a_job("big", **spec))
            assert answer.status_code == 422
            assert told in answer.text
