"""GPUs for a cluster that has none: NVIDIA's device plugin and the exporter over the stand-in for NVML.

One directory of the host is the node's driver: the library, and beside it the script that it answers from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.cluster import images
from tests.cluster.build import program
from tests.cluster.cluster import Cluster
from tests.cluster.machine import Machine
from tests.cluster.oci import Image
from tests.cluster.system import run
from waiting import wait_until

CHART = Path(__file__).parents[2] / "helm" / "holdfast"
PLUGIN = "docker.io/holdfast/device-plugin:1"
SHARED = "nvidia.com/gpu.shared"
METRICS_PORT = 9401


def plugin_image(library: Path) -> Image:
    """The plugin, and the C library that it and the stand-in are linked against."""
    binary = program("nvidia-device-plugin")
    libraries = {*images.libraries(binary), *images.libraries(library)}
    return Image(
        PLUGIN,
        files={"nvidia-device-plugin": binary, **{str(path).lstrip("/"): path for path in libraries}},
        directories=("tmp",),
        entrypoint=("/nvidia-device-plugin",),
        user="",
    )


def plugin_pod(driver: Path, node: str) -> dict[str, Any]:
    """Reads its configuration from the driver's directory too."""
    mounts = {"driver": str(driver), "plugins": "/var/lib/kubelet/device-plugins"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "device-plugin"},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "plugin",
                    "image": PLUGIN,
                    "args": ["--device-discovery-strategy=nvml", f"--config-file={driver}/config.yaml"],
                    "env": [{"name": "LD_LIBRARY_PATH", "value": str(driver)}],
                    "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
                }
            ],
            "volumes": [{"name": name, "hostPath": {"path": path}} for name, path in mounts.items()],
        },
    }


def chart(release: str, namespace: str, template: str, *values: str) -> list[dict[str, Any]]:
    """The objects of one template of the chart."""
    words = ["template", release, CHART, f"--namespace={namespace}", "--kube-version=1.36.3"]
    words += [f"--show-only=templates/{template}.yaml", *values]
    return [one for one in yaml.safe_load_all(run([program("helm"), *words], "rendering the chart")) if one]


@contextmanager
def sliced(cluster: Cluster, namespace: str, driver: Path, node: str) -> Iterator[None]:
    """The node's GPUs are advertised in quarters, as the chart configures it, while this holds."""
    (config,) = chart("slices", namespace, "gpu-sharing", "--set=gpuSharing.slices.quarters=4")
    (driver / "config.yaml").write_text(config["data"]["quarters"])
    cluster.kubectl.apply(plugin_pod(driver, node), namespace=namespace)
    try:
        yield
    finally:
        cluster.kubectl.run("delete", "pod", "device-plugin", f"-n={namespace}", "--ignore-not-found")
        wait_until(lambda: shares(cluster, node) == 0, "the shares to be gone", seconds=180)


@contextmanager
def exporting(cluster: Cluster, namespace: str, driver: Path, node: str, image: str) -> Iterator[str]:
    """The chart's exporter runs while this holds; yields the path of its metrics at the apiserver."""
    repository, _, tag = image.rpartition(":")
    here = {"kubernetes.io/hostname": node, "nvidia.com/gpu.present": None}
    documents = chart(
        namespace,  # what is not in the namespace is named after the release
        namespace,
        "exporter",
        "--set=exporter.enabled=true,exporter.ranks=true,image.pullPolicy=Never",
        f"--set=exporter.driverDirectory={driver},image.repository={repository},image.tag={tag}",
        f"--set-json=exporter.nodeSelector={json.dumps(here)}",
    )
    cluster.kubectl.apply(*documents)
    name = next(one["metadata"]["name"] for one in documents if one["kind"] == "DaemonSet")
    try:
        cluster.kubectl.run(
            *("rollout", "status", f"daemonset/{name}", f"-n={namespace}", "--timeout=180s"), seconds=200
        )
        (pod,) = cluster.kubectl.get("pods", f"-n={namespace}", "-l=app.kubernetes.io/component=exporter")[
            "items"
        ]
        where = f"{pod['metadata']['name']}:{METRICS_PORT}"
        yield f"/api/v1/namespaces/{namespace}/pods/{where}/proxy/metrics"
    finally:
        for kind in ("clusterrolebinding", "clusterrole"):
            cluster.kubectl.run("delete", kind, name, "--ignore-not-found")


def shares(cluster: Cluster, node: str) -> int:
    """What the node has to give."""
    return int(cluster.kubectl.get("node", node)["status"]["allocatable"].get(SHARED, 0))


def processes_of(machine: Machine, uids: list[str]) -> dict[str, int]:
    """The `sleep` of each pod by the pod's uid, with the pid that it has on the node."""
    lines = machine.run(
        "for process in /proc/[0-9]*; do\n"
        '  [ "$(cat $process/comm 2>/dev/null)" = sleep ] || continue\n'
        '  echo "${process#/proc/} $(tr "\\n" " " <$process/cgroup)"\n'
        "done",
        "looking for the pods' processes",
    ).splitlines()
    return {uid: int(line.split()[0]) for line in lines for uid in uids if uid in line}


def quarter(name: str, image: str, namespace: str) -> dict[str, Any]:
    """A pod as replica 0 of the first attempt of the job `name`, with a quarter of a GPU."""
    names = {"HOLDFAST_JOB": f"{namespace}/{name}", "HOLDFAST_ATTEMPT": "1", "RANK": "0"}
    labels = {
        "holdfast.dev/job": name,
        "holdfast.dev/attempt": "1",
        "training.kubeflow.org/replica-index": "0",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{name}-1-worker-0", "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsUser": 65532, "runAsGroup": 65532},
            "containers": [
                {
                    "name": "pytorch",
                    "image": image,
                    "command": ["sleep", "100000"],
                    "env": [{"name": key, "value": value} for key, value in names.items()],
                    "resources": {"limits": {SHARED: "1"}, "requests": {"cpu": "1m"}},
                }
            ],
        },
    }


def said(document: dict[str, Any]) -> str:
    """A pod's status in few words, for a message."""
    return json.dumps(document["status"].get("conditions", []))[:2000]
