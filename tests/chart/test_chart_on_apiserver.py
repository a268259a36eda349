"""The chart and an attempt's manifests before a real apiserver: schemas, admission, install to uninstall."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.chart.conftest import CHART, SYSTEM, Helm, release
from tests.chart.schemas import write_schemas
from tests.chart.test_chart import WITH_ALL
from tests.chart.test_monitoring_chart import RULES_CRD
from tests.cluster import trainer, training_operator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Kubectl
from tests.cluster.trainingjobs import clear
from waiting import wait_until

pytestmark = pytest.mark.cluster

ATTEMPTS = Path(__file__).parents[1] / "controller" / "golden"
NETWORK_POLICY = Path(__file__).parents[2] / "k8s" / "network-policy.yaml"


@pytest.fixture(scope="module")
def kubectl(control_plane: ControlPlane, helm: Helm) -> Iterator[Kubectl]:
    """With the operator's kinds, and without ours: the chart brings them."""
    kubectl = control_plane.kubectl
    kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
    training_operator.serve_crd(kubectl)
    trainer.serve_crds(kubectl)
    yield kubectl
    if kubectl.attempt("get", "crd", "trainingjobs.holdfast.dev").returncode == 0:
        clear(kubectl)
    kubectl.run("delete", "crd", "trainingjobs.holdfast.dev", "--ignore-not-found")
    kubectl.run("delete", "namespace", SYSTEM, "team-a", "--ignore-not-found", "--timeout=300s")


def schemas(kubectl: Kubectl, directory: Path) -> str:
    """Where they are, as kubeconform takes it; the apiserver publishes those of CRDs a moment later."""

    def published() -> str:
        text = kubectl.run("get", "--raw", "/openapi/v2")
        return text if '.PyTorchJob"' in text and '.TrainJob"' in text else ""

    return write_schemas(json.loads(wait_until(published, "the schemas of attempts")), directory)


def test_notes_say_what_is_missing(helm: Helm, kubectl: Kubectl) -> None:
    kubectl.run("delete", "crd", training_operator.CRD)
    wait_until(
        lambda: (
            training_operator.CRD
            not in kubectl.run("api-resources", "--api-group=kubeflow.org", "-o=name").split()
        ),
        "the kind to be gone from discovery",
    )
    told = release(helm, kubectl, "upgrade", "--install", "holdfast", str(CHART), "--create-namespace")
    assert "MISSING: the Kubeflow Training Operator (no PyTorchJob in kubeflow.org/v1)" in told
    assert "sed 's|holdfast-trainer:0.1|IMAGE|' k8s/examples/prepare-data.yaml | kubectl apply -f -" in told
    other = ("--set=jobs.kind=TrainJob,jobs.defaultImage=registry.example.org/t:1", "--dry-run=server")
    told = release(helm, kubectl, "upgrade", "holdfast", str(CHART), *other)
    assert "MISSING" not in told, "the other operator is that which counts"
    # The sample names the image as it is built locally, which no node could pull.
    for sample in ("prepare-data", "gpt-stdlib-cluster"):
        assert f"sed 's|holdfast-trainer:0.1|registry.example.org/t:1|' k8s/examples/{sample}.yaml" in told
    training_operator.serve_crd(kubectl)


@pytest.mark.parametrize(
    ("verb", "resource", "viewer", "editor"),
    [
        ("get", "trainingjobs", "yes", "yes"),
        ("watch", "trainingjobs", "yes", "yes"),
        ("create", "trainingjobs", "no", "yes"),
        ("delete", "trainingjobs", "no", "yes"),
        ("patch", "trainingjobs/status", "no", "no"),
    ],
)
def test_whoever_may_edit_a_namespace_may_submit_there(
    helm: Helm, kubectl: Kubectl, verb: str, resource: str, viewer: str, editor: str
) -> None:
    release(helm, kubectl, "upgrade", "--install", "holdfast", str(CHART), "--create-namespace")
    for role, expected in (("view", viewer), ("edit", editor)):
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": role, "namespace": SYSTEM},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"{role}er"}],
        }
        kubectl.apply(binding)
        asked = ["auth", "can-i", verb, f"{resource.partition('/')[0]}.holdfast.dev", f"--as={role}er"]
        if "/" in resource:
            asked.append(f"--subresource={resource.partition('/')[2]}")

        def answered(asked: list[str] = asked, expected: str = expected) -> bool:
            return kubectl.attempt(*asked, f"-n={SYSTEM}").stdout.strip() == expected

        # Aggregation is a controller's work: it follows within a moment.
        wait_until(answered, f"a {role}er to be told {expected!r}")
    assert (
        kubectl.attempt("auth", "can-i", verb, "tj", "--as=stranger", f"-n={SYSTEM}").stdout.strip() == "no"
    )


