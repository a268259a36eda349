"""GPUs for a cluster that has none: NVIDIA's device plugin and the exporter over the stand-in for NVML.

One directory of the host is the node's driver: the library, and beside it the script that it answers from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster import images
from tests.cluster.build import program
from tests.cluster.cluster import Cluster
from tests.cluster.machine import Machine
from tests.cluster.oci import Image
from tests.cluster.system import run
from tests.waiting import wait_until

from holdfast_controller.cluster import GpuUse
from holdfast_controller.gpu_exporters import USES
from holdfast_controller.policy.gpu_request import SHARED, SLICES_LABEL

CHART = Path(__file__).parents[2] / "helm" / "holdfast"
PLUGIN = "docker.io/holdfast/device-plugin:1"
SLICES = 4
METRICS_PORT = 9401
ASK = """import asyncio, sys
from holdfast_controller.gpu_exporters import USES, GpuExporters
print(USES.dump_json(asyncio.run(GpuExporters(sys.argv[1]).look())).decode())
"""


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
    """The node's GPUs are advertised in quarters, as the chart configures it, while this holds.

    GPU feature discovery would say so by the node's label.
    """
    (config,) = chart("slices", namespace, "gpu-sharing", "--set=gpuSharing.slices.quarters=4")
    (driver / "config.yaml").write_text(config["data"]["quarters"])
    cluster.kubectl.apply(plugin_pod(driver, node), namespace=namespace)
    cluster.kubectl.run("label", "node", node, f"{SLICES_LABEL}={SLICES}", "--overwrite")
    try:
        yield
    finally:
        cluster.kubectl.attempt("label", "node", node, f"{SLICES_LABEL}-")
        cluster.kubectl.run("delete", "pod", "device-plugin", f"-n={namespace}", "--ignore-not-found")
        wait_until(lambda: shares(cluster, node) == 0, "the shares to be gone")


@dataclass(frozen=True)
class Exporter:
    """One at work, and where it answers."""

    cluster: Cluster
    namespace: str
    pod: str
    address: str
    """Its own host and port."""
    name: str
    """That of the headless Service, and the port, as the chart tells them to the controller."""

    def scrape(self) -> str:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.pod}:{METRICS_PORT}/proxy/metrics"
        return self.cluster.kubectl.run("get", "--raw", path)

    def uses(self) -> list[GpuUse]:
        """What jobs do with their GPUs, as a controller in a pod asks: of all exporters behind the name."""
        words = ("exec", f"-n={self.namespace}", self.pod, "--", "python", "-c", ASK, self.name)
        return USES.validate_json(self.cluster.kubectl.run(*words))


@contextmanager
def exporting(cluster: Cluster, namespace: str, driver: Path, node: str, image: str) -> Iterator[Exporter]:
    """The chart's exporter runs while this holds."""
    repository, _, tag = image.rpartition(":")
    here = {"kubernetes.io/hostname": node}
    values = (
        "--set=exporter.enabled=true,exporter.ranks=true,image.pullPolicy=Never",
        f"--set=exporter.driverDirectory={driver},image.repository={repository},image.tag={tag}",
        f"--set-json=exporter.affinity=null,exporter.nodeSelector={json.dumps(here)}",
    )
    # What is not in the namespace is named after the release.
    documents = chart(namespace, namespace, "exporter", *values)
    cluster.kubectl.apply(*documents)
    name = next(one["metadata"]["name"] for one in documents if one["kind"] == "DaemonSet")
    try:
        cluster.kubectl.run(*("rollout", "status", f"daemonset/{name}", f"-n={namespace}", "--timeout=300s"))
        (pod,) = cluster.kubectl.get("pods", f"-n={namespace}", "-l=app.kubernetes.io/component=exporter")[
            "items"
        ]
        address = f"{pod['status']['podIP']}:{METRICS_PORT}"
        (controller,) = chart(namespace, namespace, "deployment", *values)
        (container,) = controller["spec"]["template"]["spec"]["containers"]
        told = {one["name"]: one.get("value") for one in container["env"]}
        yield Exporter(cluster, namespace, pod["metadata"]["name"], address, told["HOLDFAST_GPU_EXPORTERS"])
    finally:
        for kind in ("clusterrolebinding", "clusterrole"):
            cluster.kubectl.run("delete", kind, name, "--ignore-not-found")


def shares(cluster: Cluster, node: str) -> int:
    """What the node has to give."""
    return int(cluster.kubectl.get("node", node)["status"]["allocatable"].get(SHARED, 0))


def processes_of(machine: Machine, uids: list[str]) -> dict[str, int]:
    """The stand-in for the trainer of each pod by the pod's uid, with the pid that it has on the node."""
    lines = machine.run(
        "for process in /proc/[0-9]*; do\n"
        '  [ "$(cat $process/comm 2>/dev/null)" = python ] || continue\n'
        '  echo "${process#/proc/} $(cat $process/cgroup 2>/dev/null | tr "\\n" " ")"\n'
        "done",
        "looking for the pods' processes",
    ).splitlines()
    # A fork of it is called the same until it runs something else: the oldest is the one.
    found = sorted(((int(line.split()[0]), line) for line in lines), reverse=True)
    return {uid: pid for pid, line in found for uid in uids if uid in line}
