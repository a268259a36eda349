"""The chart: its rendering was reviewed, what it may do is a list, and wrong values say what is wrong."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import assert_golden
from processes import Processes
from scripts.chart_values import Values
from tests.chart.conftest import CHART, ELSEWHERE, KUBERNETES, Helm

from holdfast_controller.pod_settings import PodSettings, load_pod_settings

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
WITH_ALL = (
    *(f"--api-versions={one}" for one in ELSEWHERE),
    "--set=ingress.enabled=true,ingress.host=jobs.example.org,ingress.tlsSecret=jobs-tls,ingress.className=nginx",
    "--set=httpRoute.enabled=true,httpRoute.parentRefs[0].name=public,httpRoute.hostnames[0]=jobs.example.org",
    "--set=monitoring.labels.release=prometheus,image.pullSecrets[0]=registry",
    "--set=jobs.provider=gke,jobs.limits.gpus=8,jobs.allowedImages[0]=registry.example.org/team/*",
)


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in documents if one["kind"] == kind]


GENERATED = ("crd", "dashboards", "alerts")


def without_generated(text: str) -> str:
    """What is generated has tests of its own, and thousands of lines."""
    return "---\n".join(
        one for one in text.split("---\n") if not any(f"templates/{name}.yaml" in one for name in GENERATED)
    )


def test_lint(each_helm: Helm) -> None:
    done = each_helm.attempt("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "arguments"), [("defaults", ()), ("everything", WITH_ALL)])
def test_golden_render(helm: Helm, name: str, arguments: tuple[str, ...]) -> None:
    text = helm.render(*arguments)
    assert_golden(HERE / "golden" / f"{name}.yaml", without_generated(text))


def test_names_of_digits_stay_names(helm: Helm) -> None:
    """A namespace may be called 2024, a Secret 123, a pool of nodes 1e3: a number is refused, or another."""
    done = helm.attempt(
        "template", "7", str(CHART), "-n=2024", f"--kube-version={KUBERNETES}", *WITH_ALL,
        "--set-string=image.pullSecrets[0]=123,ingress.tlsSecret=456,ingress.className=0x1",
        "--set-string=exporter.runtimeClassName=8,gpuSharing.namespace=1e5",
        "--set=exporter.enabled=true,gpuSharing.slices.1e3=2,replicas=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    documents = [one for one in yaml.safe_load_all(done.stdout) if one]
    for one in documents:
        metadata = one["metadata"]
        assert metadata.get("namespace", "2024") in ("2024", "1e5")
        assert metadata.get("labels", {}).get("app.kubernetes.io/instance", "7") == "7"
        assert all(subject["namespace"] == "2024" for subject in one.get("subjects", ()))
    pods = [one["spec"] for one in of_kind(documents, "Pod")]
    for kind in ("Deployment", "DaemonSet"):
        pods += [one["spec"]["template"]["spec"] for one in of_kind(documents, kind)]
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "123"}]] * 3
    assert {pod.get("runtimeClassName") for pod in pods} == {None, "8"}
    (ingress,) = of_kind(documents, "Ingress")
    assert (ingress["spec"]["ingressClassName"], ingress["spec"]["tls"][0]["secretName"]) == ("0x1", "456")
    # Bare, 1e5 and 1e3 are text to PyYAML and numbers to helm.
    assert '\n  namespace: "1e5"\n' in done.stdout
    assert '\n  "1e3": |\n' in done.stdout


def test_zero_values_need_no_other_chart(helm: Helm) -> None:
    kinds = {one["kind"] for one in helm.documents()}
    assert not {"ServiceMonitor", "PodMonitor", "Ingress", "HTTPRoute", "Secret"} & kinds
    assert {"ServiceMonitor", "PodMonitor", "Ingress", "HTTPRoute"} < {
        one["kind"] for one in helm.documents(*WITH_ALL)
    }


def test_the_definition_is_kept_on_uninstall(helm: Helm) -> None:
    (definition,) = of_kind(helm.documents(), "CustomResourceDefinition")
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


# -------------------------------------------------------------------------- rights


def rights(documents: list[dict[str, Any]]) -> list[str]:
    """A line for each thing that each role may do."""
    lines = []
    for role in (*of_kind(documents, "ClusterRole"), *of_kind(documents, "Role")):
        for rule in role["rules"]:
            for verb in rule["verbs"]:
                named = f" named {','.join(rule['resourceNames'])}" if "resourceNames" in rule else ""
                what = [
                    f"{resource}{'.' + group if group else ''}"
                    for group in rule.get("apiGroups", ())
                    for resource in rule.get("resources", ())
                ] + list(rule.get("nonResourceURLs", ()))
                lines += [f"{role['kind']} {role['metadata']['name']}: {verb} {one}{named}" for one in what]
    return lines


def bindings(documents: list[dict[str, Any]]) -> list[str]:
    return [
        f"{one['kind']} {one['metadata']['name']}: {one['roleRef']['name']} to {subject['kind']} "
        f"{subject['namespace']}/{subject['name']}"
        for one in (*of_kind(documents, "ClusterRoleBinding"), *of_kind(documents, "RoleBinding"))
        for subject in one["subjects"]
    ]


def test_golden_rights_are_the_reviewed_ones(helm: Helm) -> None:
    """Another right needs another line here, and so a reader."""
    documents = helm.documents(*WITH_ALL)
    assert_golden(HERE / "golden" / "rights.txt", "\n".join((*rights(documents), *bindings(documents), "")))


def test_no_right_is_wide(helm: Helm) -> None:
    for line in rights(helm.documents(*WITH_ALL)):
        assert "*" not in line
        assert not {"impersonate", "escalate", "bind"} & set(line.split())
        assert not any(f" {kind}" in line for kind in ("secrets", "serviceaccounts", "pods/exec"))
        if " nodes" in line:  # their labels say what is spot; nobody may list or change them
            assert line.endswith("controller: get nodes")
    assert not any(" nodes" in line for line in rights(helm.documents("--set=jobs.readNodes=false")))
    drilling = [line for line in rights(helm.documents("--set=jobs.drillNodes=true")) if " nodes" in line]
    assert [line.split(": ")[1] for line in drilling] == ["get nodes", "patch nodes"]
    for kind, theirs in (("PyTorchJob", {"pytorchjobs"}), ("TrainJob", {"trainjobs", "trainingruntimes"})):
        lines = rights(helm.documents(f"--set=jobs.kind={kind}"))
        of_attempts = [re.findall(r": (\w+) (\w+)\.(?:trainer\.)?kubeflow\.org$", line) for line in lines]
        allowed = [found[0] for found in of_attempts if found]
        assert {what for verb, what in allowed if verb == "create"} == theirs
        ended = {what for verb, what in allowed if verb == "delete"}
        assert ended == {"pytorchjobs", "trainjobs", "trainingruntimes"}, "of either kind, after a change"
    executing = set(rights(helm.documents("--set=jobs.execInPods=true"))) - set(rights(helm.documents()))
    assert executing == {f"ClusterRole holdfast-controller: {verb} pods/exec" for verb in ("create", "get")}
    for line in rights(helm.documents()):
        if "-view:" in line:
            assert line.split()[2] in ("get", "list", "watch")
        if "-edit:" in line:
            assert not line.endswith("/status.holdfast.dev"), "users do not write what was observed"


# ---------------------------------------------------------------------------- pods


def test_every_pod_fits_the_restricted_standard(helm: Helm) -> None:
    documents = helm.documents(*WITH_ALL)
    pods = [one["spec"] for one in of_kind(documents, "Pod")]
    pods += [one["spec"]["template"]["spec"] for one in of_kind(documents, "Deployment")]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert container["resources"]["limits"]["memory"]
        assert all({"configMap", "emptyDir"} & set(volume) for volume in pod.get("volumes", ()))


class _Starting(BaseHTTPRequestHandler):
    """A controller that is not ready when it is asked for the first time, and lets nobody in."""

    asked = 0

    def do_GET(self) -> None:
        ready = self.path == "/readyz"
        code = 401 if not ready else 503 if not _Starting.asked else 200
        _Starting.asked += ready
        text = b'{"ready": true}' if code == 200 else b'{"ready": false, "checks": {"store": "not read yet"}}'
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def test_the_release_may_be_tested_as_soon_as_it_is_installed(helm: Helm, processes: Processes) -> None:
    """`helm install` does not wait: right after it nothing listens, then a controller is not ready yet."""
    (pod,) = of_kind(helm.documents(), "Pod")
    *_, program, url = pod["spec"]["containers"][0]["command"]
    assert url == "http://holdfast:8765"
    with socket.socket() as held:  # bound and not listening: whoever asks is refused
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        test = processes.start(
            [sys.executable, "-uc", program, f"http://127.0.0.1:{port}"],
            env={"no_proxy": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert test.stdout is not None
        assert "refused" in test.stdout.readline()
    server = HTTPServer(("127.0.0.1", port), _Starting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said, _ = test.communicate(timeout=300)
    finally:
        server.shutdown()
        server.server_close()
    assert test.returncode == 0, said
    assert "not read yet" in said
    assert 'readyz: {"ready": true}' in said


def test_who_names_those_that_reach_the_controller_may_test_the_release_all_the_same(helm: Helm) -> None:
    """`helm test` said for two minutes that it is not ready: the policy did not let its pod in."""
    documents = helm.documents("--set=networkPolicy.from[0].podSelector.matchLabels.app=mine")
    (policy,) = of_kind(documents, "NetworkPolicy")
    (test,) = of_kind(documents, "Pod")
    (ingress,) = policy["spec"]["ingress"]
    mine, ours = (peer["podSelector"]["matchLabels"] for peer in ingress["from"])
    assert mine == {"app": "mine"}
    assert ours.items() <= test["metadata"]["labels"].items()
    assert not ours.items() <= policy["spec"]["podSelector"]["matchLabels"].items(), "of the test alone"
    (open_to_all,) = of_kind(helm.documents(), "NetworkPolicy")[0]["spec"]["ingress"]
    assert "from" not in open_to_all


def test_the_controllers_reach_the_apiserver_of_small_clusters_too(helm: Helm) -> None:
    """A policy sees the port at which it listens itself. In MicroK8s they were never ready."""
    (policy,) = of_kind(helm.documents(), "NetworkPolicy")
    open_to_all = [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]
    assert {443, 6443, 8443, 16443} < {port["port"] for ports in open_to_all for port in ports}


def test_where_the_controllers_have_nodes_the_test_of_the_release_has_one(helm: Helm) -> None:
    """On a cluster whose other nodes are tainted, `helm test` waited for a place until its timeout."""
    documents = helm.documents(
        "--set=nodeSelector.pool=system,tolerations[0].key=CriticalAddonsOnly,tolerations[0].operator=Exists"
    )
    (test,) = of_kind(documents, "Pod")
    (deployment,) = of_kind(documents, "Deployment")
    for where in ("nodeSelector", "tolerations"):
        assert test["spec"][where] == deployment["spec"]["template"]["spec"][where] != []


def test_one_controller_can_always_be_drained(helm: Helm) -> None:
    (budget,) = of_kind(helm.documents(), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert not of_kind(helm.documents("--set=replicas=1"), "PodDisruptionBudget")


def test_a_change_of_the_jobs_settings_is_a_rollout(helm: Helm) -> None:
    def template(*arguments: str) -> Any:
        (deployment,) = of_kind(helm.documents(*arguments), "Deployment")
        return deployment["spec"]["template"]

    assert template() == template()
    assert template() != template("--set=jobs.provider=gke")


# -------------------------------------------------------------------------- values


def test_values_yaml_says_what_the_schema_says() -> None:
    written = yaml.safe_load((CHART / "values.yaml").read_text())
    assert Values.model_validate(written) == Values()
    assert set(written["jobs"]) == {field.alias for field in PodSettings.model_fields.values()}


def test_the_controller_reads_what_helm_writes(helm: Helm, tmp_path: Path) -> None:
    for arguments, expected in (((), PodSettings()), (WITH_ALL, None)):
        maps = of_kind(helm.documents(*arguments), "ConfigMap")
        (config,) = (one for one in maps if "jobs.yaml" in one["data"])
        path = tmp_path / "jobs.yaml"
        path.write_text(config["data"]["jobs.yaml"])
        settings = load_pod_settings(path)
        assert expected is None or settings == expected
    assert settings.limits.gpus == 8
    assert settings.allowed_images == ("registry.example.org/team/*",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("replica=3", "additional properties 'replica' not allowed"),
        ("jobs.alowedImages[0]=x", "additional properties 'alowedImages' not allowed"),
        ("jobs.provider=gcp", "value must be one of 'auto', 'gke', 'eks', 'karpenter', 'aks', 'generic'"),
        ("jobs.kind=JobSet", "value must be one of 'PyTorchJob', 'TrainJob'"),
        ("jobs.userId=0", "jobs/userId"),
        ("replicas=0", "replicas"),
        ("dashboards.labels=null", "missing property 'labels'"),
        ("networkPolicy.apiServerPorts=null", "missing property 'apiServerPorts'"),
        ("jobs=null", "missing property 'jobs'"),  # as of `jobs:` with nothing but comments below it
        ("networkPolicy=null,exporter=null", "missing properties 'networkPolicy', 'exporter'"),
        ("ingress.enabled=true", "ingress.host is the name under which REST is to be reached"),
        ("ingress.enabled=true,ingress.host=a.example.org", "ingress.tlsSecret names the Secret"),
        ("httpRoute.enabled=true", "httpRoute.parentRefs names the Gateway"),
    ],
)
def test_wrong_values_say_what_is_wrong(each_helm: Helm, given: str, message: str) -> None:
    done = each_helm.template(f"--set={given}")
    assert done.returncode
    assert message in done.stderr
