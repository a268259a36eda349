"""The GPU exporter and the slices of GPUs, as the chart renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from tests.chart.conftest import ELSEWHERE, Helm

pytestmark = pytest.mark.cluster

ON = "--set=exporter.enabled=true"


def exporter(helm: Helm, *arguments: str) -> dict[str, dict[str, Any]]:
    """Its objects by kind."""
    documents = helm.documents(ON, *arguments)
    return {one["kind"]: one for one in documents if one["metadata"]["name"] == "holdfast-exporter"}


def container(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (one,) = found["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(one, dict)
    return one


def test_it_is_off_unless_it_is_asked_for(helm: Helm) -> None:
    assert not [one for one in helm.documents() if one["kind"] == "DaemonSet"]
    assert "exporter" not in helm.render("--set=dashboards.enabled=false"), "a dashboard names its series"


def test_it_listens_at_addresses_of_every_kind(helm: Helm) -> None:
    program, *options = container(exporter(helm))["args"]
    assert (program, options[0]) == ("exporter", "--host=::"), "which YAML takes for a key where it is bare"


def test_it_may_list_pods_and_do_nothing_else(helm: Helm) -> None:
    assert exporter(helm)["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    ]


def test_it_is_root_without_the_rights_of_root(helm: Helm) -> None:
    found = exporter(helm)
    assert container(found)["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container(found)["resources"]["limits"]["memory"]
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["hostPID"] is True
    assert not pod.get("hostNetwork")
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == ["/var/lib/kubelet/pod-resources"]
    assert all(
        mount.get("readOnly") for mount in container(found)["volumeMounts"] if mount["name"] != "scratch"
    )
    ranks = container(exporter(helm, "--set=exporter.ranks=true"))
    added = ["SYS_PTRACE", "DAC_READ_SEARCH"]
    assert ranks["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": added}


def test_the_controller_asks_it_whether_jobs_use_their_gpus(helm: Helm) -> None:
    everything = ("--set-json=networkPolicy.from=[{}]",)
    documents = {(one["kind"], one["metadata"]["name"]): one for one in helm.documents(ON, *everything)}
    service = documents["Service", "holdfast-exporter"]["spec"]
    assert service["clusterIP"] == "None", "one name for all of them"
    (controller,) = documents["Deployment", "holdfast"]["spec"]["template"]["spec"]["containers"]
    where = {one["name"]: one.get("value") for one in controller["env"]}["HOLDFAST_GPU_EXPORTERS"]
    namespace = documents["Deployment", "holdfast"]["metadata"]["namespace"]
    assert where == f"holdfast-exporter.{namespace}.svc:{service['ports'][0]['port']}"
    # A policy that lets only some in lets the controller in, and the controller's lets it out.
    labels = documents["Deployment", "holdfast"]["spec"]["selector"]["matchLabels"]
    (ingress,) = documents["NetworkPolicy", "holdfast-exporter"]["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": labels}} in ingress["from"]
    assert {"podSelector": {"matchLabels": service["selector"]}} in [
        peer
        for rule in documents["NetworkPolicy", "holdfast"]["spec"]["egress"]
        for peer in rule.get("to", ())
    ]
    # Their addresses it has from a DNS, which on OpenShift listens at another port.
    ports = documents["NetworkPolicy", "holdfast"]["spec"]["egress"][0]["ports"]
    assert {port["port"] for port in ports if port["protocol"] == "UDP"} == {53, 5353}
    (alone,) = next(one for one in helm.documents() if one["kind"] == "Deployment")["spec"]["template"][
        "spec"
    ]["containers"]
    assert "HOLDFAST_GPU_EXPORTERS" not in {one["name"] for one in alone["env"]}


def test_a_driver_without_a_runtime_is_mounted(helm: Helm) -> None:
    found = exporter(
        helm,
        "--set=exporter.driverDirectory=/home/kubernetes/bin/nvidia/lib64,exporter.privileged=true",
        "--set=exporter.runtimeClassName=nvidia,exporter.kubeletDirectory=/data/kubelet",
    )
    assert container(found)["securityContext"]["privileged"] is True
    assert {"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"} in container(found)["env"]
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == ["/data/kubelet/pod-resources", "/home/kubernetes/bin/nvidia/lib64"]


def test_it_runs_where_gpus_are_whoever_marks_the_nodes(helm: Helm) -> None:
    def fits(labels: dict[str, str], *arguments: str) -> bool:
        pod = exporter(helm, *arguments)["DaemonSet"]["spec"]["template"]["spec"]
        affinity = pod.get("affinity", {}).get("nodeAffinity", {})
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
        marked = terms is None or any(
            all(
                labels.get(one["key"]) in one["values"] if one["operator"] == "In" else one["key"] in labels
                for one in term["matchExpressions"]
            )
            for term in terms
        )
        return marked and pod.get("nodeSelector", {}).items() <= labels.items()

    nvidia, gke = {"nvidia.com/gpu.present": "true"}, {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert fits(nvidia)
    assert fits(gke)
    assert not fits({"nvidia.com/gpu.present": "false"})
    assert not fits({})
    narrowed = "--set-json=exporter.nodeSelector=" + json.dumps(gke)
    assert fits(gke, narrowed), "the other label is not asked for as well"
    assert not fits({"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}, narrowed)
    assert fits(
        {"ours": "true"}, "--set-json=exporter.affinity=null", "--set-string=exporter.nodeSelector.ours=true"
    )


def test_it_is_scraped_with_its_own_labels_and_the_nodes_name(helm: Helm) -> None:
    (endpoint,) = exporter(helm, f"--api-versions={ELSEWHERE[1]}")["PodMonitor"]["spec"][
        "podMetricsEndpoints"
    ]
    assert endpoint["honorLabels"] is True
    assert endpoint["relabelings"][0]["targetLabel"] == "node"
    assert "PodMonitor" not in exporter(helm)


def test_slices_become_configurations_of_the_device_plugin(helm: Helm) -> None:
    documents = helm.documents("--set=gpuSharing.slices.quarters=4,gpuSharing.namespace=nvidia-device-plugin")
    (found,) = [one for one in documents if one["metadata"]["name"] == "holdfast-gpu-sharing"]
    assert found["metadata"]["namespace"] == "nvidia-device-plugin"
    assert set(found["data"]) == {"whole", "quarters"}
    written = yaml.safe_load(found["data"]["quarters"])
    assert written["sharing"]["timeSlicing"]["renameByDefault"] is True
    assert written["sharing"]["timeSlicing"]["resources"] == [{"name": "nvidia.com/gpu", "replicas": 4}]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("gpuSharing.slices.quarters=1", "at '/gpuSharing/slices/quarters': minimum: got 1, want 2"),
        ("gpuSharing.slices.Quarters=4", "additional properties 'Quarters' not allowed"),
        (
            "gpuSharing.slices.whole=4",
            "gpuSharing.slices.whole: that name is of the nodes whose GPUs are not",
        ),
        ("exporter.driverDirectory=lib", "at '/exporter/driverDirectory': 'lib' does not match pattern"),
        ("exporter.enable=true", "additional properties 'enable' not allowed"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(helm: Helm, value: str, told: str) -> None:
    done = helm.template(f"--set={value}")
    assert done.returncode != 0
    assert told in done.stderr
