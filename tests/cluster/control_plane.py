"""etcd, kube-apiserver, controller-manager and scheduler: all of Kubernetes that needs no root.

Alone they listen on free ports of loopback; on a node they take the usual ports of its own network. The
apiserver authenticates by certificate and token, authorizes by Node and RBAC, as a real one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.cluster.build import asset, program
from tests.cluster.certificates import Authority
from tests.cluster.component import Component, start
from tests.cluster.kubectl import Kubectl
from tests.cluster.site import Site
from tests.cluster.system import CONTROL_PLANE_PACKAGES, find, install

from holdfast_controller.local.ports import free_port

READY_SECONDS = 300
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc.cluster.local"


@dataclass(frozen=True)
class ControlPlane:
    """One that is ready."""

    url: str
    authority: Authority
    kubectl: Kubectl
    components: list[Component] = field(default_factory=list)

    @property
    def has_controllers(self) -> bool:
        """False for envtest's programs, which are etcd and an apiserver of some release."""
        return any(component.name == "kube-controller-manager" for component in self.components)

    def check(self) -> None:
        """Raises ComponentFailed for the first part that has ended."""
        for component in self.components:
            component.check()


@dataclass(frozen=True)
class Ports:
    """Where the control plane listens."""

    etcd: int
    peers: int
    apiserver: int

    @classmethod
    def free(cls) -> Ports:
        """Three that nobody has now."""
        return cls(free_port(), free_port(), free_port())


ON_A_NODE = Ports(2379, 2380, 6443)


@dataclass(frozen=True)
class Plan:
    """What the parts of one control plane have in common."""

    site: Site
    authority: Authority
    address: str
    ports: Ports
    prefix: Sequence[str]
    assets: bool
    lost_seconds: int | None = None

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.ports.apiserver}"

    def start(self, name: str, *arguments: str, kubeconfig: str = "") -> Component:
        """Start a Kubernetes component, as its own user where `kubeconfig` names one."""
        words = [str(program(name, assets=self.assets)), *arguments]
        if kubeconfig:
            path = self.site.state / f"{name}.kubeconfig"
            self.authority.kubeconfig(path, self.url, name, kubeconfig)
            words += [f"--{which}kubeconfig={path}" for which in ("", "authentication-", "authorization-")]
        return start(self.site, name, words, prefix=self.prefix)


def start_control_plane(
    site: Site,
    *,
    address: str = "127.0.0.1",
    ports: Ports | None = None,
    prefix: Sequence[str] = (),
    lost_seconds: int | None = None,
) -> ControlPlane:
    """Start all parts and wait until the API answers.

    `prefix` is the command that enters the node; empty for this machine. Without it, what
    `KUBEBUILDER_ASSETS` holds (etcd, kube-apiserver, kubectl) is taken from there, nothing is built, and
    there are no controllers, as in envtest. Pods of a node that is known to be silent are taken after
    `lost_seconds`, by default Kubernetes' own 300. Raises MissingTool, BuildFailed, ComponentFailed.
    """
    assets = not prefix
    install(
        {name: package for name, package in CONTROL_PLANE_PACKAGES.items() if not (assets and asset(name))}
    )
    plan = Plan(
        site, Authority(site.state / "pki"), address, ports or Ports.free(), prefix, assets, lost_seconds
    )
    plan.authority.kubeconfig(site.kubeconfig, plan.url, "admin", "holdfast-admin", group="system:masters")
    kubectl = Kubectl(site.kubeconfig, program("kubectl", assets=assets))
    apiserver_is_given = assets and asset("kube-apiserver")
    if not apiserver_is_given:
        program("kube-apiserver")  # builds them all, before anything waits for anything
    plane = ControlPlane(plan.url, plan.authority, kubectl, [_etcd(plan), _apiserver(plan)])
    # The namespace that tests use is made a moment after it says that it is ready.
    for looked in ("--raw=/readyz", "namespace/default"):
        plane.components[1].wait_ready(partial(_answers, kubectl, looked), READY_SECONDS)
    # Only now: before RBAC's own roles are there, they are refused, and end.
    if not apiserver_is_given:
        plane.components.extend([_controllers(plan), _scheduler(plan)])
    plane.check()
    return plane


