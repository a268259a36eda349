"""containerd, kubelet and kube-proxy, inside the machine: what makes it a node that runs pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster.build import program
from tests.cluster.component import Component, start
from tests.cluster.control_plane import ControlPlane
from tests.cluster.images import PAUSE, ImageStore
from tests.cluster.kubectl import Kubectl
from tests.cluster.machine import Machine, has_capability
from tests.cluster.site import Site
from tests.cluster.system import find

CAP_SYS_RESOURCE = 24
CNI_PROGRAMS = "/usr/lib/cni"
READY_SECONDS = 300


def start_containerd(machine: Machine) -> tuple[Component, ImageStore]:
    """containerd with its own root, state, socket and pod network; ready to take images."""
    site = machine.site
    _write_network(machine)
    site.images.mkdir(parents=True, exist_ok=True)
    runc_of(site).unlink(missing_ok=True)
    runc_of(site).symlink_to(find("runc") or "/usr/sbin/runc")
    config = site.node_state / "containerd.toml"
    config.write_text(_containerd_config(machine))
    command = [find("containerd") or "containerd", f"--config={config}"]
    component = start(site, "containerd", command, prefix=machine.enter)
    component.wait_ready(lambda: "containerd successfully booted" in component.tail(200), READY_SECONDS)
    store = ImageStore(site, machine.enter)
    store.remove_containers()
    return component, store


def runc_of(site: Site) -> Path:
    """What the node's containerd starts as runc: a link to it."""
    return site.node_state / "runc"


def _containerd_config(machine: Machine) -> str:
    site = machine.site
    # Root without CAP_SYS_RESOURCE may not lower oom_score_adj; runc would die of it with no word why.
    restrict = "false" if has_capability(CAP_SYS_RESOURCE) else "true"
    # Every ten seconds it would add up what each layer of each image takes, for figures that nobody reads.
    return f"""version = 2
root = "{site.images / "containerd"}"
state = "{site.node_state / "containerd"}"
oom_score = 0
[grpc]
  address = "{site.containerd_socket}"
[ttrpc]
  address = "{site.containerd_socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = {restrict}
  stream_server_address = "127.0.0.1"
  stats_collect_period = 3600
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc_of(site)}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{site.node_state / "cni"}"
"""


def _write_network(machine: Machine) -> None:
    site = machine.site
    directory = site.node_state / "cni"
    directory.mkdir()
    plugins: list[dict[str, Any]] = [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "hairpinMode": True,
            # The host masquerades what leaves it; inside the cluster addresses stay true.
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": str(site.node_state / "cni-addresses"),
                "ranges": [[{"subnet": str(site.node_pods)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    conflist = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
    (directory / "10-pods.conflist").write_text(json.dumps(conflist, indent=1))


def start_kubelet(machine: Machine, plane: ControlPlane) -> Component:
    """The kubelet, as the node of its site's name."""
    site = machine.site
    kubeconfig = plane.authority.kubeconfig(
        site.node_state / "kubelet.kubeconfig",
        plane.url,
        f"kubelet-{site.node_name}",
        f"system:node:{site.node_name}",
        group="system:nodes",
    )
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(plane.authority.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{site.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{site.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [site.dns_address],
        "clusterDomain": "cluster.local",
        # Each kubelet removes the logs of pods that it does not know, and would another's in the usual place.
        "podLogsDir": str(site.node_state / "pod-logs"),
        "resolvConf": str(site.node_state / "resolv.conf"),
        # There is no registry to fetch a collected image from again.
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "24h",
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "10s",
        "address": site.node_address,
        "healthzBindAddress": "127.0.0.1",
    }
    path = site.node_state / "kubelet.json"
    path.write_text(json.dumps(config, indent=1))
    return start(
        site,
        "kubelet",
        [
            program("kubelet"),
            f"--config={path}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={site.node_name}",
            f"--node-ip={site.node_address}",
        ],
        prefix=machine.enter,
    )


def start_proxy(machine: Machine, plane: ControlPlane) -> Component:
    """kube-proxy: Services, as iptables rules of the machine's own network."""
    site = machine.site
    kubeconfig = plane.authority.kubeconfig(
        site.node_state / "kube-proxy.kubeconfig", plane.url, "kube-proxy", "system:kube-proxy"
    )
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "mode": "iptables",
        "clusterCIDR": str(site.pods),
        "hostnameOverride": site.node_name,
        # Sizes of the connection table belong to the host, and are not to be changed from here.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "iptables": {"minSyncPeriod": "100ms"},
    }
    path = site.node_state / "kube-proxy.json"
    path.write_text(json.dumps(config, indent=1))
    return start(site, "kube-proxy", [program("kube-proxy"), f"--config={path}"], prefix=machine.enter)


def wait_node_ready(name: str, kubectl: Kubectl, kubelet: Component) -> None:
    """Until pods can be created and run. Raises ComponentFailed with the kubelet's words."""
    condition = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'

    def ready() -> bool:
        node = kubectl.attempt("get", "node", name, "-o", condition)
        # Pods are refused until the controllers have made their namespace's service account.
        return node.stdout == "True" and kubectl.attempt("get", "-n=default", "sa/default").returncode == 0

    kubelet.wait_ready(ready, READY_SECONDS)