GPUS = (
    "--set=exporter.enabled=true,exporter.ranks=true,exporter.runtimeClassName=nvidia",
    "--set=exporter.driverDirectory=/home/kubernetes/bin/nvidia",
    "--set=gpuSharing.namespace=gpu-operator,gpuSharing.slices.a100=4,gpuSharing.slices.t4=2",
    "--set-string=jobs.rdmaResources.rdma/hca=1,jobs.ncclEnvironment.NCCL_IB_DISABLE=0",
)
STRICT = (
    "--set=replicas=1,image.pullSecrets[0]=registry,jobs.imagePullSecrets[0]=registry,jobs.drillNodes=true",
    "--set=jobs.allowedImages[0]=registry.example.org/team/*,jobs.readNodes=false,jobs.defaultClaim=runs",
    "--set=jobs.sharedMemory=2Gi,jobs.scratch=5Gi",
    '--set-json=jobs.prices.perHour=[{"capacity": "Spot", "price": 1.5}]',
    "--set=nodeSelector.pool=system,tolerations[0].operator=Exists",
    "--set=networkPolicy.from[0].podSelector.matchLabels.app=prometheus,networkPolicy.apiServerPorts={6443}",
    "--set=monitoring.enabled=false,dashboards.enabled=false,alerts.enabled=false",
)
OTHERS = ("HTTPRoute", "PodMonitor", "PrometheusRule", "ServiceMonitor")
"""Kinds of other charts, of which a bare apiserver has no schema."""


@pytest.mark.parametrize(
    "values",
    [
        pytest.param((), id="zero values"),
        pytest.param((*WITH_ALL, RULES_CRD, *GPUS), id="all features"),
        pytest.param(GPUS, id="GPUs on a cluster without monitoring"),
        pytest.param(STRICT, id="narrow"),
    ],
)
def test_everything_is_of_the_schemas_that_the_apiserver_serves(
    helm: Helm, kubeconform: Path, kubectl: Kubectl, tmp_path: Path, values: tuple[str, ...]
) -> None:
    location = schemas(kubectl, tmp_path)
    rendered = tmp_path / "chart.yaml"
    rendered.write_text(helm.render(*values))
    theirs = [one for one in helm.documents(*values) if one["kind"] in OTHERS]
    samples = [rendered, NETWORK_POLICY, *sorted(ATTEMPTS.glob("*.yaml"))]
    strictly = ["-summary", "-output", "text", "-skip", ",".join(OTHERS)]
    done = subprocess.run(
        [str(kubeconform), *strictly, "-schema-location", location, *map(str, samples)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Invalid: 0, Errors: 0, Skipped: {len(theirs)}" in done.stdout
    kinds = {one["kind"] for one in theirs}
    assert kinds == (set(OTHERS) if RULES_CRD in values else set())


def test_a_misspelt_field_would_be_seen(kubeconform: Path, kubectl: Kubectl, tmp_path: Path) -> None:
    location = schemas(kubectl, tmp_path)
    text = (ATTEMPTS / "cpu-two-replicas.yaml").read_text().replace("runAsNonRoot", "runAsNonroot")
    done = subprocess.run(
        [str(kubeconform), "-schema-location", location, "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "runAsNonroot" in done.stdout


@pytest.mark.parametrize("path", sorted(ATTEMPTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_apiserver_takes_an_attempt_as_it_is(kubectl: Kubectl, path: Path) -> None:
    kubectl.attempt("create", "namespace", "team-a")
    kubectl.run(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
        document=path.read_text(),
    )


@pytest.mark.parametrize("path", sorted(ATTEMPTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_pod_security_admission_lets_the_replicas_in(kubectl: Kubectl, path: Path) -> None:
    """The same rules that a namespace labelled `restricted` is held to, by the admission that holds it."""
    kubectl.attempt("create", "namespace", "restricted")
    kubectl.run(
        *("label", "namespace", "restricted", "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    )
    documents = {one["kind"]: one["spec"] for one in yaml.safe_load_all(path.read_text()) if "spec" in one}
    if "PyTorchJob" in documents:
        template = documents["PyTorchJob"]["pytorchReplicaSpecs"]["Worker"]["template"]
    else:
        (pods,) = documents["TrainingRuntime"]["template"]["spec"]["replicatedJobs"]
        template = pods["template"]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = {**template["metadata"], "name": "a", "namespace": "restricted"}
    kubectl.run("wait", "-n=restricted", "--for=create", "serviceaccount/default", "--timeout=300s")
    bad = copy.deepcopy(pod)
    bad["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True

    def refused() -> bool:
        done = kubectl.attempt("create", "--dry-run=server", "-f", "-", document=json.dumps(bad))
        return 'violates PodSecurity "restricted' in done.stderr

    # The label counts once admission has seen it.
    wait_until(refused, "another pod to be refused")
    kubectl.run("create", "--dry-run=server", "-f", "-", document=json.dumps(pod))