def _answers(kubectl: Kubectl, looked: str) -> bool:
    return kubectl.attempt("get", looked, "--request-timeout=10s").returncode == 0


def running_control_plane(site: Site) -> ControlPlane:
    """That of a cluster with nodes, which is up; without its components, which somebody else has started."""
    url = f"https://{site.node_address}:{ON_A_NODE.apiserver}"
    return ControlPlane(url, Authority(site.state / "pki"), Kubectl(site.kubeconfig, program("kubectl")))


def _etcd(plan: Plan) -> Component:
    given = asset("etcd") if plan.assets else None
    clients = f"http://127.0.0.1:{plan.ports.etcd}"
    peers = f"http://127.0.0.1:{plan.ports.peers}"
    command = [
        given or find("etcd") or "etcd",
        f"--data-dir={plan.site.state / 'etcd'}",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--unsafe-no-fsync",  # nothing here outlives the machine
        "--log-level=warn",
    ]
    return start(plan.site, "etcd", command, prefix=plan.prefix)


def _apiserver(plan: Plan) -> Component:
    authority = plan.authority
    first_service = str(plan.site.services[1])
    certificate, key = authority.issue(
        "apiserver",
        "kube-apiserver",
        hosts=["localhost", "127.0.0.1", plan.address, first_service, "kubernetes", "kubernetes.default.svc"],
    )
    kubelet_certificate, kubelet_key = authority.issue(
        "apiserver-kubelet-client", "kube-apiserver-kubelet-client", group="system:masters"
    )
    public, private = authority.key_pair("service-accounts")
    return plan.start(
        "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{plan.ports.etcd}",
        f"--bind-address={plan.address}",
        f"--advertise-address={plan.address}",
        f"--secure-port={plan.ports.apiserver}",
        f"--service-cluster-ip-range={plan.site.services}",
        f"--tls-cert-file={certificate}",
        f"--tls-private-key-file={key}",
        f"--client-ca-file={authority.certificate}",
        f"--kubelet-client-certificate={kubelet_certificate}",
        f"--kubelet-client-key={kubelet_key}",
        # The node's name is nowhere resolved: logs and exec would fail on it.
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={public}",
        f"--service-account-signing-key-file={private}",
        f"--service-account-issuer={SERVICE_ACCOUNT_ISSUER}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        *_lost_after(plan),
    )


def _lost_after(plan: Plan) -> list[str]:
    if plan.lost_seconds is None:
        return []
    return [
        f"--default-{what}-toleration-seconds={plan.lost_seconds}" for what in ("not-ready", "unreachable")
    ]


def _controllers(plan: Plan) -> Component:
    return plan.start(
        "kube-controller-manager",
        f"--root-ca-file={plan.authority.certificate}",
        f"--service-account-private-key-file={plan.authority.key_pair('service-accounts')[1]}",
        "--use-service-account-credentials=true",
        f"--cluster-cidr={plan.site.pods}",
        f"--service-cluster-ip-range={plan.site.services}",
        # The node's CNI hands out addresses itself.
        "--allocate-node-cidrs=false",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        *_own_port(plan, 10257),
        kubeconfig="system:kube-controller-manager",
    )


def _scheduler(plan: Plan) -> Component:
    return plan.start(
        "kube-scheduler",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        *_own_port(plan, 10259),
        kubeconfig="system:kube-scheduler",
    )


def _own_port(plan: Plan, usual: int) -> list[str]:
    """The usual port in the node's own network; on a shared machine none, for nobody asks there."""
    return [f"--secure-port={usual if plan.prefix else 0}"]
