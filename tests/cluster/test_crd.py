"""The TrainingJob CRD on a real apiserver: it refuses what the model refuses and shows what people ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from scripts.crd import COLUMNS, definition, status_schema
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Kubectl
from tests.cluster.trainingjobs import clear, install

from holdfast_controller.columns import KEY, columns
from holdfast_controller.jobs import Phase, Spec, Status, TrainingJob

pytestmark = pytest.mark.cluster

CRD = Path(__file__).parents[2] / "helm/holdfast/templates/crd.yaml"
NAMESPACE = "crd"


@pytest.fixture(scope="module")
def kubectl(control_plane: ControlPlane) -> Iterator[Kubectl]:
    install(control_plane.kubectl, yaml.safe_load(CRD.read_text()), namespaces=(NAMESPACE,))
    yield control_plane.kubectl
    clear(control_plane.kubectl)


def document(name: str = "a", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"command": ["true"], **spec},
    }


def model_takes(body: dict[str, Any]) -> bool:
    try:
        TrainingJob.model_validate(body)
    except ValidationError:
        return False
    return True


CASES: list[tuple[dict[str, Any], str]] = [
    # a job, and of the apiserver's refusal the words that help; empty: it is taken
    (document(), ""),
    (document(gpus=4), ""),
    (document(gpus="4"), ""),
    (document(gpus="0.25"), ""),
    (document(gpus="0.125", processes=1), ""),
    (document(gpus="0.3"), "a share is 1/N of a GPU"),
    (document(gpus="1.5"), "only whole numbers above 1"),
    (document(gpus="four"), "gpus is a number such as"),
    (document(gpus=-1), "gpus is a number such as"),
    (document(gpus=2, processes=2), ""),
    (document(gpus=2, processes=3), "NCCL cannot run two ranks on one device"),
    (document(gpus="0.5", processes=2), "NCCL cannot run two ranks on one device"),
    (document(gpus=1, mig="1g.10gb"), ""),
    (document(gpus="1", mig="1g.10gb"), ""),
    (document(gpus="1.0", mig="1g.10gb"), ""),
    (document(mig="1g.10gb"), "a replica uses one MIG device; set gpus to 1"),
    (document(gpus=2, mig="1g.10gb"), "a replica uses one MIG device; set gpus to 1"),
    (document(gpus="0.5", mig="1g.10gb"), "a replica uses one MIG device; set gpus to 1"),
    (document(gpus="one", mig="1g.10gb"), "gpus is a number such as"),
    (document(gpus=1, mig="a slice"), "spec.mig"),
    (document(processes=8), ""),
    (document(processes=65), "less than or equal to 64"),
    (document(processes=None, queue=None, storage=None, ttlSecondsAfterFinished=None), ""),
    (document(replicas=4, minReplicas=1), ""),
    (document(minReplicas=2), "minReplicas: not more than replicas"),
    (document(replicas=0), "greater than or equal to 1"),
    (document(capacity="Cheap"), 'supported values: "Spot", "SpotFirst", "OnDemandFirst", "OnDemand", "Any"'),
    (document(checkpoint={"every": 500}), ""),
    (document(checkpoint={"every": "90s"}), ""),
    (document(checkpoint={"every": "hourly"}), "checkpoint.every is one of"),
    (document(checkpoint={"every": "9" * 18 + "s"}), ""),
    (document(checkpoint={"every": "1" + "0" * 18}), "checkpoint.every is one of"),
    (document(checkpoint={"every": "auto", "keep": 0}), "greater than or equal to 1"),
    (document(resources={"cpu": 8, "memory": "64Gi"}), ""),
    (document(resources={"cpu": "500m"}), ""),
    (document(resources={"cpu": "0"}), "resources.cpu is a CPU quantity"),
    (document(resources={"cpu": "lots"}), "resources.cpu is a CPU quantity"),
    (document(resources={"memory": "64 GB"}), "resources.memory is a quantity"),
    (document(env={"A_b1": "$(X)"}), ""),
    (document(env={"1A": "x"}), "env: a name has letters"),
    (document(env={"RANK": "0"}), "are set by the platform"),
    (document(env={"HOLDFAST_ATTEMPT": "9"}), "are set by the platform"),
    (document(env={"A": 1}), "must be of type string"),
    (document(command=[]), "at least 1 items"),
    (document(queue="Team A"), "spec.queue"),
    (document(storage={}), "spec.storage.claim"),
    (document(storage={"claim": "runs/../../etc"}), "spec.storage.claim"),
    (document(config={"any": {"depth": [1, {"of": None}]}}), ""),
    (document(name="a" * 51), "metadata.name has at most 50"),
    (document(name="1a"), "starts with a letter"),
    (document(name="a.b"), "metadata.name has at most 50"),
    (document(hostNetwork=True), 'unknown field "spec.hostNetwork"'),
    (document(storage={"claim": "runs", "hostPath": "/"}), 'unknown field "spec.storage.hostPath"'),
]


@pytest.mark.parametrize(("body", "words"), CASES, ids=[json.dumps(one["spec"])[:60] for one, _ in CASES])
def test_the_apiserver_and_the_model_agree(kubectl: Kubectl, body: dict[str, Any], words: str) -> None:
    assert model_takes(body) is (words == "")
    done = kubectl.attempt(
        "create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", document=json.dumps(body)
    )
    if words:
        assert done.returncode
        assert words in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        # What it keeps means the same to us as what was sent.
        kept = json.loads(done.stdout)["spec"]
        assert Spec.model_validate(kept) == Spec.model_validate(body["spec"])


def test_defaults_are_those_of_the_model(kubectl: Kubectl) -> None:
    done = kubectl.run("create", "--dry-run=server", "-o", "json", "-f", "-", document=json.dumps(document()))
    kept = json.loads(done)["spec"]
    assert kept["checkpoint"] == {"every": "auto", "keep": 3}
    assert kept["retries"] == {"failures": 3}
    assert (kept["replicas"], kept["gpus"], kept["capacity"], kept["graceSeconds"]) == (1, "0", "Any", 30)


def test_explain_reads_well(kubectl: Kubectl) -> None:
    told = kubectl.run("explain", "tj.spec")
    assert "What to run." in told
    for name, field in definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ].items():
        assert field.get("description"), f"spec.{name} has no description"
        assert f"\n  {name}\t" in told
    assert "`auto`" in kubectl.run("explain", "tj.spec.checkpoint.every")


def test_a_status_comes_back_as_it_was_written_and_is_shown(kubectl: Kubectl) -> None:
    status = Status.model_validate(
        {
            "phase": "Running",
            "attempt": 3,
            "disruptions": 2,
            "goodput": 0.9713,
            "progress": {
                "step": 812,
                "durableStep": 800,
                "etaSeconds": 7500.4,
                "loss": 1.25,
                "updatedAt": datetime.now(UTC) - timedelta(hours=3),
            },
            "conditions": [
                {
                    "type": "Running",
                    "status": "True",
                    "reason": "Training",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
            "attempts": [{"number": 1, "verdict": "Disrupted", "lostSteps": 0, "logTail": {"0": "a\nb"}}],
        }
    )
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    kubectl.run("create", "-f", "-", document=json.dumps(document("shown", gpus=1, queue="team-a")))
    patch = json.dumps({"status": {**written, KEY: columns(status, "kubernetes")}})
    kubectl.run(
        "patch", f"-n={NAMESPACE}", "tj", "shown", "--subresource=status", "--type=merge", f"-p={patch}"
    )
    kept = kubectl.get(f"-n={NAMESPACE}", "tj", "shown")["status"]
    del kept[KEY]
    assert Status.model_validate(kept) == status

    lines = kubectl.run("get", "tj", f"-n={NAMESPACE}", "-o", "wide").splitlines()
    assert lines[0].split() == [
        "NAME",
        *(name.upper() for name, _, _, _ in COLUMNS),
    ]
    assert lines[1].split()[:-1] == (
        [
            "shown",
            "Running",
            "812",
            "3",
            "2",
            "0",
            "97.1%",
            "2h5m",
            "kubernetes",
            "Any",
            "team-a",
            "800",
            "3h",  # its figures' age: nobody has renewed them
        ]  # and its own
    )
    short = kubectl.run("get", "tj", f"-n={NAMESPACE}").splitlines()[0].split()
    assert short == ["NAME", "PHASE", "STEP", "ATTEMPT", "DISRUPTIONS", "FAILURES", "GOODPUT", "ETA", "AGE"]


def test_a_status_that_cannot_be_is_refused(kubectl: Kubectl) -> None:
    kubectl.run("create", "-f", "-", document=json.dumps(document("odd")))
    done = kubectl.attempt(
        *("patch", f"-n={NAMESPACE}", "tj", "odd", "--subresource=status", "--type=merge"),
        '-p={"status":{"phase":"Paused"}}',
    )
    assert "Unsupported value" in done.stderr
    assert set(status_schema()["properties"]["phase"]["enum"]) == {phase.value for phase in Phase}
